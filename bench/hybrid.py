"""Tokens per second of Qwen3.5-0.8B, by this engine and by llama.cpp, in one run.

    python bench/hybrid.py           random weights; 12 GB of memory, 4 GB of disk, 20 minutes
    python bench/hybrid.py --quick   a look: no long text

A decoded token reads all matrices, the keys and values, and the states, which are written, too: all that counts as
bytes. The second turn comes after a first one of 8,000 tokens: this engine goes on from a kept state; llama.cpp, whose
state can't be cut back to the end of the question, reads all of it again. The text goes to bench/HYBRID.md.
"""
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import harness
from harness import PAIRS, Bench, Reader, alone, publish, seconds, table
from peers import (ENTRIES, layer_matrices, matrices_of, open_engine, prefill_speed, read_bytes,
                   read_prompt)

PROMPT, SHORT, LONG, TURN, STEPS = 512, 16, 32768, 8000, 24  # tokens
KV_DTYPES = ("f16", "int8")
END = 7  # the token at the end of a turn


def config_of_0_8b() -> dict[str, Any]:
    """config.json of Qwen3.5-0.8B."""
    from configs import HYBRID
    return HYBRID | {
        "head_dim": 256, "hidden_size": 1024, "intermediate_size": 3584, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 16, "linear_value_head_dim": 128,
        "max_position_embeddings": 262144, "num_attention_heads": 8, "num_hidden_layers": 24, "num_key_value_heads": 2,
        "vocab_size": 248320, "torch_dtype": "bfloat16",
        "rope_parameters": HYBRID["rope_parameters"] | {"mrope_section": [11, 11, 10]}}


def make_model(path: Path, **changes: Any) -> Path:
    from make_random_model import make_random_model
    make_random_model(config_of_0_8b() | changes, path)
    (path / "generation_config.json").write_text(f'{{"eos_token_id": {END}}}')
    return path


def repeat_keys(engine: Any, context: list[int]) -> None:
    """Goes on with the keys and values of the tokens in the cache, again and again: to compute them takes minutes."""
    cache = engine.cache
    places, filled = cache.reserve(len(context) - cache.length), cache.length
    for rows in (cache.k, cache.v):
        rows[:, :, places] = rows[:, :, places % filled]
    cache.new = dict(cache.snapshots[-1].states)
    cache.advance(np.array(context[filled:]))


def next_tokens(engine: Any, context: list[int]) -> float:
    """Tokens per second from here on."""
    return 1 / median(seconds(lambda: engine.run([token])) for token in context[:STEPS])


def decode_after(engine: Any, context: list[int]) -> float:
    """Tokens per second after a context, which is read first: a state can't be cut back."""
    read_prompt(engine, context)
    return next_tokens(engine, context)


def long_decode(engine: Any, short: list[int], long: list[int], kv_dtype: str) -> float:
    """The speed after a long context / that after a short one, with this cache."""
    from qwen3_numba import HYBRID_CACHES
    engine.model = replace(engine.model, engine=replace(engine.model.engine, new_cache=HYBRID_CACHES[kv_dtype]))
    engine.cache = HYBRID_CACHES[kv_dtype](engine.model.config, len(long) + 2 * STEPS)
    before = decode_after(engine, short)
    read_prompt(engine, short)
    repeat_keys(engine, long)
    return next_tokens(engine, long) / before


def second_turn(engine: Any, first: list[int], question: list[int]) -> float:
    """Seconds until the first token of a second turn, whose prompt has not the thought of the first answer."""
    read_prompt(engine, first)
    for token in question[::-1]:  # as many tokens of a thought, which the next prompt leaves out
        engine.run([token])
    prompt = first + question
    start = engine.cache.common_prefix(np.array(prompt)) if hasattr(engine, "cache") else 0
    engine.truncate(start)
    return seconds(lambda: [engine.run(prompt[at:at + engine.STEP]) for at in range(start, len(prompt), engine.STEP)])


def step_bytes(config: Any, name: str, context: int) -> float:
    """Bytes that a decoded token reads and writes."""
    state = len(config.linear_layers) * config.linear_num_value_heads * config.linear_key_head_dim * \
        config.linear_value_head_dim * 4
    return read_bytes(config, name, context) + 2 * state


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--quick", action="store_true", help="no long text")
    args = harness.parsed(parser)
    from qwen3_lib.io.models import source_of
    with tempfile.TemporaryDirectory() as temporary:
        folder, bench = Path(temporary), Bench(args)
        path = args.model or alone(make_model, folder / "model")
        config, ids = source_of(path).config(), np.random.default_rng(0).integers(8, 4000, LONG).tolist()
        for name in (name for pair in PAIRS.items() for name in pair):
            bench.open(name, path, folder, open_engine, LONG + 2 * STEPS)
        bench.each("decode", decode_after, ids[:SHORT])
        bench.each("prefill", prefill_speed, ids[:PROMPT])
        rate = bench.reader(Reader.sgemm, layer_matrices(config))
        if not args.quick:
            bench.each("second turn", second_turn, ids[:TURN - 1] + [END, 9], ids[100:140], rounds=1, warm=False,
                       names=bench.workers.keys() & {"int8", PAIRS["int8"]})
            for kv in KV_DTYPES:
                bench.each(kv, long_decode, ids[:SHORT], ids, kv, names=bench.workers.keys() & PAIRS.keys())
        names = [*bench.workers]
        bench.close()
    layers = [shape for name, shape in matrices_of(config).items() if ".layers." in name]
    limit = rate / (2 * sum(rows * columns for rows, columns in layers))
    publish(args.out / "HYBRID.md", args.threads, [
        *table(["engine", "format", f"decode at {SHORT}, tokens/s", "of the bandwidth", f"prefill {PROMPT}, tokens/s",
                f"second turn after {TURN} tokens, s",
                *(f"decode at {LONG} / at {SHORT}, {kv} cache" for kv in KV_DTYPES)],
               *([ENTRIES[name].engine, ENTRIES[name].format, f"{bench.median(name, 'decode'):.2f}",
                  f"{bench.share(name, 'decode', step_bytes(config, name, SHORT)):.2f}",
                  f"{bench.median(name, 'prefill'):.1f}", f"{bench.median(name, 'second turn'):.2f}",
                  *(f"{bench.median(name, kv):.2f}" for kv in KV_DTYPES)] for name in names)), "",
        *bench.ratios("decode", "prefill"), "",
        f"bf16: prefill {bench.median('bf16', 'prefill') / limit:.2f} of float32's limit (sgemm)."], bench.notes)


if __name__ == "__main__":
    main()
