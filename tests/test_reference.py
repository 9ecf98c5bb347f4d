"""Live comparison with transformers in float32: docs/models.md. Skipped without torch or transformers."""
import importlib
import json
import os
import random
from pathlib import Path

import jinja2
import numpy as np
import pytest

import qwen3
from configs import BASE, CASES, HYBRID, HYBRID_MOE, HYBRIDS, QWEN3_5, ROOT, VOCABULARY, needs_official_files
from fuzzing import any_conversation
from helpers import REMOVED, config_at, edit_json, logits_of, message_of, random_ids
from make_random_model import make_random_model
from published import bytes_in_blocks, change_config, official_configs, quantize_model, reduced, write_tensors
from qwen3 import map_safetensors
from qwen3_lib.io.rope import stretched, with_scaled_rope
from qwen3_lib.generation.options import AnswerOptions
from qwen3_lib.page.contents import PageOptions, contents
from test_inspect import unpacked
from test_qwen3_moe import MOE, fuse
from tokenizer_utils import StreamDecoder, load_tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from make_golden import greedy, load as reference  # noqa: E402

both_engines = pytest.mark.parametrize("engine", ["qwen3", "qwen3_numba"])


def load(engine, path, **options):
    options |= {} if engine == "qwen3" else {"kv_dtype": "f32", "activations": "f32"}
    return importlib.import_module(engine).load_model(path, **options)


def expected_logits(theirs, ids, **options):
    with torch.no_grad():
        return theirs(torch.tensor(np.array(ids))[None], **options).logits[0].numpy()


def assert_close(logits, expected):
    """Both are float32, so they differ by rounding only: by 1e-6 of the spread, and the worst of 50,000 by 1e-5."""
    difference = np.abs(logits - expected) / expected.std()
    assert logits.dtype == np.float32 and np.sqrt((difference**2).mean()) < 3e-6 and difference.max() < 2e-5


def compare(engine, path, theirs, n=40, exact=False, **options):
    """Logits read at once and token by token, which takes other ways through the engines, and 32 greedy tokens."""
    model = load(engine, path, **options)
    vocab_size = model.config.vocab_size
    ids = np.random.default_rng(1).integers(0, vocab_size, n).tolist()
    expected, caches = expected_logits(theirs, ids), [model.engine.new_cache(model.config) for _ in range(2)]
    at_once = qwen3.forward(model, ids, caches[0], all_logits=True)
    one_by_one = np.array([qwen3.forward(model, [i], caches[1]) for i in ids])
    for logits in (at_once, one_by_one):
        if exact:
            assert_close(logits, expected)
        assert np.abs(logits - expected).max() < 1e-4 * expected.std()
    assert list(qwen3.generate(model, ids[:9], 32, temperature=0, eos_token_ids=())) == greedy(theirs, ids[:9], 32)


# ---- Random models ---------------------------------------------------------------------------------------------------

@both_engines
@pytest.mark.parametrize("name", CASES)
def test_random_models(name, engine, tmp_path):
    config, dtype, shards = CASES[name]
    path = make_random_model(config, tmp_path, dtype, shards)
    compare(engine, path, reference(path), 150, exact=True)


@both_engines
@pytest.mark.parametrize("tied", [True, False, None])
def test_head_in_the_file_is_used_as_transformers_does(tied, engine, tmp_path):
    """A lm_head.weight that differs from the embedding counts, whatever the flag says, or if there is none."""
    path = make_random_model(CASES["group of 4, untied"][0], tmp_path)
    edit_json(path / "config.json", {"tie_word_embeddings": REMOVED if tied is None else tied})
    compare(engine, path, reference(path), exact=True)


CONFIGS = official_configs() or [pytest.param(None, marks=needs_official_files)]


@both_engines
@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: getattr(file, "stem", None))
def test_official_config(file, engine, tmp_path):
    """Every official shape in proportion. The fast engine computes with FP8 weights as if they were bfloat16."""
    raw = reduced(json.loads(file.read_text()))
    settings = raw.pop("quantization_config", None)
    path, plain = (make_random_model(raw, tmp_path / name, "float32") for name in ("model", "plain"))
    if settings:
        values = quantize_model(path, lambda w, settings: bytes_in_blocks(w, settings, 8, 8, "weight_scale_inv"),
                                settings | {"weight_block_size": [8, 8]})
        if engine == "qwen3_numba":
            values = {name: torch.tensor(value).bfloat16().float() if name.endswith("_proj.weight") else value
                      for name, value in values.items()}
        write_tensors(plain / "model.safetensors", {name: ("float32", value) for name, value in values.items()})
    compare(engine, path, reference(plain))


@both_engines
@pytest.mark.parametrize("changes", [
    {"decoder_sparse_step": 2}, {"mlp_only_layers": [1]}, {"norm_topk_prob": False}, {"num_experts_per_tok": 8},
    {"num_experts_per_tok": 1}, {"tie_word_embeddings": True}], ids=str)
def test_mixture_of_experts(changes, engine, tmp_path):
    path = make_random_model(MOE | changes, tmp_path, "float32")
    compare(engine, path, reference(path))


def test_fused_file_is_that_of_transformers(tmp_path):
    """What our test writes as fused is what transformers writes when told not to undo its layout."""
    path = make_random_model(MOE, tmp_path / "ours", "float32")
    theirs = reference(path)
    theirs.save_pretrained(tmp_path / "theirs", save_original_format=False)
    fuse(path)
    ours, saved = (map_safetensors(folder / "model.safetensors") for folder in (path, tmp_path / "theirs"))
    assert ours.keys() == saved.keys()
    assert all(np.array_equal(ours[name].data, saved[name].data) for name in ours)
    model, ids = qwen3.load_model(tmp_path / "theirs", tokenizer=False), [1, 2, 3]
    logits = logits_of(model, ids)
    assert_close(logits, expected_logits(theirs, ids))


# ---- Qwen3.5 ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids(name, tmp_path):
    path = make_random_model(HYBRIDS[name], tmp_path, "float32")
    compare("qwen3", path, reference(path), 150)


@pytest.mark.parametrize("n", [1, 63, 64, 65, 600])
def test_prompts_of_a_hybrid(n, tmp_path):
    """Lengths around a block of the delta rule, and more than a chunk."""
    path, ids = make_random_model(HYBRID, tmp_path, "float32"), random_ids(n)
    model, expected = load("qwen3", path), expected_logits(reference(path), ids)
    logits = logits_of(model, ids)
    assert np.abs(logits - expected).max() < 1e-4 * expected.std()


def test_the_inspect_page_of_a_hybrid(tmp_path):
    """Decay, beta and state of each head after each token, attention with its gates, lengths and probabilities."""
    config = HYBRID | {"linear_num_value_heads": 4, "linear_value_head_dim": 40, "num_hidden_layers": 8,
                       "vocab_size": VOCABULARY}
    path = make_random_model(config, tmp_path, "float32")
    found = contents(qwen3.load_model(path),
                     PageOptions("The capital of France is", answer=AnswerOptions(max_new_tokens=5, seed=0)))
    theirs, ids, outs = reference(path), torch.tensor([found["tokens"]["ids"]]), {}

    def close(shown, expected, rtol=1e-4):
        expected = np.stack(expected)
        assert shown["shape"] == list(expected.shape)
        np.testing.assert_allclose(unpacked(shown), expected, rtol, 1e-4 * expected.std())

    hooks = [part.register_forward_hook(lambda part, args, out: outs.update({part: out[0]}))
             for part in theirs.modules()]
    with torch.no_grad():
        whole = theirs(ids, output_attentions=True, output_hidden_states=True)
        for hook in hooks:
            hook.remove()
        nets = [layer.linear_attn for layer in theirs.model.layers if hasattr(layer, "linear_attn")]
        decays = [torch.exp(-net.A_log.exp() * torch.nn.functional.softplus(outs[net.in_proj_a] + net.dt_bias)).T
                  for net in nets]
        betas, states = [outs[net.in_proj_b].sigmoid().T for net in nets], []
        cache = transformers.DynamicCache(config=theirs.config)
        for i in ids[0]:  # one token at a time: torch_recurrent_gated_delta_rule
            theirs(i[None, None], past_key_values=cache)
            states.append(np.stack([cache.get_recurrent_state(net.layer_idx)[0].clone() for net in nets]))
        lengths = np.linalg.norm(np.array(states).astype(float), axis=(-1, -2)).transpose(1, 2, 0)
        close(found["delta"]["rates"], np.stack([decays, betas, lengths], axis=1))
        blocks = np.abs(states[-1]).reshape(len(nets), 4, 8, 2, 20, 2).max(axis=(3, 5))  # of 16 and 40 dimensions
        close(found["delta"]["states"], blocks, 1e-3)
        attending = [layer.self_attn for layer in theirs.model.layers if hasattr(layer, "self_attn")]
        both = [outs[part.q_proj].reshape(ids.shape[1], 4, 2, 32) for part in attending]  # of each head: query, gate
        close(found["attention"]["gates"], [each[:, :, 1].sigmoid().mean(dim=-1).T for each in both], 1e-3)
        rows, columns = np.tril_indices(ids.shape[1])
        close(found["attention"]["maps"],
              [each[0].numpy()[:, rows, columns] for each in whole.attentions if each is not None], 1e-3)
        streams = [each[0].norm(dim=-1) for each in whole.hidden_states[:-1]]  # the last one follows the last norm
        np.testing.assert_allclose(unpacked(found["way"]["streams"])[:-1], np.stack(streams), 1e-4)
        best = whole.logits[0].softmax(dim=-1).topk(5)
        np.testing.assert_allclose(unpacked(found["lens"]["probabilities"])[-1], best.values, 1e-4)
    assert (found["delta"]["layers"], found["attention"]["layers"]) == ([0, 1, 2, 4, 5, 6], [3, 7])


def hybrid_that_sees(base):
    """transformers' Qwen3.5 of this config, with a small vision tower."""
    kind = "Qwen3_5Moe" if "num_experts" in base else "Qwen3_5"
    text = {key: value for key, value in base.items() if key not in ("architectures", "model_type", "torch_dtype")}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 1, "out_hidden_size": 48}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(text_config=text, vision_config=vision,
                                                    tie_word_embeddings=base["tie_word_embeddings"])
    return getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()


@pytest.mark.parametrize("base", [HYBRID, HYBRID_MOE], ids=["dense", "mixture"])
def test_a_hybrid_as_transformers_saves_it(base, tmp_path):
    """With its vision tower, whose tensors are skipped, the text part nested, and fused experts."""
    theirs = hybrid_that_sees(base)
    with torch.no_grad():
        for name, tensor in theirs.named_parameters():  # some are created as zeros
            tensor.add_(torch.randn_like(tensor) / 10)
    theirs.save_pretrained(tmp_path)
    assert any("visual" in name for name in map_safetensors(tmp_path / "model.safetensors"))
    model, ids = qwen3.load_model(tmp_path, tokenizer=False), random_ids(80)
    logits = logits_of(model, ids)
    expected = expected_logits(theirs, ids)
    assert np.abs(logits - expected).max() < 1e-4 * expected.std()


# ---- RoPE ------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("theta", [1e4, 1e6, 5e6, 1e7])
def test_rope_frequencies(theta, head_dim, tmp_path):
    """Those of transformers to the last bit, in all pairs but one perhaps: torch's power isn't NumPy's."""
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"head_dim": head_dim, "rope_theta": theta}))
    ours, config = config_at(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
    rope = transformers.models.qwen3.modeling_qwen3.Qwen3RotaryEmbedding(config)
    for positions in (np.arange(3), np.array([6000, 32000])):
        theirs = rope(torch.zeros(1), torch.tensor(positions)[None])
        for table, expected in zip(qwen3.rope_tables(ours, positions), theirs):
            expected = expected[0, :, :head_dim // 2].numpy()
            assert table.dtype == np.float32 and np.count_nonzero((np.abs(table - expected) > 2e-7).any(axis=0)) <= 1


@both_engines
@pytest.mark.parametrize("theta, head_dim", [(1e4, 128), (1e6, 128), (5e6, 64), (1e7, 256)])
def test_distant_positions(theta, head_dim, engine, tmp_path, monkeypatch):
    """A text whose tokens stand at positions 0 to 39, around 6,000, and around 32,000.

    There an angle is 32,000 radians: a frequency that differs in its last bit turns it by 0.002.
    """
    positions = np.concatenate([start + np.arange(40) for start in (0, 5980, 31980)])
    config = BASE | {"rope_theta": theta, "head_dim": head_dim, "max_position_embeddings": 40960}
    path = make_random_model(config, tmp_path, "float32")
    ids = np.random.default_rng(2).integers(0, 320, len(positions))
    expected = expected_logits(reference(path), ids, position_ids=torch.tensor(positions)[None],
                               attention_mask=torch.ones(1, len(ids)))
    tables, model = qwen3.rope_tables, load(engine, path)
    monkeypatch.setattr(importlib.import_module(engine), "rope_tables",
                        lambda config, places: tables(config, positions[places]))
    assert_close(logits_of(model, ids), expected)


@pytest.mark.parametrize("factor, original, context", [(4.0, 48, 48), (2.0, 48, 200), (1.5, 40, 48)])
def test_yarn(factor, original, context, tmp_path):
    """By --rope-factor and by config.json, also where the stretch is below max_position_embeddings."""
    path = make_random_model(BASE | {"max_position_embeddings": context, "head_dim": 32}, tmp_path, "float32")
    plain = qwen3.load_model(path)
    yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    change_config(path, rope_scaling=yarn)
    model = qwen3.load_model(path)
    assert model.config == with_scaled_rope(plain.config, yarn, path)
    assert model.config.context_length == max(context, int(factor * original))
    if original == context:
        assert model.config == stretched(plain.config, factor)
    ids = np.random.default_rng(1).integers(0, 320, model.config.context_length).tolist()
    logits = logits_of(model, ids)
    expected = expected_logits(reference(path), ids)
    assert np.abs(logits - expected).max() < 1e-4 * expected.std()


# ---- Real models -----------------------------------------------------------------------------------------------------

def test_bundled_template_is_read_alike():
    theirs, ours = transformers.AutoTokenizer.from_pretrained(ROOT / "demo"), load_tokenizer(ROOT / "demo")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"},
                {"role": "assistant", "content": "<think>\neasy\n</think>\n\n2"}, {"role": "user", "content": "法国?"}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(messages) == text
    assert ours.encode(text) == theirs(text)["input_ids"]


@pytest.fixture(scope="module")
def newer():
    """(transformers' tokenizer, ours) of Qwen3.5. AutoTokenizer takes that class, too, beside a config.json."""
    path = QWEN3_5 / "tokenizer"
    from transformers.models.qwen3_5.tokenization_qwen3_5 import Qwen3_5Tokenizer
    return Qwen3_5Tokenizer.from_pretrained(path), load_tokenizer(path)


@needs_official_files
def test_template_of_qwen3_5(newer):
    """Text and ids of random conversations; where transformers fails, so do we."""
    theirs, ours = newer
    refused, n = 0, 2000 * int(os.environ.get("FUZZ", 1))
    for seed in range(n):
        rng = random.Random(seed)
        messages, tools = any_conversation(rng)
        think, add = rng.choice([None, True, False]), rng.random() < 0.7
        given = {} if think is None else {"enable_thinking": think}
        try:
            expected = theirs.apply_chat_template(messages, tools, tokenize=False, add_generation_prompt=add, **given)
        except (jinja2.TemplateError, TypeError):
            refused += 1
            message_of(ours.apply_chat_template, messages, tools, add, think)
            continue
        assert ours.apply_chat_template(messages, tools, add, think) == expected, seed
        if seed % 10 == 0:
            assert ours.encode(expected) == theirs(expected)["input_ids"], seed
    assert 0.05 * n < refused < 0.5 * n


@needs_official_files
def test_tokenizer_of_qwen3_5(newer):
    """Any text: ids, and the text that they give, whole and as a stream."""
    theirs, ours = newer
    assert ours.backend.get_vocab_size() == len(theirs) and ours.special_tokens["<|im_end|>"] == theirs.eos_token_id
    for seed in range(3000 * int(os.environ.get("FUZZ", 1))):
        rng = random.Random(seed)
        text = "".join(chr(rng.choice([rng.randrange(32, 127), rng.randrange(0x300, 0x1200), rng.randrange(0xD800),
                                       rng.randrange(0x10000, 0x20000)])) for _ in range(rng.randint(0, 30)))
        text += rng.choice(["", "<|im_end|>", "<think>", "</tool_call>", "<|image_pad|>"])
        ids, decoder = ours.encode(text), StreamDecoder(ours)
        assert ids == theirs(text)["input_ids"], text
        assert ours.decode(ids) == theirs.decode(ids) == "".join(map(decoder.push, ids)) + decoder.flush()


@pytest.mark.skipif("QWEN3_TEST_MODEL" not in os.environ,
                    reason="QWEN3_TEST_MODEL names no folder with a real checkpoint")
def test_real_checkpoint():
    path = Path(os.environ["QWEN3_TEST_MODEL"])
    model, theirs = qwen3.load_model(path), reference(path)
    ids = model.tokenizer.encode("The capital of France is")
    expected = expected_logits(theirs, ids)
    logits = logits_of(model, ids)
    assert np.abs(logits - expected).max() < 1e-4 * expected.std()
    assert list(qwen3.generate(model, ids, 20, temperature=0, eos_token_ids=())) == greedy(theirs, ids, 20)
