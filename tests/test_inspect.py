"""qwen3_inspect.py: the recorder notes what the model does, the page's numbers are true, bad input is one line.

The page itself, in a browser: test_inspect_browser.py.
"""
import base64
import hashlib
import io
import json
import re
import types
from dataclasses import replace
from functools import reduce
from html import escape

import numpy as np
import pytest
from PIL import Image, ImageDraw

import qwen3
import qwen3_5
import qwen3_inspect
from configs import BASE, HYBRID, ROOT, YARN
from helpers import assert_one_line, message_of, random_ids, run_main, with_engine
from make_random_model import make_random_model
from oracle import head, oracle, softmax, turned
from qwen3_lib.page import contents as panels
from qwen3_lib.generation.options import AnswerOptions
from qwen3_lib.page.contents import PageOptions, contents
from qwen3_lib.page.page import html, joined, pack, png
from qwen3_lib.page.recorder import OPERATIONS, Recorder
from test_qwen3_vision import CONFIGS, make_seeing

PROMPT = "The capital of France is"
EVIL = "</script><script>alert(1)</script><!--<script> <img src=x onerror=alert(2)>"


COLOURS = Image.fromarray(np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8))
NOISE = COLOURS.resize((1600, 1200), 3)  # 36 x 27 tokens in qwen3.py


def unpacked(array) -> np.ndarray:
    return np.frombuffer(base64.b64decode(array["data"]), "<" + array["dtype"]).reshape(array["shape"])


def shapes():
    """A red circle, a blue square and a green triangle."""
    image = Image.new("RGB", (384, 256), (232, 230, 224))
    draw = ImageDraw.Draw(image)
    draw.ellipse((30, 110, 150, 230), (205, 45, 45))
    draw.rectangle((240, 20, 350, 130), (55, 75, 205))
    draw.polygon([(210, 240), (330, 240), (270, 140)], (45, 160, 65))
    return image


def about(*images, **options):
    """A question about pictures."""
    return PageOptions("What is this?", answer=AnswerOptions(max_new_tokens=8, temperature=0, seed=0, **options),
                       images=images)


def places(found, k=0):
    """Where the tokens of the k-th picture stand."""
    return np.flatnonzero(np.array(found["tokens"]["ids"]) == ~k)


def weights(found):
    """[layers, heads, n, n] from the page."""
    n, maps = len(found["tokens"]["ids"]), unpacked(found["attention"]["maps"])
    full = np.zeros((*maps.shape[:2], n, n))
    full[:, :, *np.tril_indices(n)] = maps
    return full


@pytest.fixture(scope="module")
def seeing():
    return qwen3.load_model(ROOT / "tests/tiny_seeing")


@pytest.fixture(scope="module")
def found(demo):
    """The contents of a page of the bundled model."""
    return contents(demo, PageOptions(PROMPT, answer=AnswerOptions(
        max_new_tokens=8, temperature=1.5, top_p=0.9, seed=3)))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return qwen3.load_model(make_random_model(HYBRID, tmp_path_factory.mktemp("hybrid"), "float32"))


@pytest.fixture(scope="module")
def truth(demo, found):
    return oracle(demo, np.array(found["tokens"]["ids"]))


def recorded(model, ids, *more):
    """(the passes of the ids and of more ids, with arrays; the logits of all the ids)."""
    recorder = Recorder(model)
    recorder.keep_arrays, cache = True, recorder.new_cache()
    logits = recorder.forward(ids, cache, all_logits=True)
    for each in more:
        recorder.forward(each, cache)
    return recorder.passes, logits


# ---- The recorder ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["Qwen3", "Qwen3.5"])
def test_recording_changes_no_bit_and_leaves_the_functions_as_they_are(model, hybrid, kind):
    model = hybrid if kind == "Qwen3.5" else model
    before, ids = vars(qwen3) | vars(qwen3_5), random_ids(40)
    recorder, expected = Recorder(model), model.engine.new_cache(model.config)
    cache = recorder.new_cache()
    for part in (ids[:30], ids[30:31], ids[31:], [7]):
        np.testing.assert_array_equal(recorder.forward(part, cache), qwen3.forward(model, part, expected))
    np.testing.assert_array_equal(cache.k[..., :41, :], expected.k[..., :41, :])
    assert list(map(id, (vars(qwen3) | vars(qwen3_5)).values())) == list(map(id, before.values()))
    assert [each.n for each in recorder.passes] == [30, 1, 9, 1]


def test_decorators_stay_around_the_copies(model):
    """forward's decorator: an overflow in exp(-gate) is harmless and gives no warning."""
    layers = [{**w, "gate_proj": w["gate_proj"] * np.float32(1e5)} for w in model.weights["layers"]]
    large = replace(model, weights=model.weights | {"layers": layers})
    recorder = Recorder(large)
    with np.errstate(all="raise", under="ignore"):
        expected = qwen3.forward(large, [1, 2, 3], qwen3.KVCache(model.config))
        np.testing.assert_array_equal(recorder.forward([1, 2, 3], recorder.new_cache()), expected)


@pytest.mark.parametrize("changes", [{"num_key_value_heads": 4}, {"num_key_value_heads": 1}])
def test_arrays_are_those_of_the_model(tmp_path, changes):
    """50 positions: attention weights are read out head_dim = 16 positions at a time."""
    model = qwen3.load_model(make_random_model(BASE | changes, tmp_path, "float32"))
    ids = random_ids(50)
    now, expected = qwen3_inspect.record_pass(model, ids), oracle(model, ids)
    for name in ("streams", "attention", "q", "k", "logits"):
        array, true = np.stack(getattr(now, name)), np.array(getattr(expected, name))
        np.testing.assert_allclose(array, true, rtol=1e-3, atol=2e-4 * np.std(true))


def test_a_text_is_recorded_as_its_tokens(demo):
    now, ids = qwen3_inspect.record_pass(demo, PROMPT), demo.tokenizer.encode(PROMPT)
    assert now.token_ids.tolist() == ids and now.attention[0].shape == (4, len(ids), len(ids))
    np.testing.assert_array_equal(now.logits, qwen3.forward(demo, ids, qwen3.KVCache(demo.config), all_logits=True))
    for words, wrong in (("empty", ""), ("empty", []), ("4096", [4096]), ("at most 512", [1] * 513)):
        assert words in message_of(qwen3_inspect.record_pass, demo, wrong)


def test_hands_and_frequencies_of_yarn_make_the_attention(tmp_path):
    """q and k, turned by position times frequency and scaled by the factor, give the attention weights."""
    model = qwen3.load_model(make_random_model(BASE | {"rope_scaling": YARN}, tmp_path, "float32"))
    recorder = Recorder(model)
    recorder.keep_arrays = True
    recorder.forward(random_ids(30), recorder.new_cache(), all_logits=True)
    now = recorder.passes[0]
    panel = panels.attention_panel(recorder, now, np.array(random_ids(30)))
    frequencies, factor = np.array(panel["frequencies"]), panel["factor"]
    assert factor > 1 and panel["pairs"] == list(range(8))
    a = turned(now.q[1][3].astype(float), np.arange(30), frequencies) * factor
    b = turned(now.k[1][1].astype(float), np.arange(30), frequencies) * factor
    scores = np.where(np.tri(30), a @ b.T / 4, -np.inf)
    np.testing.assert_allclose(now.attention[1][3], softmax(scores), atol=1e-6)


def test_each_step_names_its_line(demo, hybrid):
    written = {"attend": "cache.attend", "embedding": "embed_tokens(model", "delta_rule_in_chunks": " rule("}
    for model in (hybrid, demo):
        [now], _ = recorded(model, [1, 2, 3])
        for step in now.steps:
            lines = (ROOT / step.file).read_text("utf-8").splitlines()
            assert written.get(step.function, step.function) in lines[step.line - 1], step
            inputs = step.weight.removeprefix("linear_attn.").split(", ")
            assert step.function == "causal_convolution" or all(each in lines[step.line - 1] for each in inputs), step
            assert panels.FORMULAS[step.function] and {step.weight, step.function} & {*panels.PURPOSES}
    by_weight = [(step.layer, step.weight) for step in now.steps if step.weight]
    assert by_weight[0] == (-1, "embed_tokens") and by_weight[-1] == (demo.config.num_hidden_layers, "lm_head")
    assert len(set(by_weight)) == len(by_weight) == 9 * demo.config.num_hidden_layers + 3


def test_bytes_and_arithmetic(demo, hybrid):
    """A product reads its weights and its input once; each pair of numbers is one multiplication and one addition."""
    passes, _ = recorded(demo, [1, 2, 3], [4])
    c = demo.config
    q_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    for now, n, length in zip(passes, (3, 1), (3, 4)):
        for step in now.steps:
            if step.weight in ("q_proj", "lm_head"):
                outputs = c.vocab_size if step.weight == "lm_head" else q_size
                assert step.read == 4 * (outputs * c.hidden_size + n * c.hidden_size)
                assert step.operations == 2 * n * outputs * c.hidden_size
            if step.function == "swiglu":
                assert step.operations == 3 * 2 * n * c.intermediate_size * c.hidden_size
                assert step.read == 4 * (3 * c.intermediate_size * c.hidden_size + n * c.hidden_size)
            if step.function == "attend":  # q times all keys, then the weights times all values
                assert step.operations == 2 * n * q_size * length + 2 * n * q_size * length
                assert step.read == 4 * (n * q_size + 2 * length * kv_size)
        assert all(step.seconds > 0 for step in now.steps)
    # q, k, v, g and beta of 2 heads of 16, and the state
    for now, n, rule in zip(recorded(hybrid, [1, 2, 3], [4])[0], (3, 1), ("delta_rule_in_chunks", "delta_rule")):
        read = [step.read for step in now.steps if step.function == rule]
        assert read == [2 * 4 * (n * (3 * 16 + 2) + 16 * 16)] * 3
        assert now.steps[1].operations == 3 * n * 4  # an angle, cos and sin for each of the 4 pairs that turn


class Counted(np.ndarray):
    """Counts the additions, multiplications and divisions of its numbers, as they happen."""
    done = 0

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **options):
        found = np.asarray(getattr(ufunc, method)(*map(np.asarray, inputs), **options))
        if ufunc in (np.add, np.subtract, np.multiply, np.divide, np.matmul):
            Counted.done += found.size * (2 * inputs[0].shape[-1] if ufunc is np.matmul else 1)
        if out:
            out[0][...] = found
        return out[0] if out else found.view(Counted)


def eliminated(matrix, right):
    """numpy.linalg.solve by Gaussian elimination, whose steps are counted, too."""
    n, both = matrix.shape[1], np.concatenate([matrix, right], axis=2).view(Counted)
    for i in range(n):
        both[:, i + 1:, i:] -= both[:, i + 1:, i:i + 1] / both[:, i:i + 1, i:i + 1] * both[:, i:i + 1, i:]
    for i in reversed(range(n)):
        both[:, i, n:] /= both[:, i, i:i + 1]
        both[:, :i, n:] -= both[:, :i, i:i + 1] * both[:, i:i + 1, n:]
    return both[:, :, n:]


@pytest.mark.parametrize("heads, n, key_dim, value_dim", [(2, 64, 16, 16), (3, 130, 64, 48), (1, 5, 128, 128)])
def test_arithmetic_of_a_delta_net(heads, n, key_dim, value_dim, monkeypatch):
    """By the recorder's formulas, and counted in the calculation itself."""
    monkeypatch.setattr(np.linalg, "solve", eliminated)
    rng = np.random.default_rng(0)
    q, k, v, state, x, weight, history = (rng.standard_normal(shape, np.float32).view(Counted) for shape in (
        (heads, n, key_dim), (heads, n, key_dim), (heads, n, value_dim), (heads, key_dim, value_dim), (n, 7), (7, 4),
        (3, 7)))
    g, beta = (np.full((heads, n), each, np.float32).view(Counted) for each in (-0.1, 0.5))
    rule = qwen3_5.unit_length(q), qwen3_5.unit_length(k), v, g, beta, state
    for name, args, least in (("delta_rule", rule, 1), ("delta_rule_in_chunks", rule, 0.97), ("sigmoid", (x,), 1),
                              ("causal_convolution", (x, weight, history), 1)):
        Counted.done = 0
        getattr(qwen3_5, name)(*args)
        assert least * Counted.done <= OPERATIONS[name](*args) <= Counted.done, name


# ---- The contents of the page ----------------------------------------------------------------------------------------

def test_tokens_and_their_authors(found):
    tokens, n = found["tokens"], found["about"]["n_prompt"]
    assert b"".join(map(bytes.fromhex, tokens["bytes"][:n])).decode() == tokens["text"]
    yours = [bytes.fromhex(piece) for piece, part in zip(tokens["bytes"], tokens["parts"]) if part == "prompt"]
    assert b"".join(yours).decode() == PROMPT
    assert set(tokens["parts"][n:]) == {"answer"} and "answer" not in tokens["parts"][:n]
    assert tokens["parts"][0] == "template"


def test_norms(found, truth):
    lengths = np.linalg.norm(truth.streams, axis=-1)
    np.testing.assert_allclose(unpacked(found["way"]["streams"]), lengths, rtol=1e-3)
    for step, norms in zip(found["way"]["steps"], unpacked(found["way"]["norms"])):
        assert np.isnan(norms).all() == (step["function"] == "rope_tables")
        if step["function"] == "embedding":
            np.testing.assert_allclose(norms, lengths[0], rtol=1e-6)
        if step["weight"] == "q_norm":
            np.testing.assert_allclose(norms, np.linalg.norm(truth.q[step["layer"]], axis=(0, 2)), rtol=1e-4)


def test_attention_and_scores_of_heads_that_copy(demo, found, truth):
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
    for name in "qk":
        np.testing.assert_allclose(unpacked(found["attention"][name]), np.array(getattr(truth, name)), rtol=2e-3,
                                   atol=2e-3)


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


def test_choosing_holds_what_each_setting_makes_of_the_logits(found, truth):
    """At the borders of top-p and min-p, rounding may keep one token more or fewer."""
    panel, n, tokens = found["choosing"], found["about"]["n_prompt"], found["tokens"]["ids"]
    assert [step["draws"][0] for step in panel["steps"]][:len(tokens) - n] == tokens[n:]
    assert panel["settings"][:2] == ["as in the run: temperature 1.5, top-p 0.9", "temperature 0"]
    assert len({*tokens[n:-1]}) < len(tokens[n:-1])  # a penalty counts how often
    for i, step in enumerate(panel["steps"]):
        logits, ids = truth.logits[n - 1 + i].astype(np.float32), step["ids"]
        np.testing.assert_allclose(unpacked(step["probabilities"]), softmax(logits)[ids], atol=1e-4)
        for words, held, shares, kept, drawn in zip(panel["settings"], *map(unpacked, (step["logits"], step["shares"])),
                                                    step["kept"], step["draws"], strict=True):
            pairs = (each.split(" ") for each in words.removeprefix("as in the run: ").split(", "))
            sampling = qwen3.Sampling(**{name.replace("-", "_"): float(value) if "top-k" != name else int(value)
                                         for name, value in pairs})
            penalized = qwen3.penalize(logits, sampling, tokens[:n], tokens[n:n + i])
            np.testing.assert_allclose(held, penalized[ids], atol=1e-3)
            those, p = qwen3.candidates(penalized, sampling) if sampling.temperature else ([penalized.argmax()], [1.0])
            expected, close = dict(zip(map(int, those), p)), np.isclose(shares, 0)
            assert kept == pytest.approx(len(those), abs=1, rel=0.02) and not close[ids.index(drawn)]
            assert {*np.argsort(-penalized)[:11]} <= {*ids}
            assert shares == pytest.approx([expected.get(token, 0) for token in ids], abs=0.03)


@pytest.mark.parametrize("settings", [
    {"temperature": 1.5, "top_p": 0.9}, {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 3.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5}, {"temperature": 0.0}])
def test_the_random_numbers_of_the_run(demo, settings):
    """They draw the tokens of generate, and with other settings those that generate would draw."""
    prompt, sampling = demo.tokenizer.encode(PROMPT), qwen3.Sampling(**settings)
    drawn, passes = panels.answered(Recorder(demo), prompt, 12, sampling, 7)
    expected = list(qwen3.generate(demo, prompt, 12, 7, **settings))
    assert [each.token for each in drawn][:len(expected)] == expected and len(drawn) - len(expected) in (0, 1)
    assert len(passes) == len(drawn)
    panel = panels.choosing_panel(drawn, sampling, prompt)
    first = [list(qwen3.generate(demo, prompt, 1, 7, **{"temperature": 1} | each)) for each in panels.VARIED]
    assert [step["draws"][0] for step in panel["steps"]] == [each.token for each in drawn]
    assert [[token] for token in panel["steps"][0]["draws"][1:]] == first


def test_a_page_without_a_seed_names_the_one_it_chose(tiny_model):
    wish = PageOptions("ab", raw=True, answer=AnswerOptions(max_new_tokens=6, temperature=5.0))
    first = contents(tiny_model, wish)
    again = contents(tiny_model, replace(wish, answer=replace(wish.answer, seed=first["about"]["seed"])))
    assert first["tokens"] == again["tokens"]


def test_cache(demo, found):
    passes, c = found["cache"]["passes"], demo.config
    assert found["cache"]["per_position"] == c.num_hidden_layers * c.num_key_value_heads * c.head_dim * 2 * 4
    assert [each["n"] for each in passes] == [found["about"]["n_prompt"]] + [1] * (len(passes) - 1)
    assert [each["length"] for each in passes] == list(np.cumsum([each["n"] for each in passes]))
    assert all(each["length"] <= each["capacity"] and each["seconds"] > 0 for each in passes)


def test_a_model_of_another_engine_is_refused(demo):
    other = with_engine(demo, overflow="of another engine")
    assert "another engine" in message_of(qwen3_inspect.inspect, other, PageOptions(PROMPT))
    assert "another engine" in message_of(qwen3_inspect.record_pass, other, PROMPT)


def test_a_long_prompt_is_refused_by_the_size_of_the_page(demo):
    """A model with more heads has room for fewer positions."""
    panels.check_room(demo, 400, 32)
    large = types.SimpleNamespace(config=replace(demo.config, num_hidden_layers=64, num_attention_heads=64))
    message = message_of(panels.check_room, large, 400, 32)
    assert 30 < int(re.search(r"than the (\d+) positions", message)[1]) < 100


# ---- The file --------------------------------------------------------------------------------------------------------

def test_the_file_runs_only_its_own_program_and_loads_nothing(found):
    page = html(found | {"about": found["about"] | {"prompt": EVIL}})
    blocks = re.findall(r"<script([^>]*)>(.*?)</script>", page, re.DOTALL)
    assert [kind for kind, _ in blocks] == [' type="application/json" id="contents"', "", "", ""]
    assert json.loads(blocks[0][1])["about"]["prompt"] == EVIL and "<" not in blocks[0][1]
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    for texts, kind in ((re.findall(r"<style>(.*?)</style>", page, re.DOTALL), "style-src"),
                        ([text for _, text in blocks[1:]], "script-src")):
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert f"{kind} " + " ".join(f"'sha256-{digest}'" for digest in digests) + ";" in policy
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy
    assert not re.search(r"""(src|href)=["']?(?!#)|url\(|@import""", page.replace(blocks[0][1], ""))


@pytest.mark.parametrize("library, n_files", [("page/uplot", 3), ("server/page/marked", 2),
                                              ("server/page/dompurify", 2), ("server/page/temml", 2),
                                              ("server/page/prism", 17)])
def test_libraries_are_in_the_pages_unchanged_with_their_licences(library, n_files):
    """The README of each lists the hashes of the npm package's files."""
    folder = ROOT / "qwen3_lib" / library
    page = joined(folder.parent / "page.html", {"CONTENTS": ""})[0]
    shipped = dict(re.findall(r"^\| `(\S+)` \| `([0-9a-f]{64})` \|$", (folder / "README.md").read_text("utf-8"),
                              re.MULTILINE))
    assert {*shipped} == {file.name for file in folder.iterdir()} - {"README.md"} and len(shipped) == n_files
    for name, digest in shipped.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
        text = (folder / name).read_text("utf-8")
        assert (escape(text, quote=False) if name == "LICENSE" else text) in page


def test_a_png_file_holds_its_pixels():
    grey = np.random.default_rng(0).integers(0, 256, (5, 7), np.uint8)
    image = Image.open(io.BytesIO(png(grey)))
    assert image.mode == "L" and np.array_equal(np.array(image), grey)


def test_packed_arrays_stay_finite():
    np.testing.assert_array_equal(unpacked(pack(np.array([1e30, -1e30, 0.5]), "f2")), [65504, -65504, 0.5])


# ---- Pictures --------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def pictured(seeing):
    """Contents of a page of a model that was trained: 8 rows and 12 columns of tokens."""
    return contents(seeing, about(shapes()))


@pytest.fixture(scope="module", params=CONFIGS)
def random_seeing(request, tmp_path_factory):
    return qwen3.load_model(make_seeing(CONFIGS[request.param], tmp_path_factory.mktemp("seeing")))


def shown(picture):
    """The pixels of a picture in the page."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(picture["url"].partition(",")[2]))).convert("RGB"))


def test_a_picture_among_the_tokens(pictured, seeing):
    """A head of the first attention has learned to look at the shapes, row by row."""
    [picture], tokens, at = pictured["pictures"], pictured["tokens"], places(pictured)
    assert (picture["rows"], picture["columns"], picture["full"]) == (8, 12, 96)
    assert len(at) == 96 and np.ptp(at) == 95 and {tokens["parts"][i] for i in at} == {"prompt"}
    assert [pictured["labels"][str(tokens["ids"][i])] for i in (at[0] - 1, at[0], at[-1] + 1)] == [
        "<|vision_start|>", "the picture", "<|vision_end|>"]
    assert np.array_equal(shown(picture), np.asarray(shapes()))  # PNG, which is smaller for a drawing
    question = [{"type": "image", "image": shapes()}, {"type": "text", "text": "What is this?"}]
    expected = qwen3.chat(seeing, {"role": "user", "content": question}, temperature=0, max_new_tokens=8)
    assert pictured["about"]["answer"] == expected.finish().text
    coloured = np.ptp(shown(picture).astype(int), axis=2).reshape(8, 32, 12, 32).mean(axis=(1, 3)) > 15
    seen = weights(pictured)[0, 0, pictured["about"]["n_prompt"] - 1, at].reshape(8, 12)
    assert seen.sum() > 0.9 and seen[coloured].sum() > 0.9 * seen.sum() and coloured.mean() < 0.5


def test_pictures_are_made_small_until_they_fit(random_seeing):
    """Two that differ and one that comes twice; their tokens and the text fill the page, and nothing goes beyond it."""
    found = contents(random_seeing, about(NOISE, shapes(), NOISE))
    first, second, third = found["pictures"]
    room = panels.check_room(random_seeing, 0, 8, 2 * panels.PAGE_ROOM)
    n, used = [len(places(found, k)) for k in range(3)], len(found["tokens"]["ids"])
    assert used <= room + 8 and n[0] == n[2] == first["rows"] * first["columns"] == third["rows"] * third["columns"]
    assert n[1] == 96 and 0.8 * (room - used + sum(n)) / 3 < n[0] < first["full"] == 36 * 27
    expected = np.asarray(NOISE.resize((32 * first["columns"], 32 * first["rows"]), 3), float)
    assert first["url"].startswith("data:image/jpeg") and np.abs(shown(first) - expected).mean() < 8
    small = contents(random_seeing, about(NOISE, max_pixels=2**14))["pictures"][0]
    assert small["rows"] * small["columns"] == small["full"] <= 16
    assert len(html(found)) < 3 * panels.PAGE_ROOM


def test_positions_turn_the_hands(random_seeing):
    """q and k before RoPE, turned by time, row or column as the page says, make the attention weights of the page."""
    found = contents(random_seeing, about(shapes()))
    attention, at, n = found["attention"], places(found), len(found["tokens"]["ids"])
    positions, half = np.array(attention["positions"]), random_seeing.config.rope_dim // 2
    assert positions[:at[0] + 1].tolist() == [[i] * 3 for i in range(at[0] + 1)]
    grid = np.indices((8, 12)).reshape(2, -1).T + at[0]
    assert np.array_equal(positions[at], np.column_stack([np.full(96, at[0]), grid]))
    assert positions[at[-1] + 1:].tolist() == [[at[0] + 12 + i] * 3 for i in range(n - at[-1] - 1)]
    assert attention["pairs"] == list(range(half)) and {*attention["axes"]} == {0, 1, 2}
    angles = positions[:, attention["axes"]] * np.array(attention["frequencies"])
    q, k = (x[..., :half] + 1j * x[..., half:] for x in (unpacked(attention[name]).astype(float) for name in "qk"))
    if random_seeing.config.rope_dim < random_seeing.config.head_dim:
        return  # a Qwen3.5 turns a part of each head, and the page has this part only
    q, k = (x * np.exp(1j * angles) for x in (q[1, 3], k[1, 3 * k.shape[1] // q.shape[1]]))
    scores = np.where(np.tri(n), (q @ k.conj().T).real / np.sqrt(2 * half), -np.inf)
    np.testing.assert_allclose(weights(found)[1, 3], softmax(scores), atol=2e-3)


# ---- The command -----------------------------------------------------------------------------------------------------

def test_command(tmp_path, capfd, monkeypatch):
    opened, file = [], tmp_path / "a page.html"
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    options = [PROMPT, "--html", file, "-n", 2, "--open", "--model", ROOT / "demo"]
    status, out, err = run_main(capfd, *options, main=qwen3_inspect.main)
    assert (status, err) == (0, "") and out.startswith(f"{file}: ") and file.read_text("utf-8").startswith("<!DOCTYPE")
    assert opened == [file.as_uri()]
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    status, out, err = run_main(capfd, *options, main=qwen3_inspect.main)  # the page is there, so this is no failure
    assert status == 0 and out.startswith(f"{file}: ")
    assert_one_line(err, "no browser", file)


def test_a_terminal_shows_progress(demo, monkeypatch):
    shown = []
    monkeypatch.setattr("tqdm.tqdm", lambda items, text, **_: shown.append(text) or items)
    monkeypatch.setattr("sys.stderr", types.SimpleNamespace(isatty=lambda: True))
    contents(demo, PageOptions(PROMPT, answer=AnswerOptions(max_new_tokens=2)))
    assert shown == ["reading the prompt", "answering", "logit lens", "choosing"]


def test_command_with_pictures(tmp_path, capfd):
    for name, image in (("shapes.png", shapes()), ("noise.png", NOISE)):
        image.save(tmp_path / name)
    model = ("--model", ROOT / "tests/tiny_seeing", "What is this?", "-n", 2, "--out", tmp_path / "page.html")
    twice = ("--image", tmp_path / "shapes.png") * 2
    status, out, err = run_main(capfd, *model, *twice, "--max-pixels", 2**14, main=qwen3_inspect.main)
    page = (tmp_path / "page.html").read_text("utf-8")
    assert (status, err) == (0, "") and page.count("data:image/png") == 2
    status, out, err = run_main(capfd, *model, "--image", tmp_path / "noise.png", main=qwen3_inspect.main)
    assert status == 0
    assert_one_line(err, "room for", "972 that qwen3.py makes")


@pytest.mark.parametrize("args, words", [
    (["word " * 2000], ["the prompt has", "tokens", "--max-tokens", "positions"]), ([" \n"], ["the prompt is empty"]),
    ([PROMPT, "--out", ROOT / "README.md"], ["README.md", "exists"]),
    ([PROMPT, "--out", "no folder/page.html"], ["no folder", "cannot be written"]),
    ([PROMPT, "--top-p", 2], ["--top-p"]), ([PROMPT, "--raw", "--think"], ["raw", "think"]),
    ([PROMPT, "--compare", "Hi"], ["--compare", "--no-think"]),
    ([PROMPT, "--no-quantized"], ["bench/run.py --only quality"]),
    ([PROMPT, "--model", "./nowhere"], ["nowhere"]), ([], ["prompt"]),
    ([PROMPT, "--image", "shapes.png"], ["demo", "can't see"]),
    ([PROMPT, "--image", "missing.png", "--model", "./nowhere"], ["missing.png", "no such file"]),
    ([PROMPT, "--image", "shapes.png", "--raw"], ["raw", "--image"]),
    (["<|image_pad|>", "--image", "shapes.png", "--model", ROOT / "tests/tiny_seeing"], ["image_pad"])])
def test_bad_input_is_one_line(args, words, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shapes().save("shapes.png")
    status, out, err = run_main(capfd, *args, main=qwen3_inspect.main)
    assert status in (1, 2) and not out and [*tmp_path.iterdir()] == [tmp_path / "shapes.png"]
    assert_one_line(err, *words)


def test_the_page_shows_the_source_of_functions_that_exist():
    page = (ROOT / "qwen3_lib/page/page.html").read_text("utf-8")
    names = [name for names in re.findall(r'data-functions="([^"]+)"', page) for name in names.split()]
    assert len(names) > 15
    for name in names:
        module = qwen3 if hasattr(qwen3, name.split(".")[0]) else qwen3_5
        assert callable(reduce(getattr, name.split("."), module)), name
