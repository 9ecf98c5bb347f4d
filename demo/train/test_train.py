"""Properties of the training text and of the evaluation: pytest demo/train"""

import argparse
import contextlib
import random
import re

import codec
import evaluate
import hearing
import hybrid
import loop
import numpy as np
import pytest
import speaking
import torch
import torch.nn.functional as F
import train
from corpus import conversation, sum_turn
from heldout import HELD_OUT, HELD_OUT_CHAT, HELD_OUT_TOOLS
from questions import CHAT, QUESTIONS
from qwen3 import load_model
from qwen3_tts import decode, talker_prompt, voices_of
from safetensors.torch import load_file
from tokenizer import IGNORED, encode_branches, encode_example, segments
from tokenizer_utils import load_tokenizer, parse_answer
from toolbox import TOOLS
from turns import is_held_out
from transformers import Qwen3_5TextConfig


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(train.DEMO)


def test_no_wording_is_in_training_and_held_out():
    def bare(pattern):
        """Without capitals, marks and spaces, which make no other wording."""
        return re.sub(r"[^\w{}()|]", "", pattern.lower())

    def texts(pattern):
        choice = re.search(r"\(([^()]*)\)", pattern)
        return [text for word in choice[1].split("|") for text in texts(pattern.replace(choice[0], word, 1))] \
        if choice else [pattern]

    assert set(HELD_OUT) == set(QUESTIONS)
    for training, held_out in ((QUESTIONS, HELD_OUT), (CHAT, HELD_OUT_CHAT)):
        for key, patterns in held_out.items():
            asked = re.compile("|".join(re.sub(r"([{}])", r"\\\1", bare(pattern)) for pattern in training[key]))
            assert not [text for pattern in patterns for text in texts(bare(pattern)) if asked.fullmatch(text)]
    names = {name for tool in TOOLS for name in tool.names.split()}
    assert not names & {name for tool in HELD_OUT_TOOLS for name in tool.names.split()}


def test_sums_are_right_and_none_is_held_out():
    rng = random.Random(1)
    for _ in range(500):
        turn = sum_turn(rng, QUESTIONS)
        sum_, result = turn.answer.rstrip(".").split(" = ")
        a, sign, b = sum_.split()
        assert int(result) == (int(a) + int(b) if sign == "+" else int(a) - int(b))
        assert int(re.search(r"digits: (-?\d+)", turn.thought)[1]) == int(result)
        assert not is_held_out("sum", int(a), int(b), sign == "+")


def test_training_renders_conversations_as_the_template_does(tokenizer):
    rng = random.Random(5)
    for _ in range(200):
        example = conversation(rng)
        if example.raw:
            continue
        text = "".join(piece for piece, _ in segments(example))
        switch = {"enable_thinking": example.enable_thinking}
        assert text + "\n" == tokenizer.apply_chat_template(example.messages, example.tools,
                                                            add_generation_prompt=False, **switch)
        assert text.startswith(tokenizer.apply_chat_template(example.messages[:-1], example.tools, **switch))
        ids, labels = encode_example(example, tokenizer.encode)
        assert ids == tokenizer.encode(text)
        assert all(label in (IGNORED, after) for label, after in zip(labels, ids[1:]))
        assert labels[-2] == tokenizer.token_to_id("<|im_end|>")


def test_conversations_beside_each_other_are_trained_as_if_alone(tokenizer, monkeypatch):
    monkeypatch.setattr(train, "HAS_BF16", False)
    monkeypatch.setitem(train.CONFIG, "num_hidden_layers", 2)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model, rng, n_beside = train.new_model().eval(), random.Random(8), 0
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    for _ in range(10):
        example = conversation(rng)
        row = encode_branches(example, tokenizer.encode, 500)
        batch = train.rectangle([row])
        with torch.no_grad():
            together = train.states(model, *batch[[0, 2, 3]])[0]
        for branch, one in enumerate([example, *example.beside], 1):
            ids, labels = (torch.tensor(part) for part in encode_example(one, tokenizer.encode))
            own = torch.from_numpy((row[2] == branch).nonzero()[0])
            if not len(own):
                break
            n_beside += branch > 1
            with torch.no_grad():
                alone = train.states(model, ids[None], torch.zeros_like(ids)[None], torch.arange(len(ids))[None])[0]
            assert torch.equal(batch[0, 0, own], ids[-len(own) :])
            assert torch.equal(batch[1, 0, own], labels[-len(own) :])
            assert (labels[: -len(own)] == IGNORED).all()
            torch.testing.assert_close(together[own], alone[-len(own) :], rtol=1e-3, atol=1e-3)
    assert n_beside > 5


@pytest.mark.parametrize("name", evaluate.SKILLS)
def test_the_evaluation_takes_right_answers_for_right_and_others_not(name):
    for family in (evaluate.IN_FAMILY, evaluate.HELD_OUT_FAMILY):
        rng = random.Random(7)
        for _ in range(30):
            case, wrong = evaluate.SKILLS[name][0](rng, family), None
            while case:
                answer = parse_answer(case.answer)
                assert case.is_right(answer), (case.messages, case.answer)
                wrong = case.is_right(parse_answer("Zzz."))
                case = case.then(answer) if case.then else None
            assert not wrong


def test_the_head_of_the_tiny_hybrid_guesses_what_the_model_says(tokenizer):
    folder = train.DEMO.parent / "tests/tiny_hybrid"
    state = {name.removeprefix("model."): value.float()
             for name, value in load_file(folder / "model.safetensors").items()}
    n_tokens = len(state["language_model.embed_tokens.weight"])
    model = hybrid.Hybrid(Qwen3_5TextConfig(**hybrid.TEXT, vocab_size=n_tokens))
    model.load_state_dict(state)
    ids = hybrid.rows_of("test", tokenizer.backend, 4)
    pairs = [*hybrid.guesses_of(model, ids)]
    assert sum(said == guessed for said, guessed in pairs) > 0.7 * len(pairs)
    other = ids.clone()
    other[:, 100:] = 0
    with torch.no_grad():
        assert torch.equal(model(ids)[1][:, :99], model(other)[1][:, :99])  # a guess sees one token more than the model


@pytest.fixture(scope="module")
def speaker():
    return load_model(loop.ROOT / "tests/tiny_speaking")


def test_the_decoder_that_is_trained_is_the_one_that_speaks(speaker):
    """Also without what is the identity, which training leaves out."""
    decoder = codec.Decoder([torch.zeros(codec.SIZE, codec.DECODER["codebook_dim"] // 2)] * codec.GROUPS)
    state = load_file(speaker.path / "speech_tokenizer/model.safetensors")
    decoder.load_state_dict({name.removeprefix("decoder."): value.float() for name, value in state.items()})
    codes = torch.randint(codec.SIZE, (80, codec.GROUPS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, short = (decoder(codes[None], whole)[0].numpy() for whole in (True, False))
    np.testing.assert_allclose(decode(voices_of(speaker).codec, codes.numpy(), {}), whole.clip(-1, 1), atol=1e-4)
    np.testing.assert_allclose(whole, short, atol=1e-4)


@pytest.mark.parametrize("language", [False, True])
def test_the_talker_is_trained_on_the_prompt_that_it_gets(speaker, language):
    tokenizer, text = speaking.trained_tokenizer(speaking.SPECIAL, []), "Tom has two red birds."
    model = speaking.Talker(tokenizer.get_vocab_size())
    state = load_file(speaker.path / "model.safetensors")
    model.load_state_dict({name: state[speaking.original_name(name)].float() for name in model.state_dict()})
    codes = torch.arange(6 * codec.GROUPS).reshape(6, -1)
    ids, marks = speaking.prompt(tokenizer, text, language)
    rows = F.pad(torch.tensor(marks)[:, None], (0, codec.GROUPS - 1), value=-1)
    seen, _ = talker_prompt(speaker, text, speaking.VOICE, "english" if language else "auto")
    with torch.no_grad():
        np.testing.assert_allclose(model.vectors(torch.tensor(ids), rows).numpy(), seen, rtol=1e-3, atol=1e-3)
    ids, given, labels = speaking.batch_of(tokenizer, [(text, codes)] * 20, random.Random(0))
    for row, shown, wanted in zip(ids, given, labels):
        frames = (wanted[:, 1] != IGNORED).nonzero()[:, 0]
        assert torch.equal(wanted[frames], codes) and wanted[frames[-1] + 1, 0] == speaking.END
        assert torch.equal(shown[frames + 1][(shown[frames + 1] >= 0).all(1)], codes[(shown[frames + 1] >= 0).all(1)])


def test_periods_begin_where_frames_do():
    t = np.arange(10 * codec.FRAME) / codec.RATE
    said = sum(np.sin(2 * np.pi * k * (100.4 * t + 0.3)) / k for k in range(1, 9))
    periods = codec.in_phase(said)[codec.FRAME:-codec.FRAME].reshape(-1, codec.PERIOD)
    assert np.abs(periods - periods.mean(0)).max() < 0.2 < 1 < np.abs(periods).max()


@pytest.mark.parametrize("draw", [hearing.sentence, hearing.row])
def test_no_sentence_is_in_both_sets(draw):
    """With commas or without them."""
    held_out, training = ({next(texts).replace(",", "") for _ in range(3000)} for texts in (
        speaking.sentences(random.Random(1), unseen, draw) for unseen in (True, False)))
    assert held_out and training and not held_out & training


@pytest.fixture
def trained(tmp_path):
    """A function that trains a tiny model, up to a step or to the end -> its weights as they are written."""
    def run(name, stop=None, **options):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Embedding(20, 16), torch.nn.Linear(16, 16), torch.nn.LayerNorm(16))

        def losses(step):
            if step == stop:
                raise KeyboardInterrupt
            for ids in torch.randint(20, (2, 8), generator=torch.Generator().manual_seed(step)):
                yield {"loss": F.cross_entropy(model(ids) @ model[0].weight.T, ids.roll(1))}

        usual = dict(steps=120, peak=1.0, start=None, checkpoint=None, mix=None, out=tmp_path / name)
        args = argparse.Namespace(**usual | options)
        with contextlib.suppress(KeyboardInterrupt):
            loop.train(args, model, "model.{}".format, {"config.json": {"b": 1, "a": "é"}}, (0.006, 0.004), losses)
        return {key: value.float() for key, value in load_file(tmp_path / name / "model.safetensors").items()}

    return run


def test_a_run_that_was_interrupted_goes_on_as_if_it_had_not_been(trained, tmp_path):
    whole, kept = trained("whole"), {"checkpoint": tmp_path / "kept"}
    half = trained("interrupted", stop=77, **kept)
    assert not torch.equal(half["model.1.weight"], whole["model.1.weight"])
    rest = trained("interrupted", **kept)
    assert all(torch.equal(value, rest[name]) for name, value in whole.items())
    assert (tmp_path / "whole/config.json").read_text("utf-8") == '{\n  "a": "é",\n  "b": 1\n}\n'


def test_a_run_starts_from_the_weights_of_a_folder(trained, tmp_path):
    whole = trained("whole")
    same = trained("same", steps=1, peak=0.0, start=tmp_path / "whole")
    assert all(torch.equal(value, same[name]) for name, value in whole.items())


def test_a_result_can_be_a_mean(trained, tmp_path):
    one, other = trained("one"), trained("other", steps=10)
    mean = trained("mean", steps=10, mix=(tmp_path / "one", "0.3"))
    for name, value in mean.items():
        torch.testing.assert_close(value, 0.3 * one[name] + 0.7 * other[name], rtol=0.02, atol=1e-3)
