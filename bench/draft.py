"""How much a draft in int4 saves: decoding with and without it, interleaved, on random weights like a trained model's.

    python bench/draft.py                  about 6 minutes, 6 GB of memory
    python bench/draft.py --agreement 0.9  a model whose int4 form errs more often

Random weights in the exact shape of Qwen3-0.6B. In a random model the logits of most tokens are nearly equal, so its int4
form would often choose another token; a trained model is more certain. So the matrices that add to the residual stream,
o_proj and down_proj, are scaled by a factor that is searched for: with a smaller one, a token's own embedding decides
more, and int4 chooses as bf16 does more often. The factor is found when int4 agrees with bf16 in the wanted share of 512
greedy tokens. All answers are compared: with a draft, the tokens are the same.
"""
import argparse
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from make_random_model import make_random_model, official_config  # noqa: E402
from peers import learn  # noqa: E402

TOKENS = 96  # of an answer


def agreement(large: Any, small: Any) -> float:
    """The share of 512 random positions whose most likely next token is the same."""
    import qwen3_numba
    ids = np.random.default_rng(1).integers(0, large.config.vocab_size, 512)
    best = [np.concatenate([qwen3_numba.forward(model, ids[i:i + 64], cache, True).argmax(axis=-1)
                            for i in range(0, len(ids), 64)])
            for model in (large, small) for cache in [model.engine.new_cache(model.config)]]
    return float((best[0] == best[1]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agreement", type=float, default=0.95)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    os.environ["OPENBLAS_NUM_THREADS"] = str(args.threads)
    import qwen3_numba
    from qwen3_lib.generation.completion import Completion
    with tempfile.TemporaryDirectory() as folder:
        low, high = 0.0, 0.5
        for _ in range(7):
            factor = (low + high) / 2
            path = make_random_model(official_config("0.6B"), Path(folder) / f"{factor}",
                                     scales={"o_proj": factor, "down_proj": factor})
            large, small = (qwen3_numba.load_model(path, form, args.threads) for form in (None, "int4"))
            share = agreement(large, small)
            print(f"o_proj and down_proj x {factor:.4f}: int4 agrees with bf16 in {share:.1%}", flush=True)
            if abs(share - args.agreement) < 0.01:
                break
            low, high = (factor, high) if share > args.agreement else (low, factor)
        models = {"bf16": large, "int8": qwen3_numba.load_model(path, "int8", args.threads)}
        for model in (small, *models.values()):
            learn(model)
        for name, model in models.items():
            speeds: dict[bool, list[float]] = {False: [], True: []}
            right = guessed = 0
            for i in range(args.rounds + 1):  # the first one warms up
                prompt, tokens = np.random.default_rng(i).integers(0, model.config.vocab_size, 16), []
                for draft in (None, small):
                    answer = Completion(model, prompt, draft=draft, max_new_tokens=TOKENS, temperature=0.0,
                                        eos_token_ids=()).finish()
                    tokens.append(answer.token_ids)
                    if i:
                        speeds[draft is not None].append((TOKENS - 1) / (answer.times[-1] - answer.times[1]))
                right, guessed = right + answer.speculator.accepted, guessed + answer.speculator.guessed
                if tokens[0] != tokens[1]:
                    sys.exit(f"{name}: the draft has changed the answer")
            gain = median(with_ / without for without, with_ in zip(speeds[False], speeds[True]))
            print(f"{name}: {median(speeds[False]):.1f} tokens/s without a draft, {median(speeds[True]):.1f} with one in "
                  f"int4: {gain:.2f} times as fast; {right} of {guessed} guesses right", flush=True)


if __name__ == "__main__":
    main()
