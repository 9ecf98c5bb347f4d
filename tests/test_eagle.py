"""EAGLE-3 heads, held against a forward pass of their own in torch, with transformers' hidden states of the model."""
import json

import numpy as np
import pytest
import safetensors.numpy

import qwen3
from configs import BASE, CLI_CONFIG
from helpers import edit_json, message_of, random_ids, run_main
from make_random_model import make_random_model
from qwen3 import Folder
from qwen3_lib.answers.completion import Completion
from qwen3_lib.answers.eagle import is_head, load_head
from qwen3_lib.answers.guesses import Eagle
from qwen3_lib.batch.batch import Batch

CONFIG = BASE | {"num_hidden_layers": 7, "max_position_embeddings": 1000}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12,
         "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "vocab_size": 320, "hidden_act": "silu",
         "model_type": "llama", "attention_bias": False, "rope_scaling": None, "max_position_embeddings": 64}
KNOWN = 200  # tokens of the head's vocabulary


def make_head(out, kind="midlayer", seed=5, sizes=SIZES, changes={}, n=KNOWN):
    """A random head as SafeAILab ("midlayer") or RedHatAI ("layers.0") publish it; `changes` of its tensors."""
    rng, d, inner, vocab = np.random.default_rng(seed), sizes["hidden_size"], sizes["intermediate_size"], sizes["vocab_size"]
    q, kv = (sizes[key] * sizes["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"fc": (d, 3 * d), f"{kind}.self_attn.q_proj": (q, 2 * d), f"{kind}.self_attn.k_proj": (kv, 2 * d),
              f"{kind}.self_attn.v_proj": (kv, 2 * d), f"{kind}.self_attn.o_proj": (d, q), f"{kind}.mlp.gate_proj": (inner, d),
              f"{kind}.mlp.up_proj": (inner, d), f"{kind}.mlp.down_proj": (d, inner), "norm": (d,), "lm_head": (n, d)}
    shapes |= {f"{kind}.{name}": (d,) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
    shapes |= {"embed_tokens": (vocab, d)} if kind == "layers.0" else {}
    tensors = {f"{name}.weight": (rng.standard_normal(shape) / (shape[1]**0.5 if len(shape) > 1 else 3)
                                  + (len(shape) == 1)).astype(np.float32) for name, shape in shapes.items()}
    known = np.sort(rng.permutation(vocab)[:n])
    tensors |= {"d2t": known - np.arange(n), "t2d": np.isin(np.arange(vocab), known)} | changes
    out.mkdir(exist_ok=True)
    safetensors.numpy.save_file({name: tensor for name, tensor in tensors.items() if tensor is not None},
                                out / "model.safetensors")
    config = sizes | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": n}
    if kind == "layers.0":
        config = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": n,
                  "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": None, "transformer_layer_config": sizes}
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that often repeats a token: what its layers add is small."""
    return make_random_model(CONFIG, tmp_path_factory.mktemp("eagle"), "float32", scales={"o_proj": 0.2, "down_proj": 0.2})


@pytest.fixture(scope="module", params=["numpy", "numba"])
def model(request, folder):
    if request.param == "numpy":
        return qwen3.load_model(folder)
    pytest.importorskip("numba")
    import qwen3_numba
    return qwen3_numba.load_model(folder, threads=1, kv_dtype="f32")


@pytest.fixture
def repeating(folder):
    """Tensors of a head that often guesses that the last token comes again, for the tokens that it knows."""
    return {"fc.weight": np.eye(32, 96, 64, dtype=np.float32), "d2t": np.zeros(KNOWN, np.int64),
            "lm_head.weight": qwen3.load_model(folder).weights["embed_tokens"][:KNOWN], "norm.weight": np.ones(32, np.float32),
            "midlayer.mlp.down_proj.weight": np.zeros((32, 48), np.float32)}


@pytest.fixture
def head(model, repeating, tmp_path):
    return load_head(Folder(make_head(tmp_path / "head", changes=repeating)), model)


def always(draft, n=3):
    """The draft, which makes n guesses whether they pay or not."""
    draft.length = lambda _: n
    return draft


# ----------------------------------------------------------------------------------------------------------------------
# What a head computes
# ----------------------------------------------------------------------------------------------------------------------

def published(folder, head_folder, text, n):
    """n greedy guesses after a text, by the formulas of EAGLE's cnets.py, without a cache: (ids, logits of each)."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = json.loads((head_folder / "config.json").read_text())
    sizes = config.get("transformer_layer_config", config)
    w = {name.replace("layers.0.", "midlayer."): torch.from_numpy(tensor)
         for name, tensor in safetensors.numpy.load_file(head_folder / "model.safetensors").items()}
    heads, dim = sizes["num_attention_heads"], sizes["head_dim"]

    def norm(x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + sizes["rms_norm_eps"]) * w[f"{name}.weight"]

    def turned(x):  # [heads, n, dim], pairs as complex numbers
        angles = torch.outer(torch.arange(x.shape[1]).double(), sizes["rope_theta"] ** (-torch.arange(0, dim, 2).double() / dim))
        pairs = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([pairs.real, pairs.imag], -1).float()

    def midlayer(embedded, hidden):
        normed = norm(hidden, "midlayer.hidden_norm")
        residual = normed if config.get("norm_before_residual") else hidden
        both = torch.cat([norm(embedded, "midlayer.input_layernorm"), normed], -1)
        q, k, v = (torch.einsum("ni,oi->no", both, w[f"midlayer.self_attn.{x}_proj.weight"]).unflatten(1, (-1, dim)).transpose(0, 1)
                   for x in "qkv")
        k, v = (x.repeat_interleave(heads // sizes["num_key_value_heads"], 0) for x in (k, v))
        out = torch.nn.functional.scaled_dot_product_attention(turned(q)[None], turned(k)[None], v[None], is_causal=True)
        residual = residual + out[0].transpose(0, 1).flatten(1) @ w["midlayer.self_attn.o_proj.weight"].T
        x = norm(residual, "midlayer.post_attention_layernorm")
        gate, up = (x @ w[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return residual + torch.nn.functional.silu(gate) * up @ w["midlayer.mlp.down_proj.weight"].T

    with torch.no_grad():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        states = theirs(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states  # before layer 0, 1, ...
        embedding = w.get("embed_tokens.weight", theirs.model.embed_tokens.weight)
        layers = len(theirs.model.layers)
        hidden = torch.cat([states[i][0] for i in (2, layers // 2, layers - 3)], -1) @ w["fc.weight"].T
        ids, logits = list(text[1:]), []
        for _ in range(n):
            out = midlayer(embedding[torch.tensor(ids)], hidden)
            logits.append((norm(out[-1], "norm") @ w["lm_head.weight"].T).numpy())
            best = int(logits[-1].argmax())
            ids.append(best + int(w["d2t"][best]))
            hidden = torch.cat([hidden, out[-1:]])
    return ids[-n:], logits


@pytest.mark.parametrize("kind, prompt", [("midlayer", 3), ("midlayer", 600), ("layers.0", 20), ("repeating", 10)])
def test_guesses_are_those_of_the_published_forward_pass(model, folder, repeating, tmp_path, kind, prompt):
    changes = repeating if kind == "repeating" else {}
    head_folder = make_head(tmp_path / "head", kind.replace("repeating", "midlayer"), changes=changes)
    head = load_head(Folder(head_folder), model)
    draft, logits, guesses = always(Eagle(head, model)), [], []
    compute, guess = draft.logits_of, draft.guess
    draft.logits_of = lambda new: logits.append(compute(new)) or logits[-1]
    draft.guess = lambda sequence, n: guesses.append((len(sequence.token_ids), guess(sequence, n))) or guesses[-1][1]
    ids = [i % KNOWN for i in random_ids(prompt)]
    answer = Completion(model, ids, draft=draft, max_new_tokens=14, temperature=0, eos_token_ids=()).finish()
    assert is_head(Folder(head_folder)) and not is_head(Folder(folder)) and len(guesses) >= 2
    assert (answer.driver.accepted > 0) == (kind == "repeating")
    for n, guessed in guesses:
        expected, theirs = published(folder, head_folder, [*ids, *answer.token_ids[:n]], len(guessed))
        assert guessed == expected
        for row, other in zip(logits, theirs):
            assert np.abs(row[head.token_ids] - other).max() < 1e-4 and np.isinf(row).sum() == 320 - KNOWN
        del logits[:len(guessed)]


# ----------------------------------------------------------------------------------------------------------------------
# What an answer is
# ----------------------------------------------------------------------------------------------------------------------

def result(answer):
    exact = type(answer.model.weights) is not dict  # with NumPy, a sum depends on what is computed beside it
    return answer.token_ids, answer.finish_reason, [entry if exact else entry.token_id for entry in answer.logprobs]


def options_of(i):
    return {"seed": i, "temperature": [0, 0.5, 0.8][i % 3], "top_p": [1, 0.9][i % 2], "repetition_penalty": [1, 1.1][i // 2 % 2],
            "max_new_tokens": 24, "logprobs": 1, "eos_token_ids": [7]}


def test_a_head_never_changes_an_answer(model, head):
    """Alone, and as turns of a conversation with one cache, whose texts go on or are cut back."""
    accepted = guessed = 0
    draft, cache, text = always(Eagle(head, model)), model.engine.new_cache(model.config), random_ids(5)
    for i in range(9):
        prompt = random_ids(1 + 3 * i, i)
        text = text[:[len(text), len(text) - 4, 9][i % 3]] + random_ids(3, i)
        for ids, options in ((prompt, {"draft": head}), (text, {"draft": draft, "cache": cache, "lookup": [None, 2][i % 2]})):
            plain = Completion(model, ids, **options_of(i)).finish()
            answer = Completion(model, ids, **options_of(i), **options)
            for source in answer.driver.sources:
                always(source)
            assert result(answer.finish()) == result(plain)
            accepted, guessed = accepted + answer.driver.accepted, guessed + answer.driver.guessed
        text += answer.token_ids
        if i % 5 == 0:  # an answer without the head takes the cache, and the head reads nothing of it
            seen = list(draft.seen)
            Completion(model, text[:8] + [1, 2], cache, max_new_tokens=3).finish()
            assert draft.seen == seen
    assert accepted > 30 and guessed - accepted > 30


def test_a_conversation_goes_on_where_the_head_has_read(model, head):
    """In the second answer it reads the new tokens only, and guesses as a head that has read all."""
    draft, cache, prompt, guesses = always(Eagle(head, model)), model.engine.new_cache(model.config), random_ids(30), []
    options = {"max_new_tokens": 12, "temperature": 0, "eos_token_ids": ()}
    first = Completion(model, prompt, cache, draft=draft, **options).finish()
    text = [*prompt, *first.token_ids, *random_ids(5, 1)]
    for other in (draft, always(Eagle(head, model))):
        guess = other.guess
        other.guess = lambda sequence, n, guess=guess: guesses.append(guess(sequence, n)) or guesses[-1]
        Completion(model, text, cache if other is draft else None, draft=other, **options).finish()
        guesses.append(None)
    half = len(guesses) // 2
    assert guesses[:half] == guesses[half:] and half > 2 and draft.start == 0


def test_requests_of_a_batch_have_a_head_each(model, head):
    batch, answers = Batch(model, 3, 200), {}
    for i in range(8):
        ids = random_ids(20) + random_ids(1 + 2 * i, i)
        answers[i] = ids, batch.add(i, ids, **options_of(i), **({"draft": head} if i % 4 else {}))
        if i % 4:
            always(answers[i][1].driver.sources[0])
    while not batch.idle:
        batch.step()
    assert sum(answer.driver.accepted for i, (_, answer) in answers.items() if i % 4) > 3
    for i, (ids, answer) in answers.items():
        assert result(answer) == result(Completion(model, ids, **options_of(i)).finish())


# ----------------------------------------------------------------------------------------------------------------------
# Loading
# ----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("sizes, tensors, changes, words", [
    ({"hidden_size": 64}, {}, {}, ["another model", "hidden_size 64", "32"]),
    ({"vocab_size": 400}, {}, {}, ["another model", "vocab_size 400"]),
    ({}, {"midlayer.self_attn.q_norm.weight": np.ones(12, np.float32)}, {}, ["q_norm"]),
    ({}, {"norm.weight": None}, {}, ["norm", "missing"]),
    ({}, {"fc.weight": np.zeros((32, 64), np.float32)}, {}, ["fc", "(32, 96)", "(32, 64)"]),
    ({}, {"d2t": np.full(KNOWN, 300)}, {}, ["d2t"]),
    ({}, {}, {"num_hidden_layers": 2}, ["one layer"]),
    ({}, {}, {"norm_output": True}, ["norm_output"]),
    ({}, {}, {"rope_scaling": {"rope_type": "llama3"}}, ["llama3"]),
    ({}, {}, {"eagle_aux_hidden_state_layer_ids": [1, 2, 90]}, ["three layers", "90"]),
])
def test_what_is_no_head_of_this_model_is_refused(folder, tmp_path, sizes, tensors, changes, words):
    path = make_head(tmp_path / "head", sizes=SIZES | sizes, changes=tensors)
    edit_json(path / "config.json", changes)
    message = message_of(load_head, Folder(path), qwen3.load_model(folder, tokenizer=False))
    assert all(word in message for word in words), message


def test_the_command_line_takes_a_head(capfd, tmp_path):
    model = make_random_model(CLI_CONFIG | {"num_hidden_layers": 6}, tmp_path / "model", "float32")
    head = make_head(tmp_path / "head", "layers.0", sizes=SIZES | {"vocab_size": CLI_CONFIG["vocab_size"]})
    asked = ("--model", model, "--raw", "--seed", 3, "--temperature", 0.9, "-n", 20, "Hello")
    plain = run_main(capfd, *asked)
    assert plain[0] == 0 and run_main(capfd, *asked, "--draft", head)[:2] == plain[:2]
