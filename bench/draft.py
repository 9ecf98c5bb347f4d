"""How much drafts save: decoding with and without them, interleaved, on random weights like a trained model's.

    python bench/draft.py                  an int4 draft of Qwen3-0.6B's shape; about 6 minutes, 6 GB of memory
    python bench/draft.py --agreement 0.9  a model whose int4 form errs more often
    python bench/draft.py --mtp            the MTP head in Qwen3.5-0.8B's shape, right in 50, 75, 90 %; 6 minutes, 6 GB
    python bench/draft.py --mtp --model Qwen3.5-0.8B    the head of a model's folder, on its answers to some prompts

In a random model the logits of most tokens are nearly equal, so its int4 form would often choose another token; a
trained model is more certain. So the matrices that add to the residual stream, o_proj and down_proj, are scaled by a
factor that is searched for: with a smaller one, a token's own embedding decides more, and int4 chooses as bf16 does
more often. The factor is found when int4 agrees with bf16 in the wanted share of 512 greedy tokens. A random MTP head
makes its guesses, which take their time; then each becomes the very token of the plain answer with the wanted
probability, or another one. All answers are compared: with a draft, the tokens are the same.
"""
import argparse
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]

from make_random_model import make_random_model, official_config  # noqa: E402

TOKENS = 96  # of an answer
PROMPTS = ("Tell me a story about a fox.", "What is the capital of France?", "Write a function that sorts a list.")


def agreement(large: Any, small: Any) -> float:
    """The share of 512 random positions whose most likely next token is the same."""
    import qwen3_numba
    ids = np.random.default_rng(1).integers(0, large.config.vocab_size, 512)
    best = [np.concatenate([qwen3_numba.forward(model, ids[i:i + 64], cache, True).argmax(axis=-1)
                            for i in range(0, len(ids), 64)])
            for model in (large, small) for cache in [model.engine.new_cache(model.config)]]
    return float((best[0] == best[1]).mean())


def compare(name: str, model: Any, prompts: list[Any], off: Any, on: dict[str, Any]) -> None:
    """Prints the speed of answers to these prompts with draft=off and with each of the others; the first one warms up.

    on: name -> a draft, or a function that makes one of the plain answer's tokens.
    """
    from qwen3_lib.generation.completion import Completion

    def answer(prompt: Any, draft: Any) -> Any:
        return Completion(model, prompt, draft=draft, max_new_tokens=TOKENS, temperature=0.0, eos_token_ids=()).finish()

    def speed(done: Any) -> float:
        return float((TOKENS - 1) / (done.times[-1] - done.times[1]))

    plain, gains, notes = list[float](), {draft: list[float]() for draft in on}, dict[str, list[float]]()
    for i, prompt in enumerate(prompts):
        without = answer(prompt, off)
        plain.append(speed(without))
        for each, draft in on.items():
            done = answer(prompt, draft(without.token_ids) if callable(draft) else draft)
            if done.token_ids != without.token_ids:
                sys.exit(f"{name}: the draft has changed the answer")
            gains[each].append(speed(done) / plain[-1])
            guesses = done.speculator
            source, pass_ = guesses.sources[-1], guesses.plain
            right, guessed, *_ = notes.get(each, [0, 0])
            notes[each] = [right + guesses.accepted, guessed + guesses.guessed, source.make / pass_,
                           source.check / pass_]
    for each, (right, guessed, make, check) in notes.items():
        print(f"{name}, {each}: {median(gains[each][1:]):.2f} times as fast as the {median(plain[1:]):.1f} tokens/s "
              f"without a draft; {right} of {guessed} guesses right; a guess takes {make:.1%} of a pass to make, "
              f"{check:.1%} to check", flush=True)


def int4_drafts(args: argparse.Namespace, folder: Path) -> None:
    import qwen3_numba
    low, high = 0.0, 0.5
    for _ in range(7):
        factor = (low + high) / 2
        path = make_random_model(official_config("0.6B"), folder / f"{factor}",
                                 scales={"o_proj": factor, "down_proj": factor})
        large, small = (qwen3_numba.load_model(path, form, args.threads) for form in (None, "int4"))
        share = agreement(large, small)
        print(f"o_proj and down_proj x {factor:.4f}: int4 agrees with bf16 in {share:.1%}", flush=True)
        if abs(share - (args.agreement or 0.95)) < 0.01:
            break
        low, high = (factor, high) if share > (args.agreement or 0.95) else (low, factor)
    models = {"bf16": large, "int8": qwen3_numba.load_model(path, "int8", args.threads)}
    for name, model in models.items():
        prompts = [np.random.default_rng(i).integers(0, model.config.vocab_size, 16) for i in range(args.rounds + 1)]
        compare(name, model, prompts, None, {"int4": small})


def mtp_drafts(args: argparse.Namespace, folder: Path) -> None:
    import qwen3_numba
    from hybrid import CONFIG
    from qwen3_lib.generation.guesses import MTP

    class Agreeing(MTP):
        """The model's own head, whose guesses are then right with this probability."""

        def __init__(self, model: Any, share: float, answer: list[int]):
            super().__init__(model)
            self.share, self.answer, self.rng = share, answer, np.random.default_rng(0)

        def guess(self, sequence: Any, cache: Any, n: int) -> list[int]:
            made, at = super().guess(sequence, cache, n), len(sequence.token_ids)
            return [token if self.rng.random() < self.share else token ^ 1
                    for token in self.answer[at:at + len(made)]]

    path = make_random_model(CONFIG | {"mtp_num_hidden_layers": 1}, folder)
    shares = (0.5, 0.75, 0.9) if args.agreement is None else (args.agreement,)
    for form in (None, "int8", "int4"):
        model = qwen3_numba.load_model(path, form, args.threads)
        prompts = [np.random.default_rng(i).integers(0, model.config.vocab_size, 16) for i in range(args.rounds + 1)]
        compare(form or "bf16", model, prompts, "off", {"never right": "auto"} | {
            f"right in {share:.0%}": partial(Agreeing, model, share) for share in shares})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agreement", type=float)
    parser.add_argument("--mtp", action="store_true")
    parser.add_argument("--model", metavar="FOLDER", help="with --mtp: a Qwen3.5 with an MTP head")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    os.environ["OPENBLAS_NUM_THREADS"] = str(args.threads)
    import qwen3_numba
    if args.model:
        for form in (None, "int8", "int4"):
            model = qwen3_numba.load_model(args.model, form, args.threads)
            texts = (PROMPTS * args.rounds)[:args.rounds + 1]
            asked = [model.tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in texts]
            prompts = [model.tokenizer.encode(text, add_special_tokens=False) for text in asked]
            compare(form or "bf16", model, prompts, "off", {"MTP head": "auto"})
        return
    with tempfile.TemporaryDirectory() as folder:
        (mtp_drafts if args.mtp else int4_drafts)(args, Path(folder))


if __name__ == "__main__":
    main()
