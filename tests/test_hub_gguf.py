"""GGUF files by the hub's name of a model, owner/name:QUANTIZATION, against the hub of test_hub.py."""
import json
import os

import pytest

from helpers import assert_one_line, message_of, run_fast
from qwen3_io.hub import cached_models, check_blobs, chosen_gguf, gguf_names, quantization_of
from test_hub import (  # noqa: F401  the fixtures are used by name
    DEMO, USELESS, assert_refused, environment, get, hub)

pytestmark = pytest.mark.core

FILES = {f"Qwen3-0.6B-{form}.gguf": b"GGUF" + form.encode() for form in ("Q8_0", "Q4_K_M", "UD-Q4_K_M", "f16")}
PARTS = {f"Qwen3-0.6B-BF16-{i:05}-of-00003.gguf": b"GGUF" for i in (1, 2, 3)}
NAME = "Qwen/Qwen3-0.6B-GGUF"


@pytest.fixture
def models(hub):  # noqa: F811
    """The hub's models: one with a single file, one with several, one with parts, and one with safetensors files."""
    hub.models = {"tiny/one": {"tiny-Q8_0.gguf": b"GGUF1"} | USELESS, NAME: FILES | PARTS | USELESS | {
        "sub/Qwen3-0.6B-Q2_K.gguf": b"GGUF", "config.json": b"{}"}, "tiny/demo": DEMO}
    return hub.models


def assert_file(outcome, name, content):
    """The name led to this file, and nothing was printed."""
    path, message = outcome
    assert message == "" and path.name == name and path.read_bytes() == content


def test_the_only_file_is_downloaded_once(hub, models, get):  # noqa: F811
    outcome = get("tiny/one")
    assert_file(outcome, "tiny-Q8_0.gguf", b"GGUF1")
    assert hub.files_asked() == ["tiny-Q8_0.gguf"] and check_blobs(outcome[0]) == []
    hub.requests.clear()
    assert get("tiny/one:q8_0", "offline") == get(str(outcome[0].parents[2])) == outcome and hub.requests == []


def test_the_named_quantization_is_downloaded(hub, models, get, tmp_path, monkeypatch):  # noqa: F811
    outcome = get("qwen3-0.6b-gguf:q4_k_m")
    assert_file(outcome, "Qwen3-0.6B-Q4_K_M.gguf", b"GGUFQ4_K_M")
    assert outcome[0].parents[2].name == "models--Qwen--Qwen3-0.6B-GGUF"
    assert get(NAME, "offline") == outcome  # the only one in the cache
    assert_refused(get(f"{NAME}:Q8_0", "offline"), "no GGUF file Q8_0 in the hub's cache", f"{NAME}:Q4_K_M")
    assert_file(get(f"{NAME}:UD-Q4_K_M"), "Qwen3-0.6B-UD-Q4_K_M.gguf", b"GGUFUD-Q4_K_M")
    assert hub.files_asked() == ["Qwen3-0.6B-Q4_K_M.gguf", "Qwen3-0.6B-UD-Q4_K_M.gguf"]
    assert_refused(get(NAME, "offline"), "several GGUF files in the hub's cache; choose one of Q4_K_M, UD-Q4_K_M")
    assert_refused(get("tiny/one:Q8_0", "offline"), "not (or not completely)", "--include '*Q8_0.gguf'")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "home/hub"))
    assert cached_models() == [(f"{NAME}:{form}", outcome[0].with_name(f"Qwen3-0.6B-{form}.gguf"))
                               for form in ("Q4_K_M", "UD-Q4_K_M")]


def test_a_name_that_leaves_the_choice_open(hub, models, get):  # noqa: F811
    listed = f"choose one of Q4_K_M, Q8_0, UD-Q4_K_M, f16, like this: {NAME}:Q4_K_M"
    assert_refused(get(NAME), f"{NAME}: has several GGUF files on the hub; {listed}")
    assert_refused(get(f"{NAME}:Q2_K"), f"{NAME}: has no GGUF file Q2_K on the hub; {listed}")
    assert_refused(get("tiny/demo:Q8_0"), "tiny/demo: has no GGUF files on the hub", "leave out :Q8_0")
    assert hub.files_asked() == []


def test_parts_are_refused(hub, models, get):  # noqa: F811
    words = "one of the parts", "llama-gguf-split --merge"
    assert_refused(get(f"{NAME}:BF16"), f"{NAME}: Qwen3-0.6B-BF16-00001-of-00003.gguf is", *words)
    models["tiny/one"] = PARTS
    assert_refused(get("tiny/one"), "tiny/one: Qwen3-0.6B-BF16-00001-of-00003.gguf is", *words)
    assert hub.files_asked() == []


def test_a_broken_off_download_is_completed(hub, models, get):  # noqa: F811
    outcome = get("tiny/one")
    outcome[0].resolve().unlink()  # the link that remains leads nowhere
    assert_refused(get("tiny/one", "offline"), "not completely")
    assert get("tiny/one") == outcome and outcome[0].read_bytes() == b"GGUF1"


def test_quantizations():
    names = {"Qwen3-8B-Q4_K_M": "Q4_K_M", "Qwen3-8B-UD-Q4_K_XL": "UD-Q4_K_XL", "qwen3-8b.i1-IQ4_XS": "IQ4_XS",
             "Qwen3-0.6B.Q8_0": "Q8_0", "Qwen3-Embedding-0.6B-f16": "f16", "model": "model", "Q8_0": "Q8_0",
             "ggml-model-Q4_K_M-00002-of-00012": "Q4_K_M", "a-": "a-"}
    assert {name: quantization_of(f"{name}.gguf") for name in names} == names
    same = ["a-Q8_0.gguf", "b-Q8_0.gguf", "b-F16.gguf"]
    assert gguf_names(same) == {"a-Q8_0": "a-Q8_0.gguf", "F16": "b-F16.gguf", "b-Q8_0": "b-Q8_0.gguf"}
    assert chosen_gguf("a/b", same, "B-q8_0", "here") == "b-Q8_0.gguf"
    assert_one_line(message_of(chosen_gguf, "a/b", same, "Q8_0", "here"), "several", "a-Q8_0, F16, b-Q8_0")
    many = [f"{'q' * 120}{i}.gguf" for i in range(100)]
    assert_one_line(message_of(chosen_gguf, "a/b", many, "", "here"), "a/b: has several GGUF files here")


def test_the_command_line(hub, models, environment, tmp_path):  # noqa: F811
    """Downloads the bundled model as a GGUF file, and answers with it; --list shows it by the same name."""
    pytest.importorskip("gguf", reason="gguf is not installed: pip install gguf")
    from configs import FRANCE, PARIS
    from test_gguf_file import DEMO as FOLDER
    from test_gguf_file import write_gguf
    file = write_gguf(FOLDER, tmp_path / "demo.gguf", "Q8_0")
    models["tiny/qwen-GGUF"] = {"demo-Q8_0.gguf": file.read_bytes(), "demo-Q4_0.gguf": b"GGUF"}
    done = run_fast("--model", "tiny/qwen-GGUF:Q8_0", "--no-think", FRANCE, program="qwen3.py", env=environment)
    assert (done.returncode, done.stdout.strip()) == (0, PARIS.strip()), done.stderr
    done = run_fast("--list", "--json", program="qwen3.py", env=environment)
    listed = json.loads(done.stdout.splitlines()[-1])
    assert listed["name"] == "tiny/qwen-GGUF:Q8_0" and listed["bytes"] == os.path.getsize(file) and listed["runs"]
