"""The MTP head of a Qwen3.5: its numbers against the reference, its sources, and that no guess changes an answer."""
import dataclasses
import json
import random
from functools import partial

import numpy as np
import pytest

import qwen3
import qwen3_numba as fast
from configs import BASE, FRANCE, HYBRID, HYBRID_MOE, ROOT, VOCABULARY
from fuzzing import fuzz
from helpers import logits_of, message_of, random_ids, run_main, states_of
from make_random_model import let_head_agree, make_random_model
from oracle import mtp_oracle
from published import publish
from qwen3_5 import mtp_config
from qwen3_lib.generation.ahead import Ahead, ahead_of
from qwen3_lib.generation.batch import Batch
from qwen3_lib.generation.completion import Completion
from qwen3_lib.generation.guesses import MTP, Draft
from qwen3_lib.generation.schema import regex
from qwen3_lib.kernels.hybrid import Vocabulary

HEAD = {"mtp_num_hidden_layers": 1}
BOTH = {"dense": HYBRID | HEAD, "mixture": HYBRID_MOE | HEAD}
make = partial(make_random_model, dtype="float32")
ENGINES = {"NumPy": qwen3.Engine, "fast": partial(fast.engine, threads=1, kv_dtype="f32")}


@pytest.fixture(params=ENGINES)
def engine(request):
    return ENGINES[request.param]()


def agreeing(path, config=HYBRID, factor=0.15, **options):
    """A model whose head is often right: see let_head_agree."""
    scales = dict.fromkeys(("o_proj", "out_proj", "down_proj"), factor)
    folder = make(config | HEAD | {"vocab_size": VOCABULARY}, path, scales=scales, **options)
    let_head_agree(folder)
    return folder


def head_cache(model):
    return model.engine.new_cache.plain(mtp_config(model.config))


# ---- The numbers -----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", BOTH)
def test_the_head_is_that_of_the_formulas(kind, engine, tmp_path):
    """In pieces, with the model's own hidden states: the states and the guesses of the oracle."""
    model, ids = qwen3.load_model(make(BOTH[kind], tmp_path), engine), random_ids(40)
    hidden = states_of(model, ids[:-1])
    (expected, logits), cache, end = mtp_oracle(model, hidden, ids[1:], 3), head_cache(model), 0
    for n in (30, 1, 8):
        start, end = end, end + n
        states, token = model.engine.guess(model, hidden[start:end], np.array(ids[start + 1:end + 1]), cache, 3)
        assert np.abs(states - expected[start:end]).max() < 1e-4 and token == logits[end - 1].argmax()


@pytest.mark.parametrize("hidden", [False, True], ids=["embedding", "hidden state"])
def test_a_head_that_copies(hidden, engine, tmp_path):
    """With a layer that adds nothing, fc takes a half of what it gets, and the norms cancel out: then the guess is what
    the lm_head makes of the next token's embedding, or of the hidden state: what the model itself has drawn."""
    let_head_agree(path := make(HYBRID | HEAD | {"vocab_size": 4096}, tmp_path), hidden=hidden)
    model, ids = qwen3.load_model(path, engine), np.array(random_ids(20, vocab_size=4096))
    logits, states = logits_of(model, ids), states_of(model, ids)
    rows, stored = model.engine.rows(model, "embed_tokens", np.arange(4096)), model.source.tensors
    follows = (rows[ids] * (1 + stored["model.norm.weight"].data) @ rows.T).argmax(axis=-1)
    for i in range(19):
        token = model.engine.guess(model, states[i:i + 1], ids[i + 1:i + 2], head_cache(model), i)[1]
        assert token == (logits[i].argmax() if hidden else follows[i + 1])


def test_a_pass_gives_states_and_logits(engine, tmp_path):
    model, ids = qwen3.load_model(make(BOTH["dense"], tmp_path), engine), random_ids(600)
    part = qwen3.NextTokens(model.engine.new_cache(model.config), np.array(ids))
    logits, states = qwen3.compute(model, [part], states=True)
    assert np.array_equal(logits[0], qwen3.forward(model, ids, model.engine.new_cache(model.config)))
    assert np.array_equal(states, states_of(model, ids))


# ---- Where it is stored ----------------------------------------------------------------------------------------------

def guessed(model, seed=0):
    """What a model's head makes of some states."""
    states = np.random.default_rng(seed).standard_normal((5, model.config.hidden_size), np.float32)
    return model.engine.guess(model, states, np.array(random_ids(5)), head_cache(model), 2)[0]


@pytest.mark.parametrize("kind", BOTH)
def test_the_published_form(kind, engine, tmp_path):
    """publish() writes an MTP head of its own, whose layer is the last one that attends."""
    path = make({key: value for key, value in BOTH[kind].items() if key not in HEAD}, tmp_path / "model")
    assert qwen3.load_model(path, engine).config.mtp_num_hidden_layers == 0
    model = qwen3.load_model(publish(path), engine)
    stored = qwen3.map_safetensors(path / "model.safetensors")
    w = {name: qwen3.to_float32(stored[f"mtp.{name}.weight"]) for name in (
        "fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    numpy = qwen3.load_model(path)
    last = numpy.weights["layers"][-1]
    oracle = dataclasses.replace(numpy, weights=numpy.weights | {"mtp": last | w | {
        name: 1 + w[name] for name in w if name != "fc"}})
    assert model.config.mtp_num_hidden_layers == 1
    assert np.abs(guessed(model) - guessed(oracle)).max() < 1e-4


def test_a_head_with_an_embedding_of_its_own_is_skipped(tmp_path):
    path = make(HYBRID | HEAD | {"mtp_use_dedicated_embeddings": True}, tmp_path)
    assert qwen3.load_model(path).config.mtp_num_hidden_layers == 0


def test_files_without_the_head(engine, tmp_path):
    """transformers writes its number into config.json, but not its tensors."""
    path = make(HYBRID, tmp_path)
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | HEAD))
    model = qwen3.load_model(path, engine)
    assert model.config.mtp_num_hidden_layers == 0 and Completion(model, [1], draft="auto").speculator is None
    (path / "config.json").write_text(json.dumps(raw | {"mtp_num_hidden_layers": "two"}))
    assert "mtp_num_hidden_layers" in message_of(qwen3.load_model, path, engine)


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("kind", BOTH)
def test_a_quantized_folder_keeps_the_head(kind, form, tmp_path):
    from qwen3_lib.io.packed import save_quantized
    model = fast.load_model(make(BOTH[kind], tmp_path / "model"), form, 1)
    save_quantized(model, tmp_path / "saved", form)
    saved, exact = fast.load_model(tmp_path / "saved", threads=1), fast.load_model(tmp_path / "model", threads=1)
    assert np.array_equal(guessed(saved), guessed(model))
    assert np.sqrt(np.square(guessed(model) - guessed(exact)).mean()) < (0.1 if form == "int8" else 0.8)


# ---- No guess changes an answer --------------------------------------------------------------------------------------

STOP = [33, 31]


def any_options(rng, model):
    """What an answer may ask for, and where it may be asked."""
    some = {"max_new_tokens": rng.randint(1, 18), "seed": rng.randrange(99),
            "temperature": rng.choice([0, 0, 0.1, 0.7]), "eos_token_ids": rng.choice([(), (), range(40, 90)])}
    for chance, name, value in (
            (0.2, "top_k", 5), (0.2, "top_p", 0.8), (0.2, "min_p", 0.1), (0.2, "repetition_penalty", 1.3),
            (0.2, "presence_penalty", 1.0), (0.2, "frequency_penalty", 0.5), (0.4, "logprobs", 2), (0.15, "lookup", 3),
            (0.2, "stop", [model.tokenizer.decode(STOP[:1]), "e"]), (0.2, "think_budget", rng.randint(0, 6)),
            (0.2, "logit_bias", {i: rng.uniform(-9, 9) for i in range(30)}),
            (0.15, "schema", regex("(<think>|The capital) is [a-z]{3,9}, or so, [0-9]{2}"))):
        if rng.random() < chance:
            some[name] = value
    return some


def result(answer):
    """In NumPy, the last bits of a logprob depend on how many tokens are in a pass."""
    exact = not isinstance(answer.model.weights, dict) or answer.logprobs is None
    return (answer.token_ids, answer.text, answer.finish_reason,
            answer.logprobs if exact else [entry.token_id for entry in answer.logprobs])


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(a model, what may draft for it): MTP heads, the same with fewer bits, other models with the same tokenizer."""
    dense, mixture = (agreeing(tmp_path_factory.mktemp(name), config) for name, config in (
        ("dense", HYBRID), ("mixture", HYBRID_MOE)))
    half = agreeing(tmp_path_factory.mktemp("half"), dtype="bfloat16")
    other = make_random_model(BASE | {"vocab_size": VOCABULARY}, tmp_path_factory.mktemp("other"))
    load = partial(fast.load_model, threads=1)
    return [(load(half, activations="bf16"), ["auto"]), (load(dense), ["auto", load(dense, "int4"), load(other)]),
            (load(dense, "int8"), ["auto"]), (load(dense, "int4"), ["auto"]), (load(mixture), ["auto"]),
            (load(ROOT / "demo"), [load(ROOT / "demo", "int4")]),
            (qwen3.load_model(dense), ["auto", qwen3.load_model(other)])]


@fuzz(80, at_least=0.3, refused=False)
def test_no_guess_changes_an_answer(rng, models):
    """In a conversation and in a batch, with any number of guesses: the ids, texts and logprobs of plain runs."""
    model, drafts = rng.choice(models)
    draft = rng.choice(drafts)
    prompts, text = [], model.tokenizer.encode("<think>\n") if rng.random() < 0.3 else []
    for _ in range(rng.randint(1, 2)):
        text = [*text[:rng.choice([len(text), max(len(text) - 3, 0), 2])],
                *(rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 3, 20, 70])))]
        options = any_options(rng, model)
        plain = Completion(model, text, draft="off", **options).finish()
        prompts.append((list(text), options, plain))
        text += plain.token_ids
    cache, batch, counts = model.engine.new_cache(model.config), Batch(model, rng.randint(1, 2), 600, 10**7), []
    in_batch = [batch.add(i, prompt, draft=draft, **options) for i, (prompt, options, _) in enumerate(prompts)]
    force, lasting = rng.random() < 0.8, draft if draft == "auto" else Draft(draft, model)

    def guessing(answer):
        for source in answer.speculator.sources if force else ():
            source.length = lambda *_: rng.randint(0, 6)
        return answer

    for answer in map(guessing, in_batch):
        counts.append(answer.speculator)
    while not batch.idle:
        batch.step()
    turns = []
    for prompt, options, _ in prompts:
        turns.append(guessing(Completion(model, prompt, cache, draft=lasting, **options)).finish())
        counts.append(turns[-1].speculator)
        ids = [*prompt, *turns[-1].token_ids]
        assert cache.token_ids[:cache.length].tolist() == ids[:cache.length] and cache.length >= len(ids) - 1
    for one, other, (_, _, plain) in zip(in_batch, turns, prompts):
        assert result(one) == result(plain) and result(other) == result(plain)
    return sum(each.accepted for each in counts) > 0


# ---- What the head has read ------------------------------------------------------------------------------------------

def followed(model, monkeypatch):
    """The model, whose states must be those that its text has."""
    read = Ahead.read

    def checked(self, model, states, token_ids):
        text = [*self.text, int(token_ids[-1])] if len(self.states) else None
        if text is not None and self.start == 0 and len(states) == len(self.states):
            expected = states_of(model, self.text)
            assert np.abs(states - expected[-len(states):]).max() < 1e-4
            assert text[-len(token_ids):] == token_ids.tolist()
        return read(self, model, states, token_ids)

    monkeypatch.setattr(Ahead, "read", checked)
    return model


def test_the_head_follows_a_conversation(engine, tmp_path, monkeypatch):
    """A long prompt, the next turn, another answer, and an edited question: it has read all of the text, as it is."""
    monkeypatch.setattr(MTP, "length", lambda self, *_: 3)
    path = agreeing(tmp_path)
    (path / "generation_config.json").write_text('{"eos_token_id": 7}')
    model = followed(qwen3.load_model(path, engine), monkeypatch)
    cache, first = model.engine.new_cache(model.config), random_ids(700, 1, 300) + [7, 9, 8]
    options = {"draft": "auto", "temperature": 0, "max_new_tokens": 12, "eos_token_ids": ()}
    answer = Completion(model, first, cache, **options).finish()
    second = first + answer.token_ids + [7] + random_ids(90, 2, 300) + [7, 9, 8]
    for text in (second, second, first + answer.token_ids + [7, 5, 7, 9, 8], first):
        answer = Completion(model, text, cache, **options).finish()
        ahead = ahead_of(cache)
        assert answer.speculator.guessed > 0 and ahead.start == 0
        n = ahead.cache.length
        assert n >= len(text) and ahead.cache.token_ids[:n].tolist() == (text + answer.token_ids)[1:n + 1]


def test_the_head_begins_anew_behind_what_it_missed(tmp_path, monkeypatch):
    monkeypatch.setattr(MTP, "length", lambda self, *_: 3)
    model = fast.load_model(agreeing(tmp_path), None, 1)
    cache, options = model.engine.new_cache(model.config), {"temperature": 0, "max_new_tokens": 9, "eos_token_ids": ()}
    text = random_ids(50, 1, 300)
    text += Completion(model, text, cache, **options).finish().token_ids
    missed = text + Completion(model, text, cache, draft="off", **options).finish().token_ids
    known = cache.length
    answer = Completion(model, missed + [3], cache, **options).finish()
    assert answer.speculator.guessed > 0 and ahead_of(cache).start == known


def test_a_copied_beginning_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(MTP, "length", lambda self, *_: 3)
    path = agreeing(tmp_path)
    (path / "generation_config.json").write_text('{"eos_token_id": 7}')
    model, system = fast.load_model(path, None, 1), random_ids(120, 1, 300) + [7]
    batch, options = Batch(model, 2, 400, 10**9), {"temperature": 0, "max_new_tokens": 9, "eos_token_ids": ()}
    for i in range(2):
        answer = batch.add(i, system + random_ids(20, i, 300), **options)
        while not batch.idle:
            batch.step()
        assert answer.cached_tokens == i * len(system) and answer.speculator.guessed > 0
    starts = {ahead_of(cache).start for cache in batch.slots if cache.ahead is not None}
    assert starts == {0}


# ---- When it drafts --------------------------------------------------------------------------------------------------

def test_who_drafts(tmp_path):
    path = agreeing(tmp_path)
    numpy, model = qwen3.load_model(path), fast.load_model(path, None, 1)
    drafts = {(each is model, draft): Completion(each, [1], draft=draft).speculator is not None
              for each in (numpy, model) for draft in (None, "auto", "off")}
    assert drafts == {(False, None): False, (False, "auto"): True, (False, "off"): False,
                      (True, None): True, (True, "auto"): True, (True, "off"): False}
    assert "auto or off" in message_of(Completion, model, [1], draft="on")


def test_the_command_line(tmp_path, capfd):
    path = agreeing(tmp_path)
    options = ("--model", path, "--fast", "--threads", 1, "--greedy", "--max-tokens", 60, "--stats", "Hello")
    found = {draft: run_main(capfd, *options, *draft) for draft in ((), ("--draft", "auto"), ("--draft", "off"))}
    assert len({out for _, out, _ in found.values()}) == 1
    assert ["guesses right" in err for *_, err in found.values()] == [True, True, False]
    said = [run_main(capfd, "--max-tokens", 1, *draft, "Hi")[2] for draft in ((), ("--draft", "auto"))]
    assert ["this model has no MTP head" in err for err in said] == [False, True]


# ---- The rows that guesses come from ---------------------------------------------------------------------------------

@pytest.mark.parametrize("form", [None, "int8", "int4"])
def test_common_tokens_and_those_of_the_text(form, tmp_path, monkeypatch):
    """The logits of the small head are those of the whole one, for the first tokens and for the latest others."""
    monkeypatch.setattr(Vocabulary, "COMMON", 3)
    monkeypatch.setattr(Vocabulary, "OTHERS", 2)
    model = fast.load_model(make(HYBRID | HEAD | {"vocab_size": 700}, tmp_path, dtype="bfloat16"), form, 1)
    vocabulary, rng = Vocabulary(model.weights.head), random.Random(0)
    numbers, latest = fast.matrix_rows(model.weights.head, np.arange(700)), [3, 4]
    for _ in range(40):
        token = rng.randrange(700)
        vocabulary.add(np.array([token]))
        panel = token // 32
        if panel > 2 and panel not in latest and panel < 700 // 32:
            latest = [*latest[1:], panel]
        rows = [vocabulary.token(i) for i in range(5 * 32)]
        assert {row // 32 for row in rows} == {0, 1, 2, *latest}
        assert np.array_equal(fast.matrix_rows(vocabulary.matrix, np.arange(5 * 32)), numbers[rows])


@pytest.mark.parametrize("guesses, share", [(1, 0.7), (3, 0.5)])
def test_a_trained_head_is_often_right(engine, guesses, share, monkeypatch):
    """Trained in torch on its own (demo/train/hybrid.py): its guesses, and the guesses that stand on these."""
    monkeypatch.setattr(MTP, "length", lambda self, *_: guesses)
    model, right, guessed = qwen3.load_model(ROOT / "tests/tiny_hybrid", engine), 0, 0
    for question in (FRANCE, "Tell me a story about a fox.", "What is 417 + 385?"):
        plain, answer = (qwen3.chat(model, question, temperature=0, max_new_tokens=60, draft=draft).finish()
                         for draft in ("off", "auto"))
        assert answer.token_ids == plain.token_ids
        right, guessed = right + answer.speculator.accepted, guessed + answer.speculator.guessed
    print(f"{right} of {guessed}")
    assert right > share * guessed > 0
