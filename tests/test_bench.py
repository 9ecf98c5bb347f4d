"""bench/run.py: each work is a function with options, and runs. Its figures are no matter for a test."""
import os
import subprocess
import sys
from contextlib import nullcontext
from inspect import signature
from types import SimpleNamespace

import pytest

from configs import BASE, ROOT, VOCABULARY
from make_random_model import make_random_model
from test_qwen3_moe import MOE

sys.path.insert(0, str(ROOT / "bench"))
import run as bench_run  # noqa: E402
from run import WORKS  # noqa: E402


def run(*args):
    done = subprocess.run([sys.executable, ROOT / "bench/run.py", *map(str, args)], capture_output=True, text=True,
                          timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_list():
    lines = run("--list").splitlines()
    assert [line.split()[0] for line in lines] == [*WORKS]
    for work in WORKS.values():
        assert (ROOT / f"bench/{work.module}.py").exists()
    assert "bench/batch.py" not in (ROOT / "CONTRIBUTING.md").read_text()
    assert all(f"`{name}`" in (ROOT / "CONTRIBUTING.md").read_text() for name in WORKS if name != "speed")


def test_a_parameter_is_an_option():
    import works
    for name in (name for name, work in WORKS.items() if work.module == "works"):
        bench, *others = signature(getattr(works, name)).parameters.values()
        assert bench.name == "bench" and all(each.default is not each.empty for each in others)
    said = run("--only", "batch", "speech", "--help")
    assert "of batch (default: 1 2 4 8 16 32)" in said and "of speech (default: 30)" in said


def test_a_start_is_measured_with_the_peers_of_the_other_measurements(monkeypatch, tmp_path):
    """Such as a llama.cpp in $PYTHONPATH that is built for AVX2, while another one is installed."""
    import speed
    found = list[str]()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(speed.subprocess, "run", lambda *_, env, **more: found.append(env["PYTHONPATH"]))
    speed.start_up(SimpleNamespace(args=SimpleNamespace(threads=1, rounds=0), path=tmp_path, values={}), ["bf16"], [])
    assert found == [os.pathsep.join([str(ROOT / "bench"), str(tmp_path)])] * 2


@pytest.mark.parametrize("path, expected", [("vnni", None), ("avx2", "Haswell")])
def test_numpy_chooses_its_kernels_itself(monkeypatch, tmp_path, path, expected):
    """Whatever the environment says, unless all engines are held to AVX2."""
    found, given = list[str | None](), SimpleNamespace(list=False, threads=2, rounds=1, out=tmp_path, model=None)
    monkeypatch.setattr(os, "environ", dict(os.environ) | {"OPENBLAS_CORETYPE": "Prescott", "QWEN3_INT8_PATH": path})
    monkeypatch.setattr(bench_run, "Bench", lambda args: SimpleNamespace(stack=nullcontext()))
    monkeypatch.setattr(bench_run, "parsed", lambda: (given, {
        "talk": lambda bench: found.append(os.environ.get("OPENBLAS_CORETYPE"))}))
    bench_run.main()
    assert found == [expected]


@pytest.mark.bench
@pytest.mark.parametrize("name, model, options", [
    ("batch", BASE, ["--counts", 1, 2]), ("busy", BASE, ["--tokens", 4, "--prompt", 40]), ("embed", BASE, []),
    ("draft", BASE, ["--tokens", 8]), ("moe", MOE, []),
    ("hybrid", "tests/tiny_hybrid", ["--turn", 300]), ("mtp", "tests/tiny_hybrid", ["--tokens", 8]),
    ("speech", "tests/tiny_hearing", ["--length", 2, "--tokens", 3]),
    ("parts", BASE, ["--formats", "int8", "--lengths", 64, "--contexts", 16]),
    ("quality", BASE, ["--tables", "random"]),
    ("server", "demo", ["--clients", 1, "--tokens", 4, "--long", 40]),
    ("agents", "demo", ["--prompt", 300, "--turn", 40, "--other", 60]),
    ("kept", "demo", ["--conversations", 4, "--turns", 2, "--kills", 2])])
def test_a_work_on_a_small_model(name, model, options, tmp_path):
    """Peers that aren't there are named and left out."""
    path = ROOT / model if isinstance(model, str) else make_random_model(
        model | {"vocab_size": VOCABULARY, "max_position_embeddings": 4096}, tmp_path / "model", "bfloat16")
    text = run("--only", name, "--model", path, "--rounds", 1, "--out", tmp_path, "--engines", "int8", "llama-q8_0",
               *options)
    assert (tmp_path / f"{name.upper()}.md").read_text() in text and text.count("\n| ") > 1 and "nan" not in text
