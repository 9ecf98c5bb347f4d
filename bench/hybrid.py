"""Tokens per second of Qwen3.5-0.8B, by this engine and by llama.cpp, in one run.

    python bench/hybrid.py           random weights; 12 GB of memory, 4 GB of disk, 20 minutes

A decoded token reads all matrices, the keys and values, and the states, which are written, too: all that counts as
bytes. The second turn comes after a first one of 8,000 tokens: this engine goes on from a kept state; llama.cpp, whose
state can't be cut back to the end of the question, reads all of it again. The text goes to bench/HYBRID.md.
"""
from pathlib import Path
from typing import Any

import numpy as np

import harness
from harness import ALL, PAIRS, Bench, engines_table, seconds
from peers import open_engine, read_bytes

PROMPT, SHORT, TURN, STEPS = 512, 16, 8000, 16  # tokens
END = 7  # the token at the end of a turn


def make_model(path: Path, **changes: Any) -> Path:
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


def decode_after(engine: Any, context: list[int]) -> float:
    """Tokens per second after a context, which is read first: a state can't be cut back."""
    engine.read_prompt(context)
    return engine.decode_speed(len(context), context[:STEPS])


def second_turn(engine: Any, first: list[int], question: list[int]) -> float:
    """Seconds until the first token of a second turn, whose prompt has not the thought of the first answer."""
    engine.read_prompt(first)
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
    with Bench(harness.parsed(harness.options(__doc__)), make_model) as bench:
        config, ids = bench.config, np.random.default_rng(0).integers(8, 4000, TURN + 100).tolist()
        for name in ALL:
            bench.open(name, open_engine, TURN + 100)
        bench.each("decode", decode_after, ids[:SHORT])
        bench.each("prefill", "prefill_speed", ids[:PROMPT])
        bench.each("second turn", second_turn, ids[:TURN - 1] + [END, 9], ids[100:140], rounds=1, warm=False,
                   names=bench.workers.keys() & {"int8", PAIRS["int8"]})
        titles = [f"decode at {SHORT}, tokens/s", "of the bandwidth", f"prefill {PROMPT}, tokens/s",
                  f"second turn after {TURN} tokens, s"]
        bench.publish("HYBRID.md", *engines_table(titles, {name: [
            f"{bench.median(name, 'decode'):.2f}",
            f"{bench.share(name, 'decode', step_bytes(config, name, SHORT)):.2f}",
            f"{bench.median(name, 'prefill'):.1f}", f"{bench.median(name, 'second turn'):.2f}"]
            for name in bench.workers}), "", *bench.ratios("decode", "prefill"))


if __name__ == "__main__":
    main()
