"""What the page shows, computed with the functions of qwen3.py: one function a panel, each gives plain JSON."""
from __future__ import annotations

import copy
import time
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import qwen3
from qwen3 import Config, InputError, Model, Sampling
from qwen3_io.arguments import checked_prompt, checked_whole
from qwen3_io.checkpoint import quantized_file
from qwen3_io.errors import brief
from qwen3_page.page import lines_of_functions, pack
from qwen3_page.recorder import Pass, Recorder, Step, copied, source
from tokenizer_utils import inside_thought, parse_answer

TOP = 5  # tokens that the logit lens shows
TOGETHER = 32  # positions whose logits are in memory together: 20 MB with a vocabulary of 151,936
CANDIDATES = 512  # tokens of each step that the page knows one by one; of the others, a histogram
BIN = 0.25  # its step
PAIRS = 8  # pairs of dimensions whose hands are in the page at least; all head_dim / 2, if there is room
REPEATED = 24  # random tokens that are shown to the model twice, to find the heads that copy
THOUGHT = 256  # tokens of an answer with thinking, and without
ROOM = 12_000_000  # characters of base64 in a page
FORMULAS = {
    "rope_tables": "cos(position · frequency), sin(position · frequency)",
    "embedding": "x = embed_tokens[id]",
    "rms_norm": "x / √(mean(x²) + eps) · weight",
    "linear": "x Wᵀ",
    "apply_rope": "(a cos − b sin, b cos + a sin)",
    "append": "keys[layer, position] = k, values[layer, position] = v",
    "attention_in_blocks": "softmax(q kᵀ / √head_dim) v",
    "swiglu": "down(silu(gate(x)) · up(x))",
    "moe": "the sum of the chosen experts' swiglu(x), each times its weight",
}
WORDS = {  # what a step is for, by its weight or its function
    "rope_tables": "the angles by which RoPE turns at each position",
    "embed_tokens": "each token's learned vector: the residual stream begins",
    "input_layernorm": "brings the vector to one size before attention",
    "q_proj": "queries: what each token looks for",
    "k_proj": "keys: by what each token can be found",
    "v_proj": "values: what each token gives to those that look at it",
    "q_norm": "brings each head's query to one size",
    "k_norm": "brings each head's key to one size",
    "apply_rope": "turns each pair of dimensions by the token's position",
    "append": "keeps keys and values for all later tokens",
    "attention_in_blocks": "each head adds up the values of the tokens it looks at",
    "o_proj": "joins the results of the heads; added to the residual stream",
    "post_attention_layernorm": "brings the vector to one size again",
    "swiglu": "works on each token by itself; added to the residual stream",
    "moe": "works on each token by itself, with the experts chosen for it; added to the residual stream",
    "norm": "brings the vector to one size before the head",
    "lm_head": "a logit for each token of the vocabulary: how well it fits next",
}


@dataclass(frozen=True)
class Wish:
    """What the user asks for."""
    prompt: str
    raw: bool = False  # no chat template
    enable_thinking: bool | None = None
    max_new_tokens: int = 32
    sampling: dict[str, float | None] | None = None  # changes to the model's defaults
    seed: int | None = None
    quantized: bool = True  # compare with int8 and int4
    compare: str | None = None  # a question to answer with thinking and without


def contents(model: Model, wish: Wish) -> dict[str, Any]:
    """All that the page shows. Raises InputError for a prompt that is too long or can't be rendered."""
    text = wish.prompt if wish.raw else model.tokenizer.apply_chat_template(
        [{"role": "user", "content": wish.prompt}], enable_thinking=wish.enable_thinking)
    prompt = checked_prompt(model.tokenizer.encode(text), model.config.vocab_size)
    check_room(model, len(prompt), wish.max_new_tokens)
    thinking = None if wish.raw else wish.enable_thinking
    settings = qwen3.default_sampling(model, thinking).updated(**(wish.sampling or {}))
    seed = checked_whole("seed", wish.seed, 0)

    recorder = Recorder(model)
    recorder.forward(model, prompt, recorder.new_cache(model.config))  # warms up: the first pass waits for the disk
    recorder.passes.clear()
    drawn, passes = answered(recorder, prompt, wish.max_new_tokens, settings, seed)
    ended = drawn[-1].token in model.eos_token_ids
    answer = [each.token for each in drawn[:-1 if ended else None]]
    said = parse_answer(model.tokenizer.decode(answer), inside_thought(model.tokenizer, prompt))
    ids = np.array([*prompt, *answer])
    recorder.keep_arrays = True
    logits = recorder.forward(model, ids, recorder.new_cache(model.config), all_logits=True)
    whole = recorder.passes[-1]

    panels = {
        "tokens": tokens_panel(model, text, wish.prompt, ids, len(prompt)),
        "way": way_panel(model, whole, passes),
        "attention": attention_panel(model, recorder, whole),
        "lens": lens_panel(model, whole),
        "choosing": choosing_panel(drawn, settings, ids),
        "cache": cache_panel(model, passes),
        "quantized": quantized_panel(model, prompt, ids, logits, wish.max_new_tokens, settings, seed)
        if wish.quantized else "--no-quantized was given",
        "thinking": thinking_panel(model, wish.compare, seed) if wish.compare is not None else
        "--compare QUESTION asks for it",
    }
    return panels | {
        "about": {"model": brief(model.path.name), "prompt": wish.prompt, "n_prompt": len(prompt), "ended": ended,
                  "answer": said.content.strip() or said.reasoning or "",
                  "version": qwen3.__version__, "raw": wish.raw, "date": time.strftime("%Y-%m-%d"),
                  **asdict(model.config), "eos_token_ids": list(model.eos_token_ids)},
        "labels": {str(i): label(model.tokenizer.token_bytes(i)) for i in ids_within(panels)},
        "source": source(), "lines": lines_of_functions(source()), "formulas": FORMULAS, "words": WORDS,
    }


def check_room(model: Model, n_prompt: int, n_answer: int) -> None:
    """Raises InputError if prompt and answer together are too long for a page, or for the model."""
    most = min(qwen3.CHUNK, model.config.context_length)
    while most > 1 and characters(model.config, most, PAIRS) > ROOM:
        most -= 1
    if n_prompt + n_answer > most:
        raise InputError(f"the prompt has {n_prompt} tokens, the answer up to {n_answer}: together more than the "
                         f"{most} positions that a page of this model shows; shorten the prompt or lower --max-tokens")


def characters(config: Config, n: int, pairs: int) -> float:
    """The size in the page of the attention maps of n positions, and of so many pairs of dimensions of q and k."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    maps, hands = heads * n * (n + 1) / 2, (heads + kv_heads) * n * 2 * pairs
    return config.num_hidden_layers * (maps + hands) * 2 * 4 / 3


def ids_within(panels: dict[str, Any]) -> list[int]:
    """All token ids that panels show."""
    found = [panels["tokens"]["ids"], panels["lens"]["ids"]["values"], *panels["choosing"]["ids"],
             [step["token"] for step in panels["choosing"]["steps"]]]
    return sorted({int(i) for ids in found for i in ids})


def label(data: bytes) -> str:
    """A token's bytes as text to look at: signs for invisible characters, spaces that stand alone, half characters."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(chr(byte) if 0x20 < byte < 0x7F else f"\\x{byte:02x}" for byte in data)
    if not text.strip(" "):
        return "␣" * len(text)
    return "".join(c if c.isprintable() else {"\n": "⏎", "\t": "⇥"}.get(c, repr(c)[1:-1]) for c in text)


# ----------------------------------------------------------------------------------------------------------------------
# 1: tokens
# ----------------------------------------------------------------------------------------------------------------------

def tokens_panel(model: Model, text: str, wanted: str, ids: np.ndarray, n_prompt: int) -> dict[str, Any]:
    """The pieces with their bytes, and who wrote them: the template, the user or the model."""
    pieces = [model.tokenizer.token_bytes(int(i)) for i in ids]
    written = b"".join(pieces[:n_prompt])  # may differ from `text`: tokenizers normalize Unicode
    asked = unicodedata.normalize("NFC", wanted).strip().encode()
    start = written.rfind(asked)
    end, at, parts = start + len(asked), 0, []
    for i, piece in enumerate(pieces):
        yours = start >= 0 and at < end and start < at + len(piece)
        parts.append("answer" if i >= n_prompt else "prompt" if yours else "template")
        at += len(piece)
    return {"ids": ids.tolist(), "bytes": [piece.hex(" ") for piece in pieces], "parts": parts, "text": text}


# ----------------------------------------------------------------------------------------------------------------------
# 2: the way
# ----------------------------------------------------------------------------------------------------------------------

def way_panel(model: Model, whole: Pass, passes: list[Pass]) -> dict[str, Any]:
    """The steps of the recorded pass with their norms; their costs at prefill and, as medians, at decode."""
    prefill, decode = passes[0], passes[1:]
    steps = []
    for i, step in enumerate(whole.steps):
        later = [each.steps[i] for each in decode]
        steps.append({
            "function": step.function, "weight": step.weight, "layer": step.layer, "line": step.line,
            "prefill": costs([prefill.steps[i]]), "decode": costs(later) if later else None})
    streams = np.stack([np.linalg.norm(stream.astype(np.float64), axis=-1) for stream in whole.streams])
    silent = np.full(whole.n, np.nan)
    norms = np.stack([silent if step.norms is None else step.norms for step in whole.steps])
    return {"steps": steps, "norms": pack(norms, "f4"), "streams": pack(streams, "f4"), "bandwidth": bandwidth()}


def costs(steps: Sequence[Step]) -> dict[str, Any]:
    """Shape, bytes, operations and the median of the times of calls that do the same; bytes grow with the cache."""
    middle = steps[len(steps) // 2]
    return {"shape": list(middle.shape), "read": middle.read, "operations": middle.operations,
            "seconds": float(np.median([step.seconds for step in steps]))}


def bandwidth() -> float:
    """Bytes per second with which NumPy reads 256 MB of memory: the best of five."""
    numbers, best = np.ones(2**26, np.float32), 0.0
    for _ in range(5):
        start = time.perf_counter()
        np.dot(numbers, numbers)
        best = max(best, numbers.nbytes / (time.perf_counter() - start))
    return best


# ----------------------------------------------------------------------------------------------------------------------
# 3: attention
# ----------------------------------------------------------------------------------------------------------------------

def attention_panel(model: Model, recorder: Recorder, whole: Pass) -> dict[str, Any]:
    """Attention weights (lower triangles, row by row), scores of copying, and pairs of q and k before RoPE."""
    rows, columns = np.tril_indices(whole.n)
    maps = np.stack(whole.attention)  # [n_layers, n_heads, n, n]
    frequencies, factor = qwen3.rope_frequencies(model.config)
    half = model.config.head_dim // 2
    pairs = pairs_with_room(model.config, whole.n)
    chosen = np.concatenate([pairs, pairs + half])
    return {"maps": pack(maps[:, :, rows, columns], "f2"), "previous": pack(diagonal(maps, -1), "f4"),
            "induction": pack(induction(model, recorder), "f4"), "repeated": REPEATED, "pairs": pairs.tolist(),
            "frequencies": frequencies[pairs].tolist(), "factor": factor,
            "q": pack(np.stack(whole.q)[..., chosen], "f2"), "k": pack(np.stack(whole.k)[..., chosen], "f2")}


def pairs_with_room(config: Config, n: int) -> np.ndarray:
    """The pairs of dimensions in a page of n positions: all, or as many as there is room for, evenly spread."""
    count = half = config.head_dim // 2
    while count > PAIRS and characters(config, n, count) > ROOM:
        count -= 1
    return np.linspace(0, half - 1, count).round().astype(int)


def diagonal(maps: np.ndarray, offset: int, first: int = 0) -> np.ndarray:
    """The mean of a diagonal of maps [..., n, n], from row `first` on -> [...]; 0 if it is empty."""
    values = np.diagonal(maps[..., first:, :], offset + first, axis1=-2, axis2=-1)
    return values.mean(axis=-1) if values.shape[-1] else np.zeros(values.shape[:-1])


def induction(model: Model, recorder: Recorder) -> np.ndarray:
    """How much each head looks, from a token that was there before, to the token after it, [n_layers, n_heads].

    Measured on random tokens, twice in a row, so that nothing but the repetition can tell what follows.
    Source: Olsson et al. 2022 (induction heads).
    """
    n = min(REPEATED, model.config.context_length // 2)
    ids = np.tile(np.random.default_rng(0).integers(0, model.config.vocab_size, n), 2)
    recorder.forward(model, ids, recorder.new_cache(model.config))
    return diagonal(np.stack(recorder.passes[-1].attention), 1 - n, n)


# ----------------------------------------------------------------------------------------------------------------------
# 4: logit lens
# ----------------------------------------------------------------------------------------------------------------------

def lens_panel(model: Model, whole: Pass) -> dict[str, Any]:
    """What the head says of the residual stream after each layer: the top tokens, [n_layers + 1, n, TOP].

    Source: nostalgebraist 2020 (logit lens).
    """
    ids = np.empty((len(whole.streams), whole.n, min(TOP, model.config.vocab_size)), np.int64)
    probabilities = np.empty(ids.shape)
    for layer, stream in enumerate(whole.streams):
        for start in range(0, whole.n, TOGETHER):
            x = qwen3.rms_norm(stream[start:start + TOGETHER], model.weights["norm"], model.config.rms_norm_eps)
            logits = qwen3.linear(x, model.weights["lm_head"])
            for i, logprobs in enumerate(qwen3.log_softmax(logits), start):
                top = qwen3.top_k_indices(logprobs, ids.shape[-1])
                top = top[np.argsort(-logprobs[top], kind="stable")][:ids.shape[-1]]
                ids[layer, i], probabilities[layer, i] = top, np.exp(logprobs[top])
    leads = (ids[..., 0] == ids[-1:, :, 0]).argmax(axis=0)  # the first layer with the final answer
    return {"ids": {"shape": list(ids.shape), "values": ids.reshape(-1).tolist()},
            "probabilities": pack(probabilities, "f4"), "leads": leads.tolist()}


# ----------------------------------------------------------------------------------------------------------------------
# 5: choosing, and 6: the KV cache
# ----------------------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Drawn:
    """A token, the logits [vocab_size] it was drawn from, and each token's luck [vocab_size]: see sample()."""
    token: int
    logits: np.ndarray
    luck: np.ndarray


def answered(recorder: Recorder, prompt: np.ndarray, limit: int, settings: Sampling,
             seed: int | None) -> tuple[list[Drawn], list[Pass]]:
    """(each token drawn, the passes); the last token may be an end of text.

    The luck of a candidate is the exponential that sample() draws for it. For a token that was cut, sample() draws
    none, so it gets one here: other settings may let it in.
    """
    drawn: list[Drawn] = []
    others, luck = np.random.default_rng(0), np.empty(0)

    def sample(logits: np.ndarray, sampling: Sampling, rng: np.random.Generator) -> int:
        nonlocal luck
        luck, same = others.standard_exponential(len(logits)), copy.deepcopy(rng)
        if sampling.temperature > 0:
            candidates, _ = qwen3.candidates(logits, sampling)
            luck[candidates] = same.standard_exponential(len(candidates))
        return qwen3.sample(logits, sampling, rng)

    draw = copied(qwen3.sampler, vars(qwen3) | {"sample": sample})(recorder.model, prompt, settings, seed)

    def noted(logits: np.ndarray) -> int:
        drawn.append(Drawn(draw(logits), logits, luck))
        return drawn[-1].token

    for _ in qwen3.generate(recorder.model, prompt, limit, draw=noted):
        pass
    return drawn, recorder.passes[:]


def choosing_panel(drawn: list[Drawn], settings: Sampling, ids: np.ndarray) -> dict[str, Any]:
    """The logits, below the largest, and the luck of the likely candidates and of all tokens seen; of the others, a
    histogram, with the luck of each bar's first token to arrive."""
    shown, logits_shown, lucks, steps = [], [], [], []
    temperature = max(settings.temperature, 0.01)
    for each in drawn:
        below = each.logits - each.logits.max()
        kept = np.zeros(len(below), bool)
        kept[qwen3.top_k_indices(below, min(CANDIDATES, len(below)))[:CANDIDATES]] = True
        kept[ids] = kept[each.token] = True  # penalties change the logits of these
        known, others = np.flatnonzero(kept), np.flatnonzero(~kept)
        known = known[np.argsort(-below[known], kind="stable")]
        bins, which, counts = np.unique(np.floor(below[others] / BIN), return_inverse=True, return_counts=True)
        middle = (bins + 0.5) * BIN
        first = np.full(len(bins), np.inf)  # the luck that, in the middle of the bar, arrives at the same time
        np.minimum.at(first, which, each.luck[others] * np.exp((middle[which] - below[others]) / temperature))
        shown.append(known.tolist())
        logits_shown.append(pack(below[known], "f4"))
        lucks.append(pack(np.concatenate([each.luck[known], first]), "f4"))
        steps.append({"token": each.token, "largest": float(each.logits.max()), "below": middle.tolist(),
                      "counts": counts.tolist()})
    return {"steps": steps, "ids": shown, "logits": logits_shown, "luck": lucks, "settings": asdict(settings)}


def cache_panel(model: Model, passes: list[Pass]) -> dict[str, Any]:
    """When each pass began and what it took; positions in the cache, and for which it has room."""
    config, began = model.config, passes[0].start
    per_position = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    return {"per_position": per_position, "passes": [
        {"n": each.n, "start": each.start - began, "seconds": each.seconds, "length": each.length,
         "capacity": each.capacity} for each in passes]}


# ----------------------------------------------------------------------------------------------------------------------
# 7: quantization, and 8: thinking
# ----------------------------------------------------------------------------------------------------------------------

def quantized_panel(model: Model, prompt: np.ndarray, ids: np.ndarray, logits: np.ndarray, limit: int,
                    settings: Sampling, seed: int | None) -> dict[str, Any] | str:
    """KL of int8 and int4 from float32 after each token, in nats, and the answers; or why there are none."""
    try:
        import qwen3_numba
    except ImportError as error:
        return brief(error)
    if quantized_file(model.path) is not None:
        return "the weights of this folder are quantized already"
    plain = qwen3.log_softmax(logits.astype(np.float64))
    answers = {"float32": list(qwen3.generate(model, prompt, limit, seed, **asdict(settings)))}
    kl = {}
    for form in ("int8", "int4"):
        try:
            fast = qwen3_numba.load_model(model.path, form, tokenizer=False)
            answers[form] = list(qwen3.generate(fast, prompt, limit, seed, **asdict(settings)))
        except InputError as error:  # numbers beyond the format's range
            return str(error)
        other = qwen3_numba.forward(fast, ids, fast.engine.new_cache(fast.config), all_logits=True)
        kl[form] = pack((np.exp(plain) * (plain - qwen3.log_softmax(other.astype(np.float64)))).sum(axis=-1), "f4")
    return {"kl": kl, "answers": {form: [label(model.tokenizer.token_bytes(i)) for i in answer]
                                  for form, answer in answers.items()},
            "parts": {form: parting(answers["float32"], answers[form]) for form in kl}}


def parting(a: list[int], b: list[int]) -> int | None:
    """The index of the first token that differs, or None."""
    longest = max(len(a), len(b))
    return next((i for i in range(longest) if a[i:i + 1] != b[i:i + 1]), None)


def thinking_panel(model: Model, question: str, seed: int | None) -> dict[str, Any]:
    """The same question with thinking and without: text, tokens, seconds."""
    sides = []
    for flag in (True, False):
        reply = qwen3.chat(model, question, enable_thinking=flag, max_new_tokens=THOUGHT, seed=seed).finish()
        answer = reply.answer
        sides.append({"thinking": flag, "reasoning": answer.reasoning or "", "content": answer.content.strip(),
                      "tokens": len(reply.token_ids), "seconds": reply.times[-1] - reply.times[0],
                      "finish_reason": reply.finish_reason})
    return {"question": question, "sides": sides}
