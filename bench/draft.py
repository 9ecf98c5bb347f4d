"""How much drafts save: decoding with and without them, interleaved, on random weights.

    python bench/draft.py                  an int4 draft of Qwen3-0.6B's shape; 6 GB of memory
    python bench/draft.py --mtp            the MTP head in Qwen3.5-0.8B's shape; 6 GB

A random model's draft makes its guesses, which take their time; then each becomes the very token of the plain answer
with a probability of 50, 75, 90 and 95 %, or another one. All answers are compared: with a draft, the tokens are the
same.
"""
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import harness
from harness import table

TOKENS = 96  # of an answer
SHARES = (0.5, 0.75, 0.9, 0.95)


def agreeing(kind: type, share: float, models: tuple[Any, ...], answer: list[int]) -> Any:
    """A proposer of this kind, whose guesses are then right with this probability."""
    rng = np.random.default_rng(0)

    class Agreeing(kind):
        def guess(self, sequence: Any, cache: Any, n: int) -> list[int]:
            made, at = super().guess(sequence, cache, n), len(sequence.token_ids)
            return [token if rng.random() < share else token ^ 1 for token in answer[at:at + len(made)]]

    return Agreeing(*models)


def compare(name: str, model: Any, prompts: list[Any], off: Any, on: dict[str, Any]) -> list[list[str]]:
    """Rows: the speed of answers to these prompts with each draft beside draft=off; the first prompt warms up.

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
            guesses, source = done.speculator, done.speculator.sources[-1]
            right, guessed, *_ = notes.get(each, [0, 0])
            notes[each] = [right + guesses.accepted, guessed + guesses.guessed, source.make / guesses.plain,
                           source.check / guesses.plain]
    return [[name, each, f"{median(plain[1:]):.1f}", f"{median(gains[each][1:]):.2f}", f"{right} of {guessed}",
             f"{make:.1%}", f"{check:.1%}"] for each, (right, guessed, make, check) in notes.items()]


def main() -> None:
    parser = harness.options(__doc__, 5, "random weights; with --mtp, FOLDER has a Qwen3.5 with an MTP head")
    parser.add_argument("--mtp", action="store_true")
    args = harness.parsed(parser)
    import qwen3_numba
    from hybrid import make_model
    from qwen3_lib.generation.guesses import MTP, Draft
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        make = partial(make_model, mtp_num_hidden_layers=1) if args.mtp else harness.random_model
        path = args.model or make(Path(folder))
        small = None if args.mtp else qwen3_numba.load_model(path, "int4", args.threads)
        for form in ("bf16", "int8", "int4")[:3 if args.mtp else 2]:
            model = qwen3_numba.load_model(path, None if form == "bf16" else form, args.threads)
            prompts: list[Any] = [np.random.default_rng(i).integers(0, model.config.vocab_size, 16)
                                  for i in range(args.rounds + 1)]
            kind, models = (MTP, (model,)) if args.mtp else (Draft, (small, model))
            drafts: dict[str, Any] = {f"right in {share:.0%}": partial(agreeing, kind, share, models)
                                      for share in SHARES}
            rows += compare(form, model, prompts, "off" if args.mtp else None, drafts)
    print(*table(["format", "draft", "tokens/s without", "times as fast with it", "right", "to make a guess, of a pass",
                  "to check it"], *rows), sep="\n")


if __name__ == "__main__":
    main()
