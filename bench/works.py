"""Works of run.py: a function with its name for each row of the table there."""
import contextlib
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import methodcaller
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from harness import ALL, ENTRIES, NAN, PAIRS, ROOT, Bench, engines_table, seconds, table
from peers import NumbaEngine, NumpyEngine, build_ik, matrices_of, open_engine, peer_file, read_bytes, torch_model

# ---- Many sequences together -----------------------------------------------------------------------------------------

ROOM = 256  # positions of a sequence


def batch(bench: Bench, counts: Sequence[int] = (1, 2, 4, 8, 16, 32), prompt: int = 16, steps: int = 12) -> list[str]:
    """A step gives each sequence one more token, its choice included, after a short prompt of its own.

    The limit: a step takes at least the time in which the memory delivers what it reads (all weights once, and the keys
    and values of each sequence), and at least the time of its multiplications at the speed that the faster of the two
    engines of a format reaches on a prompt of 255 tokens. The fastest of the rounds counts.
    """
    config, rng = bench.model(), np.random.default_rng(0)
    prompts = rng.integers(0, config.vocab_size, (max(counts), prompt)).tolist()
    for name in bench.names(ALL):
        bench.open(name, open_engine, ROOM, sequences=max(counts), check=methodcaller("start", prompts))
    for n in counts:
        bench.each(n, "steps_speed", prompts[:n], steps)
    bench.each("prompt", "start_speed", rng.integers(0, config.vocab_size, ROOM - 1).tolist())
    weights, head = sum(a * b for a, b in matrices_of(config).values()), config.vocab_size * config.hidden_size

    def limit(name: str, n: int) -> str:
        fastest = max(max(bench.values[each, "prompt"]) for each in (name, PAIRS[name]) if each in bench.workers)
        memory = n * max(bench.bandwidths()) / read_bytes(config, name, prompt + steps // 2, n)
        # Of a prompt only the last token is multiplied with the head, of an answer each one.
        arithmetic = fastest * (weights - head + head / ROOM) / weights
        return f"{min(memory, arithmetic):.1f}{' (a)' * (memory > arithmetic)}"

    return [f"Tokens/s of so many sequences together, after {prompt} tokens each:", "",
            *engines_table([*map(str, counts), "first tokens as the first engine"], {name: [
                *(f"{bench.median(name, n):.1f}" for n in counts), bench.same(name)] for name in bench.workers}), "",
            *table(["the limit", *map(str, counts)], *([name, *(limit(name, n) for n in counts)]
                                                       for name in PAIRS if name in bench.workers)), "",
            "(a): arithmetic is the limit, not the memory.", *bench.ratios(*counts)]


# ---- Beside another program ------------------------------------------------------------------------------------------

BESIDE = ("bf16-rounded", "llama-bf16", "ik-bf16", "openvino-fp16", "int4", "llama-q4_0", "ik-q4_0", "openvino-int4")
HALF = """
import os, sys, time
if hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {int(sys.argv[1])})
print("begun", flush=True)
end = time.perf_counter()
while True:
    start, end = time.thread_time(), max(end + 0.01, time.perf_counter())
    while time.thread_time() < start + 0.005:
        pass
    time.sleep(max(end - time.perf_counter(), 0))
"""


@contextlib.contextmanager
def half_a_core(core: int) -> Iterator[None]:
    """Meanwhile a program takes 5 ms of each 10 ms of a core, where Linux lets it choose one."""
    with subprocess.Popen([sys.executable, "-c", HALF, str(core)], stdout=subprocess.PIPE) as program:
        assert program.stdout
        program.stdout.readline()
        try:
            yield
        finally:
            program.kill()


def busy(bench: Bench, context: int = 16, prompt: int = 512, tokens: int = 48) -> list[str]:
    """The share of an engine's speed that is left while another program takes half of one core, as a browser does.

    The median of the tokens counts.
    """
    config = bench.model()
    if bench.args.ik:
        build_ik(bench.args.ik, bench.folder / "ik_llama.cpp")
    ids = np.random.default_rng(0).integers(0, config.vocab_size, max(prompt, tokens)).tolist()
    for name in bench.names(bench.args.engines or BESIDE):
        bench.open(name, open_engine, max(context + tokens, prompt))
        if name in bench.workers and ENTRIES[name].engine == "this engine":
            bench.workers[name]("settle")
    works = {"prompt": ("prefill_speed", ids[:prompt]), "decode": ("decode_speed", context, ids[:tokens])}
    for turn in range(bench.args.rounds):
        for what, work in works.items():
            bench.each(what, *work, rounds=1, warm=not turn)
            with half_a_core(turn % bench.args.threads):
                bench.each(f"{what}, busy", *work, rounds=1, warm=False)
    return ["Tokens/s, also while another program takes half of one core, and what is left:", "",
            *engines_table([title for what in works for title in (what, "busy", "left")], {name: [
                cell for what in works for cell in (
                    *(f"{bench.median(name, each):.1f}" for each in (what, f"{what}, busy")),
                    f"{bench.ratio(name, name, f'{what}, busy', what):.2f}")] for name in bench.workers}), "",
            f"The work allows {1 - 1 / (2 * bench.args.threads):.2f}."]


# ---- Vectors ---------------------------------------------------------------------------------------------------------

LENGTHS = {"16": 32, "128": 16, "512": 8, "mixed": 32}  # lengths of the texts -> how many texts
MIXED = (8, 512)  # lengths, evenly spread on a logarithmic scale
EMBEDDERS = {"bf16": "llama-bf16", "int8": "llama-q8_0", "numpy": "torch"}


def embed(bench: Bench) -> list[str]:
    """Inputs are token ids, so that no tokenizer is measured. torch gets batches of 8 texts, in the order in which they
    come, padded on the left; llama.cpp as many texts at a time as fit into 2,048 tokens.
    """
    config, rng = bench.model(vocab_size=151669, max_position_embeddings=32768), np.random.default_rng(0)
    sizes = {kind: rng.permutation(np.geomspace(*MIXED, n).astype(int)) if kind == "mixed" else [int(kind)] * n
             for kind, n in LENGTHS.items()}
    texts = {kind: [rng.integers(0, config.vocab_size, n).tolist() for n in some] for kind, some in sizes.items()}
    for name in bench.names(name for pair in EMBEDDERS.items() for name in pair):
        bench.open(name, open_engine, 2048, texts=max(LENGTHS.values()), check=partial(vectors, texts=texts["mixed"]))
    for kind, some in texts.items():
        bench.each(kind, embed_speed, some)
    pairs = [*itertools.islice(EMBEDDERS.items(), 2), ("bf16", "torch"), ("int8", "torch")]
    return [f"{config.num_hidden_layers} layers, hidden_size {config.hidden_size}. Texts per second, medians of the "
            "rounds; the smallest cosine of the mixed texts.", "",
            *engines_table([*(f"{kind} tokens" for kind in texts), "cosine to torch"], {name: [
                *(f"{bench.median(name, kind):.2f}" for kind in texts),
                f"{(ours * bench.checked.get('torch', NAN)).sum(axis=1).min():.6f}"]
                for name, ours in bench.checked.items()}), "",
            *table(["ratio, median of the rounds", *texts], *(
                [f"{a} / {b}", *(f"{bench.ratio(a, b, kind):.2f}" for kind in texts)] for a, b in pairs))]


def embed_speed(engine: Any, texts: list[list[int]]) -> float:
    return len(texts) / seconds(lambda: engine.embed(texts))


def vectors(engine: Any, texts: list[list[int]]) -> np.ndarray:
    """Of length 1."""
    rows = engine.embed(texts)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


# ---- Qwen3.5 ---------------------------------------------------------------------------------------------------------

END = 7  # the token at the end of a turn


def hybrid_model(path: Path, **changes: Any) -> Path:
    """Random weights in the shape of Qwen3.5-0.8B."""
    from configs import HYBRID
    from make_random_model import make_random_model
    make_random_model(HYBRID | {
        "head_dim": 256, "hidden_size": 1024, "intermediate_size": 3584, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_value_head_dim": 128,
        "max_position_embeddings": 262144, "num_attention_heads": 8, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "vocab_size": 248320, "torch_dtype": "bfloat16",
        "rope_parameters": HYBRID["rope_parameters"] | {"mrope_section": [11, 11, 10]}} | changes, path)
    (path / "generation_config.json").write_text(f'{{"eos_token_id": {END}}}')
    return path


def hybrid(bench: Bench, turn: int = 8000) -> list[str]:
    """A decoded token reads all matrices, the keys and values, and the states, which are written, too: all that counts
    as bytes. In the second turn, this engine goes on from a kept state; llama.cpp, whose state can't be cut back to the
    end of the question, reads all of it again.
    """
    config = bench.model(hybrid_model)
    ids = np.random.default_rng(0).integers(8, min(4000, config.vocab_size), turn + 100).tolist()
    for name in bench.names(ALL):
        bench.open(name, open_engine, turn + 100)
    bench.each("decode", decode_after, ids[:16])
    bench.each("prefill", "prefill_speed", ids[:512])
    bench.each("second turn", second_turn, ids[:turn - 1] + [END, 9], ids[100:140], rounds=1, warm=False,
               names=bench.workers.keys() & {"int8", PAIRS["int8"]})
    return [*engines_table(["decode at 16, tokens/s", "of the bandwidth", "prefill 512, tokens/s",
                            f"second turn after {turn} tokens, s"], {name: [
        f"{bench.median(name, 'decode'):.2f}",
        f"{bench.share(name, 'decode', read_bytes(config, name, 16)):.2f}",
        f"{bench.median(name, 'prefill'):.1f}", f"{bench.median(name, 'second turn'):.2f}"]
        for name in bench.workers}), *bench.ratios("decode", "prefill")]


def decode_after(engine: Any, context: list[int]) -> float:
    """Tokens per second after a context, which is read first: a state can't be cut back."""
    engine.read_prompt(context)
    return engine.decode_speed(len(context), context[:16])


def second_turn(engine: Any, first: list[int], question: list[int]) -> float:
    """Seconds until the first token of a second turn, whose prompt has not the thought of the first answer."""
    engine.read_prompt(first)
    for token in question[::-1]:  # as many tokens of a thought, which the next prompt leaves out
        engine.run([token])
    prompt = first + question
    start = engine.cache.common_prefix(np.array(prompt)) if hasattr(engine, "cache") else 0
    engine.truncate(start)
    return seconds(lambda: [engine.run(prompt[at:at + engine.STEP]) for at in range(start, len(prompt), engine.STEP)])


# ---- A mixture of experts --------------------------------------------------------------------------------------------

def moe_model(path: Path, layers: int) -> Path:
    """Layers of Qwen3-30B-A3B. The output of attention, much alike for all tokens, must not outweigh the embedding, or
    all choose the same few experts: so the embedding is made large and o_proj small, and 512 different tokens choose
    nearly all experts of each layer.
    """
    from make_random_model import make_random_model, official_config
    about = official_config("8B") | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 4}
    return make_random_model(about, path, shards=layers + 1, scales={
        "embed_tokens": about["hidden_size"] ** 0.5, "o_proj": 0.125})


def moe(bench: Bench, layers: int = 4, steps: int = 48) -> list[str]:
    """The two engines of a format are in memory together."""
    config, rows = bench.model(moe_model, layers=layers), dict[str, list[str]]()
    ids = np.random.default_rng(0).permutation(config.vocab_size)[:512].tolist()
    for pair in PAIRS.items():
        for name in bench.names(pair):
            bench.open(name, open_engine, 512 + steps, check=partial(first_tokens, ids=ids))
        bench.each("prefill", "prefill_speed", ids)
        bench.each("decode", "decode_speed", 16, ids[-steps:])
        for name in [*bench.workers]:
            read = read_bytes(config, name, 16)
            rows[name] = [f"{read / 1e9:.2f}", f"{bench.median(name, 'decode'):.2f}",
                          f"{bench.median(name, 'prefill'):.1f}", f"{bench.share(name, 'decode', read):.2f}",
                          bench.same(name)]
            bench.close(name)
            (bench.folder / f"{name}.gguf").unlink(missing_ok=True)
    return [f"{config.num_hidden_layers} layers of width {config.hidden_size}, each with {config.num_experts} experts, "
            f"{config.num_experts_per_tok} of them for a token:", "",
            *engines_table(["read per token, GB", "decode at 16, tokens/s", "prefill 512, tokens/s",
                            "decode: of the bandwidth", "first tokens as the first engine"], rows),
            *bench.ratios("decode", "prefill")]


def first_tokens(engine: Any, ids: list[int]) -> list[int]:
    """The most likely token after each of 16 prompts."""
    return [engine.truncate(0) or int(engine.run(prompt)[0].argmax()) for prompt in
            np.resize(ids, (16, 16)).tolist()]


# ---- Guesses ---------------------------------------------------------------------------------------------------------

SHARES = (0.0, 0.5, 0.75, 0.9, 0.95)  # of guesses that are right


def draft(bench: Bench, tokens: int = 96, lengths: Sequence[int] = (2, 3, 4, 6, 8)) -> list[str]:
    """A draft of 4 bits."""
    bench.model()
    return guesses(bench, ("bf16", "int8"), tokens, lengths)


def mtp(bench: Bench, tokens: int = 96, lengths: Sequence[int] = (2, 3, 4, 6, 8)) -> list[str]:
    """The MTP head of a Qwen3.5."""
    bench.model(hybrid_model, mtp_num_hidden_layers=1)
    return guesses(bench, ("bf16", "int8", "int4"), tokens, lengths)


def guesses(bench: Bench, names: Sequence[str], tokens: int, lengths: Sequence[int]) -> list[str]:
    """A random model's draft makes its guesses, which take their time; then each becomes the very token of the plain
    answer with a given probability, or another one. All answers are compared: with guesses, the tokens are the same.
    """
    for name in bench.names(names):
        bench.open(name, Guessing, tokens)
    bench.each("answers", "answers")
    bench.each("passes", "passes", lengths)
    rows, costs = dict[str, list[str]](), dict[str, list[str]]()
    for name in bench.workers:
        plain, make, *gains = np.median(bench.values[name, "answers"], axis=0)
        rows[name] = [f"{plain:.1f}", *(f"{gain:.2f}" for gain in gains)]
        costs[name] = [f"{make:.2f}", *(f"{cost:.2f}" for cost in np.median(bench.values[name, "passes"], axis=0))]
    return [f"Answers of {tokens} tokens, beside those without guesses:", "",
            *engines_table(["tokens/s without", *(f"right in {share:.0%}" for share in SHARES)], rows), "",
            "Beside a pass of one token:", "",
            *engines_table(["to make a guess", *(f"a pass of {n} tokens" for n in lengths)], costs)]


class Guessing(NumbaEngine):
    """An engine with guesses by a draft of 4 bits, or by the MTP head."""

    def __init__(self, name: str, path: Path, _: Path, threads: int, tokens: int, repack: bool):
        import qwen3_numba
        from qwen3_lib.generation.guesses import MTP, Draft, has_mtp_head
        super().__init__(path, None if name == "bf16" else name, threads, 256, tokenizer=True)
        self.tokens, self.rounds, model = tokens, itertools.count(), self.model
        kind, models = (MTP, (model,)) if has_mtp_head(model) else (Draft, (
            qwen3_numba.load_model(path, "int4", threads), model))

        class Agreeing(kind):
            def guess(agreeing, sequence: Any, cache: Any, n: int) -> list[int]:
                start, at = time.perf_counter(), len(sequence.token_ids)
                made = super().guess(sequence, cache, n)
                agreeing.seconds.append((time.perf_counter() - start) / max(len(made), 1))
                return [token if agreeing.rng.random() < agreeing.share else token ^ 1
                        for token in agreeing.answer[at:at + len(made)]]

        self.source = partial(Agreeing, *models)

    def answers(self) -> list[float]:
        """[tokens/s without guesses, a guess's share of a pass, the speed with guesses of each of SHARES beside it]."""
        from qwen3_lib.generation.completion import Completion
        n = next(self.rounds)
        prompt = np.random.default_rng(n).integers(0, self.model.config.vocab_size, 16)

        def answer(source: Any) -> tuple[list[int], float]:
            done = Completion(self.model, prompt, draft=source, max_new_tokens=self.tokens, temperature=0.0,
                              eos_token_ids=()).finish()
            return done.token_ids, (self.tokens - 1) / (done.times[-1] - done.times[1])

        plain, speed = answer("off")
        made, gains = list[float](), list[float]()
        for share in SHARES:
            source = self.source()
            source.share, source.answer, source.rng, source.seconds = share, plain, np.random.default_rng(n), made
            found, fast = answer(source)
            if found != plain:
                raise RuntimeError("guesses have changed the answer")
            gains.append(fast / speed)
        return [speed, median(made) * speed, *gains]

    def passes(self, lengths: Sequence[int]) -> list[float]:
        """The time of passes of so many tokens, all guesses but the first, in passes of one token."""
        from qwen3 import NextTokens, compute
        self.read_prompt([*range(16)])

        def taken(n: int) -> float:
            spent = seconds(lambda: compute(self.model, [NextTokens(self.cache, np.arange(n), n, n - 1)]))
            self.truncate(self.cache.length - n + 1)  # all of them are wrong
            return spent

        taken(max(lengths))
        return [median(taken(n) / taken(1) for _ in range(9)) for n in lengths]


# ---- Pictures --------------------------------------------------------------------------------------------------------

TOWER = {"depth": 12, "hidden_size": 768, "intermediate_size": 3072, "num_heads": 12, "out_hidden_size": 1024,
         "patch_size": 16, "temporal_patch_size": 2, "num_position_embeddings": 2304, "deepstack_visual_indexes": []}


def vision(bench: Bench, size: Sequence[int] = (640, 480)) -> list[str]:
    """Each round times one product of the tower's MLP, as NumPy's BLAS computes it, and the tower, ours and
    transformers', on the same weights. The best round counts.
    """
    from make_random_model import random_tensor, tower_shapes
    from qwen3_vision import VisionConfig, tower
    rng, config = np.random.default_rng(0), VisionConfig(TOWER["depth"], TOWER["num_heads"])
    weights = {name.removeprefix("model.visual."): random_tensor(rng, shape, "float32").reshape(shape[0], -1).squeeze()
               for name, shape in tower_shapes(TOWER).items()}
    pixels = rng.integers(0, 256, (*size[::-1], 3), np.uint8)
    n, d, fc1 = size[0] * size[1] // 256, TOWER["hidden_size"], weights["blocks.0.mlp.linear_fc1.weight"]
    x = rng.standard_normal((n, d), np.float32)
    whole = 4 * TOWER["depth"] * n * n * d + 2 * n * sum(
        w.size / (4 if "merger" in name else 1)  # of a quarter of the rows
        for name, w in weights.items() if w.ndim == 2 and name != "pos_embed.weight")
    jobs: dict[str, tuple[float, Callable]] = {"sgemm": (2 * n * fc1.size, lambda: x @ fc1.T),
                                               "tower": (whole, lambda: tower(pixels, weights, config)[0])}
    try:
        jobs["transformers"] = whole, their_tower(weights, pixels, bench.args.threads)
    except ImportError as error:
        bench.notes.append(f"transformers is left out: {error}")
    with threadpool_limits(bench.args.threads):
        rounds = [{name: seconds(job) for name, (_, job) in jobs.items()} for _ in range(bench.args.rounds)]
    best = {name: min(taken[name] for taken in rounds) for name in jobs}
    speeds = {name: work / best[name] / 1e9 for name, (work, _) in jobs.items()}
    return [f"A picture of {size[0]} x {size[1]} pixels:", "", *table(["", "seconds", "GFLOP/s", "/ sgemm"], *(
        [name, f"{best[name]:.3f}", f"{speeds[name]:.0f}", f"{speeds[name] / speeds['sgemm']:.2f}"] for name in jobs))]


def their_tower(weights: dict[str, np.ndarray], pixels: np.ndarray, threads: int) -> Callable[[], np.ndarray]:
    import torch
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionConfig, Qwen3_5VisionModel
    from qwen3_vision import VisionConfig, patches_of
    torch.set_num_threads(threads)
    model = Qwen3_5VisionModel(Qwen3_5VisionConfig(**TOWER)).eval()
    model.load_state_dict({name: torch.tensor(weights[name]).reshape(old.shape)
                           for name, old in model.state_dict().items()})
    patches = torch.tensor(patches_of(pixels, VisionConfig()))
    grid = torch.tensor([[1, pixels.shape[0] // 16, pixels.shape[1] // 16]])
    return torch.inference_mode()(lambda: model(patches, grid).pooler_output.numpy())


# ---- Speech ----------------------------------------------------------------------------------------------------------

PARTS = ("log-mel", "tower", "prompt", "answer")
AUDIO = {"d_model": 896, "encoder_layers": 18, "encoder_attention_heads": 14, "encoder_ffn_dim": 3584,
         "output_dim": 1024, "downsample_hidden_size": 480}
PLACES = 25 * 32  # of the second convolution, for a second of sound


def hearing_model(path: Path) -> Path:
    """A folder in transformers' layout, with random weights in the shape of Qwen3-ASR-0.6B."""
    from configs import asr_config
    from make_random_model import make_random_model, official_config
    config = asr_config("0.6B", native=True)
    return make_random_model(config | {"audio_config": config["audio_config"] | AUDIO,
                                       "text_config": official_config("0.6B")}, path, tokenizer=ROOT / "demo")


def speech(bench: Bench, length: int = 30, tokens: int = 100) -> list[str]:
    """A sound of noise, and an answer of so many tokens. The real-time factor is the seconds of all parts, divided by
    those of the sound. Our tower is NumPy's; its convolutions also stand beside the speed of one plain product of their
    size.
    """
    bench.model(hearing_model)
    for name in bench.names(("bf16-rounded", "int8", "torch", "torch-bf16")):
        bench.open(name, open_ear)
    bench.each("parts", parts_seconds, 16_000 * length, tokens)
    rows = {name: np.median(bench.values[name, "parts"], axis=0) for name in bench.workers}
    ours = [name for name in bench.workers if not name.startswith("torch")]
    shares = [bench.workers[name](OurEar.convolutions) for name in ours]
    steps = [(name, bench.workers[name](OurEar.live_steps)) for name in ours]
    return [f"{length} s of sound, {tokens} tokens:", "",
            *engines_table([*(f"{part}, s" for part in PARTS), "real-time factor"], {
                name: [f"{value:.2f}" for value in row] + [f"{row.sum() / length:.3f}"]
                for name, row in rows.items()}), "",
            f"Our convolutions run at {max(shares, default=NAN):.2f} of the speed of a plain product.", "",
            *(f"A step of --live, {name}: {np.median(times):.2f} s, the longest {max(times):.2f} s." for name, times in
              steps)]


def open_ear(name: str, path: Path, _: Path, threads: int, repack: bool) -> "OurEar | TheirEar":
    return (TheirEar if name.startswith("torch") else OurEar)(path, threads, name)


def parts_seconds(engine: "OurEar | TheirEar", n_samples: int, n_tokens: int) -> list[float]:
    """The seconds of each of PARTS."""
    samples = 0.1 * np.random.default_rng(0).standard_normal(n_samples, np.float32)
    times = [time.perf_counter()]
    for _ in engine.parts(samples, n_tokens):
        times.append(time.perf_counter())
    return np.diff(times).tolist()


class OurEar:
    def __init__(self, path: Path, threads: int, name: str):
        import qwen3_numba
        self.model = qwen3_numba.load_model(path, "int8" if name == "int8" else None, threads)
        self.heard: Any = self.model.media
        _ = self.heard.weights  # read before the clock starts

    def parts(self, samples: np.ndarray, n_tokens: int) -> Iterator[None]:
        """Does each of PARTS."""
        import qwen3
        import qwen3_asr
        from qwen3_lib.io.cores import in_threads
        model, cache = self.model, self.model.engine.new_cache(self.model.config)
        self.forget()
        qwen3_asr.log_mel(samples)
        yield
        sound = self.heard.hear(samples, in_threads)  # makes the log-mel again
        yield
        qwen3.forward(model, [*range(1, 10), *sound.ids.tolist(), *range(10, 16)], cache)
        yield
        for i in range(n_tokens):
            qwen3.forward(model, [i], cache)
        yield

    def forget(self) -> None:
        """Forgets the windows and chunks of an earlier round."""
        self.heard.known.clear()
        vars(self.heard).pop("embed", None)

    def live_steps(self) -> list[float]:
        """The seconds of each step of --live in a part of 24 s, or of what fits into the context, with 3.5 tokens of
        text a second."""
        from qwen3_lib.generation.completion import Completion
        from qwen3_lib.io.cores import in_threads
        samples = 0.1 * np.random.default_rng(0).standard_normal(16_000 * 24, np.float32)
        samples[0], cache, times = 1, self.model.engine.new_cache(self.model.config), list[float]()  # the loudest
        self.forget()
        for end in range(2, min(24, (self.model.config.context_length - 40) // 17) + 1, 2):
            began, settled = time.perf_counter(), max(0, int(3.5 * (end - 2)) - 5)
            sound = self.heard.hear(samples[:16_000 * end], in_threads)
            ids = [*range(1, 10), *sound.ids.tolist(), *range(10, 16 + settled)]
            Completion(self.model, ids, cache, max_new_tokens=12, temperature=0, eos_token_ids=()).finish()
            times.append(time.perf_counter() - began)
        return times

    def convolutions(self) -> float:
        """Their operations per second, as a part of those of a plain product."""
        import qwen3_asr
        rng, w = np.random.default_rng(0), self.heard.weights
        outputs, inputs = w["conv2d2.weight"].shape
        x, mel = (rng.standard_normal(shape, np.float32) for shape in ((PLACES, inputs), (100, 128)))
        with threadpool_limits(1):  # each core has a window
            plain, ours = (min(seconds(work) for _ in range(9)) for work in (
                lambda: x @ w["conv2d2.weight"].T, lambda: qwen3_asr.embed_chunk(mel, w)))
        return (50 * 64 * 9 + PLACES * inputs + 13 * 16 * inputs) / ours / (PLACES * inputs / plain)


class TheirEar:
    def __init__(self, path: Path, threads: int, name: str):
        kind = "bfloat16" if name == "torch-bf16" else "float32"
        self.tensor, self.model = torch_model(path, threads, "Qwen3ASRForConditionalGeneration", kind)

    def parts(self, samples: np.ndarray, n_tokens: int) -> Iterator[None]:
        from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor
        import torch
        model, text, cache = self.model, self.model.model.language_model, None
        mel = Qwen3ASRFeatureExtractor()(samples, sampling_rate=16_000, return_attention_mask=True)
        yield
        heard = model.get_audio_features(mel["input_features"].to(model.dtype), mel["attention_mask"]).pooler_output
        yield
        words = text.embed_tokens(torch.arange(1, 16))
        inputs = [torch.cat([words[:9], heard.reshape(-1, words.shape[-1]), words[9:]])[None]]
        inputs += [text.embed_tokens(torch.tensor([[i]])) for i in range(n_tokens)]
        for i, x in enumerate(inputs):
            out = text(inputs_embeds=x, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            model.lm_head(out.last_hidden_state[:, -1:])
            if i in (0, n_tokens):
                yield


# ---- A voice ---------------------------------------------------------------------------------------------------------

def talking_model(path: Path) -> Path:
    """A folder with random weights in the shape of Qwen3-TTS-12Hz-0.6B-CustomVoice."""
    from talking import make_talking, published
    return make_talking(path, *published("0.6B"), dtype="bfloat16")


def talk(bench: Bench, length: int = 4) -> list[str]:
    """A text that is spoken for so many seconds. The real-time factor is the time until the last sample, divided by the
    seconds of the sound. Qwen's package gives all samples at the end.
    """
    bench.model(talking_model)
    for name in bench.names(("bf16-rounded", "int8", "torch", "torch-bf16")):
        bench.open(name, open_voice)
    bench.each("sound", "speak", length)
    rows = {name: np.median(bench.values[name, "sound"], axis=0) for name in bench.workers}
    return [f"{length} s of sound; torch runs Qwen's own package:", "",
            *engines_table(["first samples, s", "real-time factor"],
                           {name: [f"{value:.2f}" for value in row] for name, row in rows.items()})]


def open_voice(name: str, path: Path, _: Path, threads: int, repack: bool) -> "OurVoice | TheirVoice":
    return (TheirVoice if name.startswith("torch") else OurVoice)(path, threads, name)


class OurVoice:
    def __init__(self, path: Path, threads: int, name: str):
        import qwen3_numba
        self.model = qwen3_numba.load_model(path, threads=threads, activations=None if name == "int8" else "bf16")

    def speak(self, length: float) -> tuple[float, float]:
        """(seconds until the first samples, real-time factor)"""
        import qwen3_tts
        start = time.perf_counter()
        speech = qwen3_tts.speak(self.model, "Good morning, how are you today?", seed=1, max_seconds=length)
        next(speech)
        first = time.perf_counter() - start
        return first, (first + seconds(lambda: speech.samples)) * speech.rate / len(speech.samples)


class TheirVoice:
    def __init__(self, path: Path, threads: int, name: str):
        # A part of the package for models that were never published; it needs packages of its own.
        sys.modules["qwen_tts.core.tokenizer_25hz.vq.speech_vq"] = unused = ModuleType("speech_vq")
        vars(unused).update(WhisperEncoderVQ=None, XVectorExtractor=None)
        try:
            from qwen_tts.core.models import configuration_qwen3_tts as configs, modeling_qwen3_tts as models
            from qwen_tts.core.tokenizer_12hz import (
                configuration_qwen3_tts_tokenizer_v2 as codec_configs, modeling_qwen3_tts_tokenizer_v2 as codecs)
        except ImportError as error:
            raise RuntimeError(f"qwen-tts-hf isn't installed: {error}") from error
        import torch
        from safetensors.torch import load_file
        torch.set_grad_enabled(False)
        torch.set_num_threads(threads)
        inner, self.ids = path / "speech_tokenizer", torch.arange(100, 116)[None]
        config = configs.Qwen3TTSConfig(**json.loads((path / "config.json").read_text()))
        for each in (config, config.talker_config, config.talker_config.code_predictor_config):
            each._attn_implementation = "sdpa"
        about = json.loads((inner / "config.json").read_text())["decoder_config"]
        about = codec_configs.Qwen3TTSTokenizerV2DecoderConfig(**about, attn_implementation="sdpa")
        dtype = torch.bfloat16 if name == "torch-bf16" else torch.float32
        self.model = models.Qwen3TTSForConditionalGeneration(config).to(dtype).eval()
        self.codec = codecs.Qwen3TTSTokenizerV2Decoder(about).to(dtype).eval()
        self.model.load_state_dict(load_file(path / "model.safetensors"), strict=False)
        self.codec.load_state_dict({name.removeprefix("decoder."): tensor for name, tensor in load_file(
            inner / "model.safetensors").items()}, strict=False)

    def speak(self, length: float) -> tuple[float, float]:
        start = time.perf_counter()
        [codes], _ = self.model.generate([self.ids], None, None, None, ["auto"], ["serena"], True,
                                         max_new_tokens=round(length * 12.5) + 1)
        n = self.codec.chunked_decode(codes.T[None]).shape[-1]
        took = time.perf_counter() - start
        return took, took * 24_000 / n


# ---- The loss of quantization ----------------------------------------------------------------------------------------

LOSSY = [name for name, entry in ENTRIES.items()
         if entry.engine not in ("OpenVINO", "CTranslate2") and name not in ("numpy", "torch") and not entry.file]
FILES = ("llama-q8_0", "llama-q4_k_m", "llama-q5_k_m", "llama-q6_k")  # whose formats are compared
LONGEST = 1024  # tokens of a text


def quality(bench: Bench, tables: Sequence[str] = ("demo", "random", "files"), tokens: int = 4000,
            random_tokens: int = 64) -> list[str]:
    """The mean Kullback-Leibler divergence of the next token's distribution from that of qwen3.py in float32, and the
    relative error of the logits: of the bundled model, on conversations of demo/train/corpus.py; of the random one, on
    random tokens; of GGUF files in the fast engine, where the reference has the file's own numbers, so that only the
    engine's rounding counts.
    """
    lines = list[str]()

    def compare(title: str, names: Sequence[str], texts: Sequence[Sequence[int]], files: bool = False) -> None:
        bench.checked.clear()
        for name in bench.names(names):
            bench.open(name, open_pair, files, check=partial(errors, texts=texts))
            bench.close(*bench.workers)
        titles = [f"{title}, {sum(map(len, texts))} tokens", "format", "MB", "mean KL divergence",
                  "error of the logits, mean", "largest"]
        lines.extend(table(titles, *(
            ["this engine" if files else ENTRIES[name].engine, ENTRIES[name].format, f"{size:.1f}", *(
                f"{value:.2e}" for value in values)] for name, (size, *values) in bench.checked.items())) + [""])

    if "demo" in tables:
        folder, bench.path, bench.folder = bench.folder, ROOT / "demo", bench.folder / "demo"
        bench.folder.mkdir(exist_ok=True)
        compare("bundled model", LOSSY, conversations(tokens))
        bench.folder = folder
    vocab_size = bench.model().vocab_size
    texts = [np.random.default_rng(0).integers(0, min(4096, vocab_size), random_tokens).tolist()]
    if "random" in tables:
        compare("random 0.6B", LOSSY, texts)
    if "files" in tables:
        compare("GGUF, random 0.6B", FILES, texts, True)
    return lines


def open_pair(name: str, path: Path, folder: Path, threads: int, files: bool, repack: bool) -> tuple[Any, Any]:
    """(the engine of an entry, or the fast engine with the GGUF file of an entry; its reference)."""
    file = peer_file(path, folder, name) if files else path
    return NumbaEngine(file, None, threads, LONGEST) if files else \
        open_engine(name, path, folder, threads, LONGEST, repack=False), NumpyEngine(file, LONGEST)


def errors(pair: tuple[Any, Any], texts: Sequence[Sequence[int]]) -> list[float]:
    """[MB of weights, mean KL divergence, mean error of the logits, largest]: from the reference's."""
    from qwen3_lib.generation.processors import log_softmax
    divergences, relative = list[float](), list[float]()
    for ids in texts:
        for engine in pair:
            engine.truncate(0)
        found, reference = (engine.run(ids, True).copy() for engine in pair)
        for p, q in zip(reference, found):
            log_p, log_q = (log_softmax(x.astype(np.float64)) for x in (p, q))
            divergences.append(float(np.exp(log_p) @ (log_p - log_q)))
        relative += (np.linalg.norm(found - reference, axis=1) / np.linalg.norm(reference, axis=1)).tolist()
    return [pair[0].weight_bytes / 1e6, float(np.mean(divergences)), float(np.mean(relative)), max(relative)]


def conversations(tokens: int) -> list[list[int]]:
    """Token ids of conversations, in all at least this number of tokens."""
    sys.path.append(str(ROOT / "demo/train"))
    import corpus
    import qwen3
    tokenizer, rng, texts = qwen3.load_tokenizer(ROOT / "demo"), random.Random(0), list[list[int]]()
    while sum(map(len, texts)) < tokens:
        drawn = corpus.conversation(rng)
        if not drawn.raw:
            text = tokenizer.apply_chat_template(drawn.messages, drawn.tools, add_generation_prompt=False)
            texts.append(tokenizer.encode(text)[:LONGEST])
    return texts
