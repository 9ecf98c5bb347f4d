"""Does the fast engine find the fastest way of each product, and what does the search cost? On random weights.

    python bench/ways.py                       Qwen3-0.6B in bf16, int8 and int4: about 8 minutes
    python bench/ways.py --formats int8 --rounds 1

For each format: decoding and a prompt of 512 tokens by each way by hand, in turns, the median of the rounds; the way
that the engine chooses by itself; its speed over the first 200 tokens while nothing is known yet, beside the next 200.
"""
import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from make_random_model import make_random_model, official_config  # noqa: E402

PROMPT, TOKENS = 512, 200


def decode_speed(model: Any, n: int) -> float:
    """Tokens per second of n single tokens in an empty cache."""
    import qwen3_numba
    cache = model.engine.new_cache(model.config)
    start = time.perf_counter()
    for i in range(n):
        qwen3_numba.forward(model, [i], cache)
    return n / (time.perf_counter() - start)


def prompt_speed(model: Any, n: int) -> float:
    """Tokens per second of a prompt of n tokens."""
    import qwen3_numba
    cache, start = model.engine.new_cache(model.config), time.perf_counter()
    qwen3_numba.forward(model, range(n), cache)
    return n / (time.perf_counter() - start)


@contextmanager
def known(found: dict[tuple[int, int], Any]) -> Iterator[None]:
    """The engine knows these choices and no others."""
    from qwen3_lib.kernels import products
    before = dict(products.choices())
    products.choices().update({key: products.Choice([[] for _ in c.seen]) for key, c in before.items()} | found)
    yield
    products.choices().update(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="0.6B")
    parser.add_argument("--formats", nargs="+", default=["bf16", "int8", "int4"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NUMBA_CACHE_DIR"] = f"{folder}/code"  # nothing is known, and nothing is kept
        import qwen3_numba
        from qwen3_lib.kernels.products import ENOUGH, Choice, choices
        from qwen3_lib.kernels.vectors import MANY, ONE, ways
        path = make_random_model(official_config(args.model), Path(folder) / "model")
        for name in args.formats:
            model = qwen3_numba.load_model(path, None if name == "bf16" else name, args.threads, tokenizer=False)
            form, learning, later, learned = model.weights.formats[0], [], [], {ONE: set(), MANY: set()}
            decode_speed(model, 20), prompt_speed(model, PROMPT)  # compiles
            for _ in range(args.rounds):
                with known({}):
                    learning.append(decode_speed(model, TOKENS))
                    later.append(decode_speed(model, TOKENS))
                    prompt_speed(model, 4 * PROMPT)
                    for count in (ONE, MANY):
                        learned[count].add(choices()[form, count].best)
            print(f"{name}: {TOKENS} tokens from nothing known {median(learning):.1f} tokens/s, the next {TOKENS} "
                  f"{median(later):.1f}: {median(a / b for a, b in zip(learning, later)):.3f}", flush=True)
            for count, speed, n in ((ONE, decode_speed, 40), (MANY, prompt_speed, PROMPT)):
                by_hand: dict[int, list[float]] = {i: [] for i in range(len(ways(form, count)))}
                for _ in range(args.rounds + 1):
                    for i in by_hand:
                        with known({key: Choice(c.seen, ENOUGH, i * (key == (form, count)), -10**9)
                                    for key, c in choices().items()}):
                            by_hand[i].append(speed(model, n))
                for i, speeds in by_hand.items():
                    mark = f"  <- chosen" if learned[count] == {i} else \
                        "  <- chosen at times" if i in learned[count] else ""
                    what = "decode" if count == ONE else "prompt"
                    print(f"  {what} {ways(form, count)[i]}: {median(speeds[1:]):.1f} tokens/s{mark}", flush=True)


if __name__ == "__main__":
    main()
