"""Computes what the page shows with the functions of qwen3.py: one function per panel, each returns plain JSON."""
from __future__ import annotations

import base64
import copy
import io
import math
import time
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from inspect import getsource
from types import SimpleNamespace
from typing import Any

import numpy as np

import qwen3
import qwen3_asr
import qwen3_vision
from qwen3 import Config, InputError, Model, Sampling, brief, check_finite, softmax
from qwen3_lib.generation.answer import inside_thought, last_turn
from qwen3_lib.generation.options import AnswerOptions
from qwen3_lib.generation.messages import MARK
from qwen3_lib.io.cores import in_threads
from qwen3_lib.io.pictures import picture_of
from qwen3_lib.io.progress import progress
from qwen3_lib.page.page import lines_of_functions, pack, png
from qwen3_lib.page.recorder import RecordedPass, Recorder, Step
from qwen3_vision import MAX_PIXELS, MIN_PIXELS, fields, mrope_positions, prompt_ids, sees
from tokenizer_utils import parse_answer

PREFILLS = 5  # passes of the prompt; the page shows their median
READ = 2**26  # numbers that NumPy reads to show how fast memory is: 256 MB
TOP = 5  # tokens in a cell of the logit lens
HEAD_ROWS = 32  # positions whose logits are in memory together: 20 MB with a vocabulary of 151,936
CANDIDATES = 12  # tokens of a step that the page shows with each setting
VARIED = ({"temperature": 0}, {"temperature": 0.5}, {"temperature": 1}, {"temperature": 1.5}, {"temperature": 2},
            {"top_k": 5}, {"top_p": 0.5}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.3},
            {"presence_penalty": 1}, {"frequency_penalty": 1})  # beside those of the run; temperature 1 unless given
ROPE_PAIRS = 8  # least number of RoPE's pairs in the page; all head_dim / 2 if there is room
PICTURE = 32  # rows and columns in the picture of a state, at most
REPEATED = 24  # random tokens, shown twice to find induction heads
PAGE_ROOM = 12_000_000  # characters of base64 in a page; twice as many with pictures
RULE = "for each token S ← exp(g) S, then S ← S + kᵀ β (v − k S); q S"
FORMULAS = {
    "rope_tables": "cos(position · frequency), sin(position · frequency)",
    "embedding": "x = embed_tokens[id]",
    "rms_norm": "x / √(mean(x²) + eps) · weight",
    "linear": "x Wᵀ",
    "apply_rope": "(a cos − b sin, b cos + a sin)",
    "attend": "keys[position] = k, values[position] = v, softmax(q keysᵀ / √head_dim) values",
    "swiglu": "down(silu(gate(x)) · up(x))",
    "moe": "the sum of the chosen experts' swiglu(x), each times its weight",
    "sigmoid": "1 / (1 + exp(−x))",
    "causal_convolution": "silu(∑ᵢ weightᵢ · xᵢ), i the last few tokens",
    "unit_length": "x / √(∑x² + 10⁻⁶)",
    "delta_rule": RULE,
    "delta_rule_in_chunks": f"{RULE}; for up to 64 tokens at once, as linear equations",
}
PURPOSES = {  # the purpose of a step, by its weight or its function
    "rope_tables": "the angles of RoPE at each position",
    "embed_tokens": "each token's learned vector: the residual stream begins",
    "input_layernorm": "scales the vector to one size before attention",
    "q_proj": "queries: what each token looks for; in a Qwen3.5, also the gates of what it finds",
    "k_proj": "keys: what a query is compared with",
    "v_proj": "values: what a token gives to the tokens that look at it",
    "q_norm": "scales each head's query to one size",
    "k_norm": "scales each head's key to one size",
    "apply_rope": "turns each pair of dimensions by an angle for the token's position",
    "attend": "keeps keys and values for later tokens; each head adds up the values of the tokens it looks at",
    "o_proj": "joins the results of the heads; added to the residual stream",
    "post_attention_layernorm": "scales the vector to one size again",
    "swiglu": "works on each token alone; added to the residual stream",
    "moe": "works on each token alone, with the experts chosen for it; added to the residual stream",
    "in_proj_a": "how much each head forgets: becomes g",
    "in_proj_qkv": "queries, keys and values of all heads",
    "in_proj_b": "how much each head learns: becomes β",
    "conv1d": "mixes each number with the same number of the tokens just before",
    "unit_length": "gives each head's query or key the length 1",
    "delta_rule": "each head's state forgets, stores the value under the key, and recalls by the query",
    "delta_rule_in_chunks": "each head's state forgets, stores the values under the keys, and recalls by the queries",
    "in_proj_z": "the gate of each head's output",
    "linear_attn.norm": "scales each head's output to one size",
    "out_proj": "joins the results of the heads; added to the residual stream",
    "sigmoid": "a switch from 0 to 1 for each number: what is learned, or what passes",
    "shared_expert_gate": "how much passes of the expert that all tokens go through",
    "norm": "scales the vector to one size before the head",
    "lm_head": "a logit for each token of the vocabulary: how well it fits next",
}


@dataclass(frozen=True)
class PageOptions:
    """The user's prompt and options. Raises InputError for wrong values."""
    prompt: str
    raw: bool = False  # no chat template
    enable_thinking: bool | None = None
    answer: AnswerOptions = AnswerOptions()  # there may be room for fewer pixels than max_pixels
    images: Sequence[Any] = ()  # what the prompt is about: anything that picture_of takes
    sound: np.ndarray | None = None  # samples [n], to be written down; the prompt is then their context

    def __post_init__(self) -> None:
        if self.sound is None and not self.prompt.strip():
            raise InputError("the prompt is empty")
        if self.sound is not None and (self.raw or self.images or self.enable_thinking is not None):
            raise InputError("--sound goes without --raw, --image, --think and --no-think")
        if self.raw and (self.enable_thinking is not None or self.images):
            raise InputError("--raw leaves out the chat template, so --think, --no-think and --image have no effect "
                             "with it")

    @property
    def longest(self) -> int:
        """The longest answer in tokens."""
        return self.answer.max_new_tokens or 32


def contents(model: Model, options: PageOptions) -> dict[str, Any]:
    """All that the page shows. Raises InputError for a prompt that is too long or can't be rendered."""
    tokenizer, config = model.tokenizer, model.config
    text, prompt, seen = page_prompt(model, options) if options.sound is None else heard_prompt(model, options)
    given = options.answer
    settings = given.over(qwen3.default_sampling(model, options.enable_thinking)).sampling
    seed = int(np.random.default_rng().integers(2**31)) if given.seed is None else given.seed

    recorder = Recorder(model)
    prefills, bandwidth = prefilled(recorder, prompt)
    drawn, passes = answered(recorder, prompt, options.longest, settings, seed)
    ended = drawn[-1].token in model.eos_token_ids
    answer = [each.token for each in drawn[:-1 if ended else None]]
    if options.sound is None:
        parts = parse_answer(tokenizer.decode(answer), inside_thought(last_turn(tokenizer, prompt)))
        said = parts.content.strip() or parts.reasoning or ""
    else:
        said = qwen3_asr.language_and_text(tokenizer.decode(answer))[1]
    ids = np.array([*prompt, *answer])
    # In the page, the tokens of the k-th picture have the id ~k.
    shown = np.where(ids < 0, ~(np.cumsum((ids < 0) & (fields(ids)[3] == 0)) - 1), ids)
    recorder.keep_arrays = True
    recorder.forward(ids, recorder.new_cache(), all_logits=True)
    whole = recorder.passes[-1]

    panels = {
        "tokens": tokens_panel(model, text, options.prompt, shown, len(prompt)),
        "pictures": [shown_picture(each) for each in seen],
        "way": way_panel(whole, [*prefills, passes[0]], passes[1:], bandwidth),
        "attention": attention_panel(recorder, whole, ids),
        "delta": delta_panel(recorder, whole) if recorder.linear else None,
        "lens": lens_panel(model, whole),
        "choosing": choosing_panel(drawn, settings, prompt),
        "cache": cache_panel(recorder, [*prefills, passes[0]], passes),
    }
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "rope_dim")
    return panels | {
        "about": {"model": brief(model.path.name), "prompt": options.prompt, "n_prompt": len(prompt), "ended": ended,
                  "answer": said, "seed": seed, "raw": options.raw, "version": qwen3.__version__,
                  "date": time.strftime("%Y-%m-%d"),
                  **{name: getattr(config, name) for name in sizes}},
        "labels": {str(i): label(tokenizer.token_bytes(i)) for i in ids_within(panels)} |
        {str(~i): f"picture {i}" if len(seen) > 1 else "the picture" if options.sound is None else "the sound"
         for i in range(len(seen))},
        "mrope": bool(options.images), "heard": options.sound is not None,
        "sources": (sources := {f"{module.__name__}.py": getsource(module)
                                for module in [qwen3_vision if options.sound is None else qwen3_asr] * bool(seen)
                                + recorder.modules}),
        "lines": {name: [file, *ends] for file, source in sources.items()
                  for name, ends in lines_of_functions(source).items()}, "words": PURPOSES,
        "formulas": FORMULAS | ({"embedding": "x = embed_tokens[id], or what the tower made"} if seen else {}),
    }


def check_room(model: Model, n_prompt: int, n_answer: int, space: int = PAGE_ROOM) -> int:
    """How many more positions `space` characters hold. Raises InputError if prompt and answer together are too long for
    a page or for the model."""
    most = min(qwen3.CHUNK, model.config.context_length)
    while most > 1 and characters(model.config, most, ROPE_PAIRS) > space:
        most -= 1
    if n_prompt + n_answer > most:
        raise InputError(f"the prompt has {n_prompt} tokens, the answer up to {n_answer}: together more than the "
                         f"{most} positions of a page of this model; shorten the prompt or lower --max-tokens")
    return most - n_prompt - n_answer


def characters(config: Config, n: int, pairs: int) -> float:
    """The size in the page of the attention maps of n positions, of `pairs` pairs of dimensions of q and k, and of
    delta nets."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    maps, hands = heads * n * (n + 1) / 2, (heads + kv_heads) * n * 2 * pairs
    nets = len(getattr(config, "linear_layers", ()))
    deltas = getattr(config, "linear_num_value_heads", 0) * (6 * n + PICTURE**2)
    return ((config.num_hidden_layers - nets) * (maps + hands) + nets * deltas) * 2 * 4 / 3


def ids_within(panels: dict[str, Any]) -> list[int]:
    """All token ids that panels show."""
    found = [panels["tokens"]["ids"], panels["lens"]["ids"]["values"], *(
        step["ids"] for step in panels["choosing"]["steps"])]
    return sorted({int(i) for ids in found for i in ids})


def label(data: bytes) -> str:
    """A token's bytes as visible text: signs for invisible characters and lone spaces, hexadecimal for half characters.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return "".join(chr(byte) if 0x20 < byte < 0x7F else f"\\x{byte:02x}" for byte in data)
    if not text.strip(" "):
        return "␣" * len(text)
    return "".join(c if c.isprintable() else {"\n": "⏎", "\t": "⇥"}.get(c, repr(c)[1:-1]) for c in text)


# ---- The prompt and its pictures -------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Patches:
    """A picture of the prompt, or a sound: a picture with one row of tokens."""
    picture: Any  # with `rows` and `columns` of tokens
    files: dict[str, bytes]  # what the tower got, as "png" and perhaps as "jpeg"
    ratio: float  # width / height
    full: int  # the number of its tokens in qwen3.py


def page_prompt(model: Model, options: PageOptions) -> tuple[str, list[int], list[Patches]]:
    """(the text of the prompt, its ids, its pictures).

    The attention maps grow with the square of the tokens. So pictures are made smaller than in qwen3.py, until they fit
    beside the text and the answer.
    """
    n, space = len(options.images), 2 * PAGE_ROOM if options.images else PAGE_ROOM
    if n and not sees(model):
        raise InputError(f"{model.path}: the model can't see: it has no vision tower")
    text = options.prompt if options.raw else model.tokenizer.apply_chat_template(
        [{"role": "user", "content": MARK * n + options.prompt}], enable_thinking=options.enable_thinking)
    ids = model.tokenizer.encode(text, add_special_tokens=options.raw)
    room = check_room(model, len(ids), options.longest, space)
    seen = [made_small(model, image, 1 + room // n, options.answer.max_pixels) for image in options.images]
    ids = [int(i) for i in prompt_ids(model, ids, [each.picture for each in seen])]
    check_room(model, len(ids), options.longest, space)
    return text, ids, seen


def heard_prompt(model: Model, options: PageOptions) -> tuple[str, list[int], list[Patches]]:
    """page_prompt for a sound; its picture is the log-mel, with low pitches at the bottom."""
    samples = np.pad(options.sound, (0, max(qwen3_asr.SHORTEST - len(options.sound), 0)))  # type: ignore[arg-type]
    sound = qwen3_asr.sounds_of(model).hear(samples, in_threads)
    ids = qwen3_asr.speech_prompt(model, sound, context=options.prompt).tolist()
    check_room(model, len(ids), options.longest, 2 * PAGE_ROOM)
    levels = qwen3_asr.log_mel(samples)
    grey = (levels - levels.min()) / max(np.ptp(levels), 1e-9) * 255
    n = len(sound.ids)
    strip, files = SimpleNamespace(rows=1, columns=n), {"png": png(grey.T[::-1].astype(np.uint8))}
    seen = Patches(strip, files, 8 * n / max(64, min(256, 2 * n)), n)
    return model.tokenizer.decode([i for i in ids if i >= 0]), ids, [seen]


def made_small(model: Model, source: Any, room: int, max_pixels: int | None) -> Patches:
    """A picture with `room` tokens at most."""
    image, side = picture_of(source), model.media.config.side
    full = math.prod(model.media.size(image, max_pixels))
    pixels = room * side**2
    picture = model.media.show(image, min(max_pixels or MAX_PIXELS, pixels), min(MIN_PIXELS, pixels // 2))
    image, files = image.resize((picture.columns * side, picture.rows * side), resample=3), {}
    for form in ("png", "jpeg"):
        image.save(file := io.BytesIO(), form, quality=90)
        files[form] = file.getvalue()
    return Patches(picture, files, image.width / image.height, full)


def shown_picture(seen: Patches) -> dict[str, Any]:
    """The picture as a data: URL, as PNG or JPEG, which is smaller; the rows and columns of its tokens."""
    form, data = min(seen.files.items(), key=lambda file: len(file[1]))
    return {"url": f"data:image/{form};base64,{base64.b64encode(data).decode('ascii')}", "rows": seen.picture.rows,
            "columns": seen.picture.columns, "full": seen.full, "ratio": seen.ratio}


# ---- 1: tokens -------------------------------------------------------------------------------------------------------

def tokens_panel(model: Model, text: str, wanted: str, ids: np.ndarray, n_prompt: int) -> dict[str, Any]:
    """The tokens with their bytes and their author: the template, the user or the model."""
    pieces = [model.tokenizer.token_bytes(int(i)) for i in ids]
    written = b"".join(pieces[:n_prompt])  # may differ from `text`: tokenizers normalize Unicode
    asked = unicodedata.normalize("NFC", wanted).strip().encode()
    start = written.rfind(asked)
    end, at, parts = start + len(asked), 0, []
    for i, piece in enumerate(pieces):
        yours = start >= 0 and at < end and start < at + len(piece)
        parts.append("answer" if i >= n_prompt else "prompt" if yours or ids[i] < 0 else "template")
        at += len(piece)
    return {"ids": ids.tolist(), "bytes": [piece.hex(" ") for piece in pieces], "parts": parts, "text": text}


# ---- 2: the way ------------------------------------------------------------------------------------------------------

def prefilled(recorder: Recorder, prompt: list[int]) -> tuple[list[RecordedPass], float]:
    """(recorded passes of the prompt, the bytes per second with which NumPy reads memory).

    Another process may slow down any of them, so there are several passes, and between them readings, of which the
    best counts.
    """
    numbers, best = np.ones(READ, np.float32), 0.0
    for _ in progress(range(PREFILLS), "reading the prompt"):  # the first one waits for the disk
        recorder.forward(prompt, recorder.new_cache())
        for _ in range(3):
            start = time.perf_counter()
            np.dot(numbers, numbers)
            best = max(best, numbers.nbytes / (time.perf_counter() - start))
    return recorder.passes[1:], best


def way_panel(whole: RecordedPass, prefills: list[RecordedPass], decodes: list[RecordedPass],
              bandwidth: float) -> dict[str, Any]:
    """The steps of a pass over the whole text with their norms, and their costs at prefill and at decode."""
    steps = [{"function": step.function, "weight": step.weight, "layer": step.layer, "file": step.file,
              "line": step.line,
              "prefill": costs([each.steps[i] for each in prefills]),
              "decode": costs([each.steps[i] for each in decodes]) if decodes else None}
             for i, step in enumerate(whole.steps)]
    streams = np.stack([np.linalg.norm(stream.astype(np.float64), axis=-1) for stream in whole.streams])
    no_vector = np.full(whole.n, np.nan)
    norms = np.stack([no_vector if step.norms is None else step.norms for step in whole.steps])
    return {"steps": steps, "norms": pack(norms, "f4"), "streams": pack(streams, "f4"), "bandwidth": bandwidth}


def costs(steps: Sequence[Step]) -> dict[str, Any]:
    """Shape, bytes and operations of a step in the middle pass, and the median of its times in all passes."""
    middle = steps[len(steps) // 2]  # the bytes grow with the cache
    return {"shape": list(middle.shape), "read": middle.read, "operations": middle.operations,
            "seconds": float(np.median([step.seconds for step in steps]))}


# ---- 3: attention ----------------------------------------------------------------------------------------------------

def attention_panel(recorder: Recorder, whole: RecordedPass, ids: np.ndarray) -> dict[str, Any]:
    """Of each layer that attends: attention weights (lower triangles, row by row), scores of heads that copy, pairs of
    q and k before RoPE, and the gates of a Qwen3.5. Of each token: time, row and column; of each pair: which of the
    three turns it."""
    config, pictures = recorder.model.config, recorder.model.media
    maps = np.stack(whole.attention)  # [n_layers, n_heads, n, n]
    rows, columns = np.tril_indices(whole.n)
    cos, sin = qwen3.rope_tables(config, np.array([1]))
    pairs, half = pairs_with_room(config, whole.n), config.rope_dim // 2
    chosen = np.concatenate([pairs, pairs + half])
    return {"layers": recorder.attending, "gates": pack(np.stack(whole.gates), "f2") if whole.gates else None,
            "maps": pack(maps[:, :, rows, columns], "f2"), "previous": pack(diagonal(maps, -1), "f4"),
            "induction": pack(induction(recorder), "f4"), "repeated": REPEATED, "pairs": pairs.tolist(),
            "positions": (mrope_positions(ids[:0], ids) if sees(recorder.model) else
                          np.arange(len(ids))[:, None].repeat(3, axis=1)).tolist(),
            "axes": pictures.axes[pairs].tolist() if sees(recorder.model) else [0] * len(pairs),
            "frequencies": np.arctan2(sin, cos)[0, pairs].tolist(), "factor": config.rope_factor,
            "q": pack(np.stack(whole.q)[..., chosen], "f2"), "k": pack(np.stack(whole.k)[..., chosen], "f2")}


def pairs_with_room(config: Config, n: int) -> np.ndarray:
    """The pairs of dimensions in a page of n positions: all, or as many as there is room for, evenly spaced."""
    count = half = config.rope_dim // 2
    while count > ROPE_PAIRS and characters(config, n, count) > PAGE_ROOM:
        count -= 1
    return np.linspace(0, half - 1, count).round().astype(int)


def diagonal(maps: np.ndarray, offset: int, first: int = 0) -> np.ndarray:
    """The mean of a diagonal of maps [..., n, n], from row `first` on -> [...]; 0 if it is empty."""
    values = np.diagonal(maps[..., first:, :], offset + first, axis1=-2, axis2=-1)
    return values.mean(axis=-1) if values.shape[-1] else np.zeros(values.shape[:-1])


def induction(recorder: Recorder) -> np.ndarray:
    """The weight of each head, [n_layers, n_heads], on the token after an earlier copy of the token that asks.

    The text is random tokens, twice in a row, so that only the repetition tells what follows.
    Source: Olsson et al. 2022 (induction heads).
    """
    config = recorder.model.config
    n = min(REPEATED, config.context_length // 2)
    ids = np.tile(np.random.default_rng(0).integers(0, config.vocab_size, n), 2)
    recorder.forward(ids, recorder.new_cache())
    return diagonal(np.stack(recorder.passes[-1].attention), 1 - n, n)


# ---- 4: delta nets ---------------------------------------------------------------------------------------------------

def delta_panel(recorder: Recorder, whole: RecordedPass) -> dict[str, Any]:
    """Of each head: decay, beta and the length of the state at each token, and a picture of the last state.

    A pixel is the largest of a block of numbers, without the sign.
    """
    pictures = np.abs(np.stack(whole.states))  # [n_layers, n_heads, key_dim, value_dim]
    block = -(-max(pictures.shape[2:]) // PICTURE)
    for axis in (2, 3):
        pictures = np.maximum.reduceat(pictures, range(0, pictures.shape[axis], block), axis)
    return {"layers": recorder.linear, "block": block, "rates": pack(np.stack(whole.deltas), "f4"),
            "states": pack(pictures, "f2")}


# ---- 5: logit lens ---------------------------------------------------------------------------------------------------

def lens_panel(model: Model, whole: RecordedPass) -> dict[str, Any]:
    """The head applied to the residual stream after each layer: the most likely tokens, [n_layers + 1, n, TOP].

    Source: nostalgebraist 2020 (logit lens).
    """
    w, top = model.weights, min(TOP, model.config.vocab_size)
    ids = np.empty((len(whole.streams), whole.n, top), np.int64)
    probabilities = np.empty(ids.shape)
    for layer, stream in enumerate(progress(whole.streams, "logit lens")):
        for start in range(0, whole.n, HEAD_ROWS):
            now = slice(start, start + HEAD_ROWS)
            p = softmax(qwen3.linear(qwen3.rms_norm(stream[now], w["norm"], model.config.rms_norm_eps), w["lm_head"]))
            best = np.argpartition(-p, top - 1, axis=-1)[:, :top]
            order = np.argsort(-np.take_along_axis(p, best, axis=-1), axis=-1, kind="stable")
            ids[layer, now] = np.take_along_axis(best, order, axis=-1)
            probabilities[layer, now] = np.take_along_axis(p, ids[layer, now], axis=-1)
    leads = (ids[..., 0] == ids[-1:, :, 0]).argmax(axis=0)  # the first layer with the final answer
    return {"ids": {"shape": list(ids.shape), "values": ids.reshape(-1).tolist()},
            "probabilities": pack(probabilities, "f4"), "leads": leads.tolist()}


# ---- 6: choosing, and 7: the KV cache --------------------------------------------------------------------------------

@dataclass(frozen=True)
class Drawn:
    """A token, the logits [vocab_size] it was drawn from, and the state of the random numbers before."""
    token: int
    logits: np.ndarray
    rng: np.random.Generator


def answered(recorder: Recorder, prompt: list[int], limit: int, settings: Sampling,
             seed: int) -> tuple[list[Drawn], list[RecordedPass]]:
    """generate, recorded -> (each token drawn, the passes); the last token may be an end of text."""
    drawn, answer, new = list[Drawn](), list[int](), prompt
    rng, cache = np.random.default_rng(seed), recorder.new_cache()
    for _ in progress(range(limit), "answering"):
        logits = recorder.forward(new, cache)
        check_finite(recorder.model, logits)
        before = copy.deepcopy(rng)
        new = [qwen3.sample(logits, settings, rng, prompt, answer)]
        answer += new
        drawn.append(Drawn(new[0], logits, before))
        if new[0] in recorder.model.eos_token_ids:
            break
    return drawn, recorder.passes[-len(drawn):]


def choosing_panel(drawn: list[Drawn], settings: Sampling, prompt: list[int]) -> dict[str, Any]:
    """Of each token drawn, with the settings of the run and with each of VARIED: how many tokens stay, which one the
    run's random numbers draw, and of the likeliest tokens logits after penalties and probabilities [n_settings, n]."""
    all_settings = [settings, *(Sampling(1).updated(**each) for each in VARIED)]
    answer, steps = list[int](), []
    for each in progress(drawn, "choosing"):
        logits = [qwen3.penalize(each.logits, how, prompt, answer) for how in all_settings]
        kept = [qwen3.candidates(x, how) if how.temperature else ([x.argmax()], [1.0])
                for x, how in zip(logits, all_settings)]
        draws = [qwen3.sample(each.logits, how, copy.deepcopy(each.rng), prompt, answer) for how in all_settings]
        top = min(CANDIDATES, len(each.logits))
        ids = np.unique([*draws, *(i for x in logits for i in np.argpartition(-x, top - 1)[:top])])
        shares = np.zeros((len(kept), len(each.logits)), np.float32)
        for row, (those, p) in zip(shares, kept):
            row[those] = p
        steps.append({"draws": draws, "ids": ids.tolist(), "kept": [len(those) for those, _ in kept],
                      "probabilities": pack(softmax(each.logits)[ids], "f4"), "shares": pack(shares[:, ids], "f4"),
                      "logits": pack(np.stack(logits)[:, ids], "f4")})
        answer.append(each.token)
    return {"steps": steps, "settings": [f"as in the run: {as_options(settings)}", *map(as_options, all_settings[1:])]}


def as_options(settings: Sampling) -> str:
    """As options of the command: temperature 0.7, top-k 20; without those that are off."""
    off = asdict(Sampling())
    return ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in asdict(settings).items()
                     if name == "temperature" or value != off[name])


def cache_panel(recorder: Recorder, prefills: list[RecordedPass], passes: list[RecordedPass]) -> dict[str, Any]:
    """The time of each pass, of prefill the median, the positions the cache then holds and has room for, and the bytes
    of the states."""
    config = recorder.model.config
    states = len(recorder.linear) * sum(array.nbytes for array in getattr(recorder.new_cache(), "empty", ()))
    per_position = 2 * len(recorder.attending) * config.num_key_value_heads * config.head_dim * 4
    seconds = [float(np.median([each.seconds for each in prefills])), *(each.seconds for each in passes[1:])]
    return {"per_position": per_position, "states": states, "passes": [
        {"n": each.n, "seconds": time, "length": each.length, "capacity": each.capacity}
        for each, time in zip(passes, seconds)]}
