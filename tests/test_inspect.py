"""qwen3_inspect.py: what is recorded is what the model does, what the page holds is true, and bad input is one line.

The page itself, in a browser: test_inspect_browser.py.
"""
import base64
import hashlib
import json
import re
import subprocess
import sys
import types
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import qwen3
import qwen3_inspect
from configs import BASE, ROOT, YARN
from helpers import assert_one_line, random_ids
from make_random_model import make_random_model
from oracle import head, oracle, softmax, turned
from qwen3_page import contents as panels
from qwen3_page import packed
from qwen3_page.contents import Wish, contents
from qwen3_page.page import html, lines_of_functions, pack
from qwen3_page.recorder import Recorder
from test_qwen3_moe import MOE
from tokenizer_utils import Tokenizer

PROMPT = "The capital of France is"


def unpacked(packed) -> np.ndarray:
    return np.frombuffer(base64.b64decode(packed["data"]), "<" + packed["dtype"]).reshape(packed["shape"])


@pytest.fixture(scope="module")
def found(demo):
    """What the page of the bundled model holds."""
    return contents(demo, Wish(PROMPT, max_new_tokens=12, sampling={"temperature": 1.5, "top_p": 0.9}, seed=3,
                               compare="What is 417 + 385?"))


@pytest.fixture(scope="module")
def truth(demo, found):
    return oracle(demo, np.array(found["tokens"]["ids"]))


def assert_close(array, expected):
    """Equal up to float32's rounding over a few layers, by the spread of the numbers."""
    np.testing.assert_allclose(array, expected, rtol=1e-3, atol=2e-4 * np.std(expected))


def recorded(model, ids):
    recorder = Recorder(model)
    recorder.keep_arrays = True
    logits = recorder.forward(model, ids, recorder.new_cache(model.config), all_logits=True)
    return recorder.passes[0], logits


# ----------------------------------------------------------------------------------------------------------------------
# The recorder
# ----------------------------------------------------------------------------------------------------------------------

def test_recording_changes_no_bit_and_leaves_qwen3_as_it_is(model):
    before = dict(vars(qwen3))
    ids = random_ids(40)
    recorder = Recorder(model)
    cache = recorder.new_cache(model.config)
    for part in (ids[:30], ids[30:31], ids[31:]):
        recorder.forward(model, part, cache)
    expected = qwen3.KVCache(model.config)
    for part in (ids[:30], ids[30:31]):
        qwen3.forward(model, part, expected)
    np.testing.assert_array_equal(recorder.forward(model, [7], cache), [
        qwen3.forward(model, part, expected) for part in (ids[31:], [7])][-1])
    np.testing.assert_array_equal(cache.k[..., :41, :], expected.k[..., :41, :])
    assert list(map(id, vars(qwen3).values())) == list(map(id, before.values()))  # so others run what they always ran
    assert model.engine.forward is qwen3.forward and recorder.model.engine.forward is not qwen3.forward
    assert [each.n for each in recorder.passes] == [30, 1, 9, 1]


def test_generation_goes_on_as_without_a_recorder(demo):
    ids = demo.tokenizer.encode(PROMPT)
    options = dict(max_new_tokens=30, temperature=1.0, seed=5)
    assert list(qwen3.generate(Recorder(demo).model, ids, **options)) == list(qwen3.generate(demo, ids, **options))


def test_decorators_stay_around_the_copies(model):
    """Those of forward: an overflow in exp(-gate), which does no harm, warns no more than without a recorder."""
    layers = [{**w, "gate_proj": w["gate_proj"] * np.float32(1e5)} for w in model.weights["layers"]]
    large = replace(model, weights=model.weights | {"layers": layers})
    with np.errstate(all="raise", under="ignore"):
        expected = qwen3.forward(large, [1, 2, 3], qwen3.KVCache(model.config))
        recorder = Recorder(large)
        found = recorder.forward(large, [1, 2, 3], recorder.new_cache(model.config))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("changes", [{}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1}])
def test_arrays_are_those_of_the_model(tmp_path, changes):
    model = qwen3.load_model(make_random_model(BASE | changes, tmp_path, "float32"))
    ids = random_ids(50)
    (now, logits), expected = recorded(model, ids), oracle(model, ids)
    for name in ("streams", "attention", "q", "k"):
        assert_close(np.stack(getattr(now, name)), getattr(expected, name))
    assert_close(logits, expected.logits)


def test_attention_weights_of_more_positions_than_a_head_has_dimensions(model):
    """They are read out head_dim positions at a time, which here are 16."""
    now, _ = recorded(model, random_ids(16 * 3 + 5))
    np.testing.assert_allclose(np.stack(now.attention).sum(axis=-1), 1, rtol=1e-5)
    assert not np.triu(now.attention[0][0], 1).any()


def test_hands_and_frequencies_of_yarn_make_the_attention(tmp_path):
    """q and k, turned by position times frequency and scaled by the factor, give the attention weights."""
    model = qwen3.load_model(make_random_model(BASE | {"rope_scaling": YARN}, tmp_path, "float32"))
    now, _ = recorded(model, random_ids(30))
    frequencies, factor = qwen3.rope_frequencies(model.config)
    assert factor > 1
    a = turned(now.q[1][3].astype(float), np.arange(30), frequencies) * factor
    b = turned(now.k[1][1].astype(float), np.arange(30), frequencies) * factor
    scores = np.where(np.tri(30), a @ b.T / 4, -np.inf)
    np.testing.assert_allclose(now.attention[1][3], softmax(scores), atol=1e-6)


def test_each_step_names_its_line(demo):
    now, _ = recorded(demo, [1, 2, 3])
    lines = (ROOT / "qwen3.py").read_text("utf-8").splitlines()
    for step in now.steps:
        name = {"append": "cache.append", "embedding": "embed_tokens"}.get(step.function, f"{step.function}(")
        assert name in lines[step.line - 1], step
        assert all(weight in lines[step.line - 1] for weight in step.weight.split(", ")), step
        assert panels.FORMULAS[step.function] and (step.weight in panels.WORDS or step.function in panels.WORDS)
    by_weight = [(step.layer, step.weight) for step in now.steps if step.weight]
    assert by_weight[0] == (-1, "embed_tokens") and by_weight[-1] == (demo.config.num_hidden_layers, "lm_head")
    assert len(set(by_weight)) == len(by_weight) == 9 * demo.config.num_hidden_layers + 3


def test_bytes_and_arithmetic(demo):
    """A product's weights and input, each read once; one multiplication and one addition for each pair of numbers."""
    now, _ = recorded(demo, [1, 2, 3])
    c = demo.config
    for step in now.steps:
        if step.weight in ("q_proj", "lm_head"):
            outputs = c.vocab_size if step.weight == "lm_head" else c.num_attention_heads * c.head_dim
            assert step.read == 4 * (outputs * c.hidden_size + 3 * c.hidden_size)
            assert step.operations == 2 * 3 * outputs * c.hidden_size
        if step.function == "swiglu":
            assert step.operations == 3 * 2 * 3 * c.intermediate_size * c.hidden_size
            assert step.read == 4 * (3 * c.intermediate_size * c.hidden_size + 3 * c.hidden_size)
    assert all(step.seconds > 0 for step in now.steps)


# ----------------------------------------------------------------------------------------------------------------------
# What the page holds
# ----------------------------------------------------------------------------------------------------------------------

def test_tokens_and_who_wrote_them(demo, found):
    tokens, n = found["tokens"], found["about"]["n_prompt"]
    assert b"".join(map(bytes.fromhex, tokens["bytes"][:n])).decode() == tokens["text"]
    yours = [bytes.fromhex(piece) for piece, part in zip(tokens["bytes"], tokens["parts"]) if part == "prompt"]
    assert b"".join(yours).decode() == PROMPT
    assert set(tokens["parts"][n:]) == {"answer"} and "answer" not in tokens["parts"][:n]
    assert tokens["parts"][0] == "template"


def test_norms(found, truth):
    lengths = np.linalg.norm(truth.streams, axis=-1)
    np.testing.assert_allclose(unpacked(found["way"]["streams"]), lengths, rtol=1e-3)
    steps, norms = found["way"]["steps"], unpacked(found["way"]["norms"])
    for i, step in enumerate(steps):
        if step["function"] == "embedding":
            np.testing.assert_allclose(norms[i], lengths[0], rtol=1e-6)
        if step["weight"] == "q_norm":
            expected = np.linalg.norm(truth.q[step["layer"]], axis=(0, 2))
            np.testing.assert_allclose(norms[i], expected, rtol=1e-4)
        assert np.isnan(norms[i]).all() == (step["function"] in ("append", "rope_tables"))


def test_attention_and_scores_of_copying(demo, found, truth):
    maps, (rows, columns) = unpacked(found["attention"]["maps"]), np.tril_indices(len(found["tokens"]["ids"]))
    expected = np.array(truth.attention)
    np.testing.assert_allclose(maps, expected[:, :, rows, columns], atol=1e-3)
    n = expected.shape[-1]
    mean = sum(expected[:, :, i, i - 1] for i in range(1, n)) / (n - 1)
    np.testing.assert_allclose(unpacked(found["attention"]["previous"]), mean, atol=1e-4)
    ids = np.tile(np.random.default_rng(0).integers(0, demo.config.vocab_size, 24), 2)
    twice = np.array(oracle(demo, ids).attention)
    mean = sum(twice[:, :, i, i - 23] for i in range(24, 48)) / 24
    np.testing.assert_allclose(unpacked(found["attention"]["induction"]), mean, atol=1e-4)


def test_hands(demo, found, truth):
    pairs, half = found["attention"]["pairs"], demo.config.head_dim // 2
    assert pairs == list(range(half))
    chosen = pairs + [pair + half for pair in pairs]
    for name in "qk":
        expected = np.array(getattr(truth, name))[..., chosen]
        np.testing.assert_allclose(unpacked(found["attention"][name]), expected, rtol=2e-3, atol=2e-3)
    expected = demo.config.rope_theta ** (-2 * np.array(pairs) / demo.config.head_dim)
    np.testing.assert_allclose(found["attention"]["frequencies"], expected, rtol=1e-6)


def test_logit_lens(demo, found, truth):
    lens = found["lens"]
    ids = np.reshape(lens["ids"]["values"], lens["ids"]["shape"])
    for layer, stream in enumerate(truth.streams):
        probabilities = softmax(head(demo, stream))
        shown = np.take_along_axis(probabilities, ids[layer], axis=-1)
        np.testing.assert_allclose(unpacked(lens["probabilities"])[layer], shown, atol=1e-4)
        np.testing.assert_allclose(shown, -np.sort(-probabilities)[:, :5], atol=1e-5)
    for position, lead in enumerate(lens["leads"]):
        answers = ids[:, position, 0]
        assert answers[lead] == answers[-1] and not (answers[:lead] == answers[-1]).any()


def test_choosing_holds_the_logits_of_the_candidates(demo, found, truth):
    choosing, tokens, n = found["choosing"], found["tokens"], found["about"]["n_prompt"]
    assert [step["token"] for step in choosing["steps"]][:len(tokens["ids"]) - n] == tokens["ids"][n:]
    for i, (step, ids, below) in enumerate(zip(choosing["steps"], choosing["ids"], choosing["logits"])):
        logits = truth.logits[n - 1 + i]
        np.testing.assert_allclose(step["largest"], logits.max(), rtol=1e-4)
        np.testing.assert_allclose(step["largest"] + unpacked(below), logits[ids], atol=1e-3)
        assert {*tokens["ids"], step["token"], *np.argsort(-logits)[:500]} <= {*ids}
        others = np.delete(logits, ids) - logits.max()
        assert sum(step["counts"]) == len(others)
        mass = np.dot(step["counts"], np.exp(step["below"]))
        np.testing.assert_allclose(mass, np.exp(others).sum(), rtol=0.05)


@pytest.mark.parametrize("settings", [
    {"temperature": 1.5, "top_p": 0.9}, {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 3.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5}, {"temperature": 0.0}])
def test_luck_is_that_of_sample(demo, settings):
    """A second run of sampler() with the same seed: its stream of exponentials, and the tokens it draws."""
    prompt, sampling = demo.tokenizer.encode(PROMPT), qwen3.Sampling(**settings)
    drawn, _ = panels.answered(Recorder(demo), prompt, 12, sampling, 7)
    expected = list(qwen3.generate(demo, prompt, 12, 7, **settings))
    assert [each.token for each in drawn][:len(expected)] == expected and len(drawn) - len(expected) in (0, 1)
    rng, seen = np.random.default_rng(7), []
    for each, held in zip(drawn, panels.choosing_panel(drawn, sampling, np.array([*prompt, *expected]))["luck"]):
        counts = [np.bincount(ids, minlength=demo.config.vocab_size).astype(np.float32) for ids in (prompt, seen)]
        logits = qwen3.penalize(each.logits, sampling, *[c.astype(np.float32) for c in counts])
        if sampling.temperature:
            ids, p = qwen3.candidates(logits, sampling)
            np.testing.assert_array_equal(each.luck[ids], rng.standard_exponential(len(ids)))
            assert ids[(p / each.luck[ids]).argmax()] == each.token
        assert (unpacked(held) > 0).all()
        seen.append(each.token)


def test_cache(demo, found):
    passes, c = found["cache"]["passes"], demo.config
    assert found["cache"]["per_position"] * passes[-1]["length"] == sum(
        2 * 4 * c.num_key_value_heads * c.head_dim for _ in range(c.num_hidden_layers)) * passes[-1]["length"]
    assert [each["n"] for each in passes] == [found["about"]["n_prompt"]] + [1] * (len(passes) - 1)
    assert [each["length"] for each in passes] == list(np.cumsum([each["n"] for each in passes]))
    starts = [each["start"] for each in passes]
    assert starts == sorted(starts) and all(each["length"] <= each["capacity"] for each in passes)


def test_quantized(demo, found, truth):
    import qwen3_numba
    p = softmax(truth.logits)
    for form in ("int8", "int4"):
        fast = qwen3_numba.load_model(qwen3.BUNDLED, form)
        logits = qwen3_numba.forward(fast, found["tokens"]["ids"], qwen3_numba.KVCache(fast.config), all_logits=True)
        expected = (p * np.log(p / softmax(logits.astype(np.float64)))).sum(axis=-1)
        np.testing.assert_allclose(unpacked(found["quantized"]["kl"][form]), expected, rtol=0.02, atol=1e-6)
    means = {form: unpacked(kl).mean() for form, kl in found["quantized"]["kl"].items()}
    assert 0 < means["int8"] < means["int4"]
    for form, at in found["quantized"]["parts"].items():
        a, b = (found["quantized"]["answers"][name] for name in ("float32", form))
        assert a[:at] == b[:at] and (at is not None or a == b) and (at is None or a[at:at + 1] != b[at:at + 1])


def test_no_numba(demo, monkeypatch):
    monkeypatch.setitem(sys.modules, "qwen3_numba", None)  # as if its import failed
    assert "qwen3_numba" in contents(demo, Wish(PROMPT, max_new_tokens=1))["quantized"]


def test_thinking(demo, found):
    for side in found["thinking"]["sides"]:
        answer = qwen3.chat(demo, found["thinking"]["question"], enable_thinking=side["thinking"],
                            max_new_tokens=256).finish().answer
        assert (side["reasoning"], side["content"]) == (answer.reasoning or "", answer.content.strip())


def test_an_answer_that_ends_at_once(demo):
    """Its only token ends the text: nothing is decoded."""
    silent = replace(demo, eos_token_ids=tuple(range(demo.config.vocab_size)))
    found = contents(silent, Wish(PROMPT, quantized=False))
    assert len(found["tokens"]["ids"]) == found["about"]["n_prompt"] and found["about"]["ended"]
    assert len(found["choosing"]["steps"]) == len(found["cache"]["passes"]) == 1
    assert all(step["decode"] is None for step in found["way"]["steps"])


@given(st.binary(max_size=12))
def test_labels_are_harmless(data):
    """No control character, nothing invisible, and no two ways to read half a character."""
    assert panels.label(data).isprintable()


@given(st.lists(st.integers(0, 3), max_size=6), st.lists(st.integers(0, 3), max_size=6))
def test_where_two_answers_part(a, b):
    at = panels.parting(a, b)
    assert (at is None) == (a == b)
    assert at is None or (a[:at] == b[:at] and a[at:at + 1] != b[at:at + 1])


def test_diagonals():
    maps = np.zeros((2, 6, 6))
    maps[0, range(1, 6), range(5)] = 1  # looks at the token before
    maps[1, range(3, 6), range(1, 4)] = 0.5  # 2 before, from the fourth row on
    np.testing.assert_array_equal(panels.diagonal(maps, -1), [1, 0])
    np.testing.assert_array_equal(panels.diagonal(maps, -2, 3), [0, 0.5])
    np.testing.assert_array_equal(panels.diagonal(maps[:, :1, :1], -1), [0, 0])


@pytest.mark.parametrize("dtype", ["f2", "f4"])
def test_packed_arrays(dtype):
    array = np.random.default_rng(1).normal(size=(3, 4)) * 10
    np.testing.assert_allclose(unpacked(pack(array, dtype)), array, rtol=1e-3)
    assert np.isfinite(unpacked(pack(np.array([1e30, -1e30]), "f2"))).all()  # the largest float16 is 65504


def test_lines_of_functions():
    lines = lines_of_functions("x = 1\n\ndef f():\n    return x\n\nclass A:\n    def g(self):\n        pass\n")
    assert lines == {"f": [3, 4], "A": [6, 8], "A.g": [7, 8]}
    named = re.findall(r'data-functions="([^"]*)"', (ROOT / "qwen3_page/page.html").read_text("utf-8"))
    known = lines_of_functions((ROOT / "qwen3.py").read_text("utf-8"))
    assert len(named) == 8 and {name for names in named for name in names.split()} <= {*known}


# ----------------------------------------------------------------------------------------------------------------------
# The file
# ----------------------------------------------------------------------------------------------------------------------

def test_the_file_runs_only_its_own_program_and_loads_nothing(demo):
    evil = "</script><script>alert(1)</script><!--<script> <img src=x onerror=alert(2)>"
    page = qwen3_inspect.inspect(demo, Wish(evil, max_new_tokens=2, quantized=False))
    blocks = re.findall(r"<script([^>]*)>(.*?)</script>", page, re.DOTALL)
    assert [kind for kind, _ in blocks] == [' type="application/json" id="contents"', "", ""]
    held = json.loads(blocks[0][1])
    assert held["about"]["prompt"] == evil and "<" not in blocks[0][1]
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    for texts, kind in ((re.findall(r"<style>(.*?)</style>", page, re.DOTALL), "style-src"),
                        ([text for _, text in blocks[1:]], "script-src")):
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert f"{kind} " + " ".join(f"'sha256-{digest}'" for digest in digests) + ";" in policy
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    shell = page.replace(blocks[0][1], "")
    assert not re.search(r"""(src|href)=["']?(?!#)|url\(|@import""", shell)


def test_uplot_is_in_the_page_unchanged_with_its_licence():
    """uPlot's files have the hashes that its README lists for those of the npm package."""
    folder = ROOT / "qwen3_page/uplot"
    about = (folder / "README.md").read_text("utf-8")
    shipped = dict(re.findall(r"^\| `(\S+)` \| `([0-9a-f]{64})` \|$", about, re.MULTILINE))
    assert {*shipped} == {file.name for file in folder.iterdir()} - {"README.md"} and len(shipped) == 3
    for name, digest in shipped.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
    page = html({})
    for name in shipped:
        assert (folder / name).read_text("utf-8") in page
    version = re.search(r"uPlot \(v([\d.]+)\)", (folder / "uPlot.iife.min.js").read_text("utf-8"))[1]
    assert f"uPlot {version}" in about and f"uPlot {version}" in page and "MIT" in (folder / "LICENSE").read_text()


def test_size_with_a_prompt_of_64_tokens(demo):
    ids = random_ids(64, vocab_size=demo.tokenizer.vocab_size - 30)
    text = demo.tokenizer.decode(ids)
    assert len(demo.tokenizer.encode(text)) >= 64
    page = qwen3_inspect.inspect(demo, Wish(text, raw=True, max_new_tokens=32))
    assert len(page.encode()) < 5_000_000


def run(capfd, *args):
    capfd.readouterr()
    try:
        status = qwen3_inspect.main([str(arg) for arg in args])
    except SystemExit as stop:
        status = stop.code
    return status, *capfd.readouterr()


def test_command(tmp_path, capfd, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    file = tmp_path / "a page.html"
    status, out, err = run(capfd, PROMPT, "--html", file, "-n", 2, "--no-quantized", "--open", "--model", ROOT / "demo")
    assert (status, err) == (0, "") and out.startswith(f"{file}: ") and file.read_text("utf-8").startswith("<!DOCTYPE")
    assert opened == [file.as_uri()]
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    status, _, err = run(capfd, PROMPT, "--html", file, "-n", 2, "--no-quantized", "--open")
    assert status == 1
    assert_one_line(err, "no browser", file)


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_computed(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(qwen3_inspect, "inspect", lambda *args: pytest.fail("computed"))
    status, out, err = run(capfd, PROMPT, "--html", tmp_path / "no folder" / "page.html")
    assert (status, out) == (1, "")
    assert_one_line(err, "no folder", "cannot be written")


def test_as_a_process(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "qwen3_inspect.py", PROMPT, "-n", "1", "--no-quantized"],
                          cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("qwen3_inspect.html: ")
    assert (tmp_path / "qwen3_inspect.html").stat().st_size > 100_000


@pytest.mark.parametrize("args, words", [
    (["word " * 2000], ["the prompt has", "tokens", "--max-tokens", "positions"]),
    ([PROMPT, "-n", 5000], ["--max-tokens", "5000"]),
    ([PROMPT, "-n", 0], ["max_tokens"]),
    ([""], ["empty"]),
    ([" \n"], ["empty"]),
    ([PROMPT, "--html", ""], ["--html", "empty"]), ([PROMPT, "--html", ROOT / "README.md"], ["README.md", "exists"]),
    ([PROMPT, "--compare", " "], ["--compare", "empty"]),
    ([PROMPT, "--top-p", 2], ["top_p"]),
    ([PROMPT, "--seed", -1], ["seed"]),
    ([PROMPT, "--raw", "--think"], ["--raw", "--think"]),
    ([PROMPT, "--model", "nowhere/at/all"], ["nowhere"]),
    ([PROMPT, "--html", "/nowhere/page.html"], ["/nowhere/page.html"]),
    ([PROMPT, "--temperatur"], ["temperatur"]),
    ([], ["prompt"]),
])
def test_bad_input_is_one_line(args, words, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quick = ["--no-quantized"] if args[1:2] != ["--temperatur"] else []
    status, out, err = run(capfd, *args, *quick)
    assert status in (1, 2) and not out and not list(tmp_path.iterdir())
    assert_one_line(err, *words)


def test_a_model_without_a_template(tiny_model, capfd):
    plain = replace(tiny_model, tokenizer=Tokenizer(tiny_model.tokenizer.backend))
    with pytest.raises(qwen3.InputError, match="no chat template; use --raw"):
        contents(plain, Wish("ab", max_new_tokens=3))
    found = contents(plain, Wish("ab", raw=True, max_new_tokens=3, quantized=False))
    assert found["about"]["raw"] and set(found["tokens"]["parts"]) <= {"prompt", "answer"}


def test_a_long_prompt_is_refused_by_the_size_of_the_page(demo):
    """A model with more heads has room for fewer positions."""
    panels.check_room(demo, 400, 32)
    large = types.SimpleNamespace(config=replace(demo.config, num_hidden_layers=64, num_attention_heads=64))
    with pytest.raises(qwen3.InputError, match=r"more than the (\d+) positions") as caught:
        panels.check_room(large, 400, 32)
    assert 30 < int(re.search(r"than the (\d+)", str(caught.value))[1]) < 100


def test_as_many_pairs_of_dimensions_as_there_is_room_for(demo):
    """All for 300 tokens of the bundled model; fewer in a long text of a large one, but the first and the last."""
    large = replace(demo.config, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128)
    for config, n, least, most in ((demo.config, 300, 32, 32), (large, 40, 64, 64), (large, 96, 9, 63),
                                   (large, 130, 8, 8)):
        pairs = panels.pairs_with_room(config, n)
        assert least <= len(pairs) <= most and pairs[0] == 0 and pairs[-1] == config.head_dim // 2 - 1
        assert (np.diff(pairs) > 0).all() and np.ptp(np.diff(pairs)) <= 1
        assert len(pairs) == 8 or panels.characters(config, n, len(pairs)) <= panels.ROOM
    assert panels.pairs_with_room(replace(large, head_dim=2), 9).tolist() == [0]


@pytest.mark.parametrize("shape", [BASE, MOE | {"moe_intermediate_size": 32}])
@pytest.mark.parametrize("form, error", [("int8", 0.01), ("int4", 0.12)])
def test_a_folder_that_the_fast_engine_has_quantized(tmp_path, capfd, monkeypatch, form, error, shape):
    """qwen3.py computes with its weights, unpacked: near the originals, and answers as the fast engine's logits say."""
    import qwen3_numba
    config = shape | {"num_hidden_layers": 2, "hidden_size": 64}
    original = make_random_model(config, tmp_path / "model", "float32")
    folder = tmp_path / form
    fast = qwen3_numba.load_model(original, form, tokenizer=False)
    qwen3_numba.save_quantized(fast, folder, form)
    plain, model = (qwen3.load_model(path, packed.ENGINE, tokenizer=False) for path in (original, folder))
    for ours, theirs in zip([plain.weights, *plain.weights["layers"]], [model.weights, *model.weights["layers"]]):
        assert ours.keys() == theirs.keys()
        for name in ours.keys() - {"layers", "experts"}:
            assert np.linalg.norm(ours[name] - theirs[name]) <= error * np.linalg.norm(ours[name])
        for number, expert in ours.get("experts", {}).items():
            for name, matrix in expert.items():
                assert np.linalg.norm(matrix - theirs["experts"][number][name]) <= error * np.linalg.norm(matrix)
    ids = random_ids(20)
    logits = [qwen3.forward(each, ids, qwen3.KVCache(each.config)) for each in (model, plain)]
    said = qwen3_numba.forward(fast, ids, qwen3_numba.KVCache(fast.config))
    assert np.linalg.norm(logits[0] - said) < np.linalg.norm(logits[1] - said)
    monkeypatch.setitem(sys.modules, "qwen3_numba", None)  # as if its import failed
    status, out, err = run(capfd, PROMPT, "--model", folder)
    assert (status, out) == (1, "")
    assert_one_line(err, "quantized by the fast engine")
