"""How much drafts save: decoding with and without them, interleaved, on random weights like a trained model's.

    python bench/draft.py                  an int4 draft of Qwen3-0.6B's shape; about 6 minutes, 6 GB of memory
    python bench/draft.py --agreement 0.9  a model whose int4 form errs more often
    python bench/draft.py --mtp            the MTP head in Qwen3.5-0.8B's shape, right in 50, 75 and 90 %; 15 minutes, 6 GB
    python bench/draft.py --mtp --model Qwen3.5-0.8B    the head of a model's folder, on its answers to some prompts

In a random model the logits of most tokens are nearly equal, so its int4 form would often choose another token; a trained
model is more certain. So the matrices that add to the residual stream are scaled by a factor that is searched for: with a
smaller one, a token's own embedding decides more, and the draft chooses as the model does more often. The factor is found
when they agree in the wanted share of tokens. An MTP head is made to guess what follows a token's embedding alone. All
answers are compared: with a draft, the tokens are the same.
"""
import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "bench")]

from make_random_model import let_head_agree, make_random_model, official_config  # noqa: E402
from peers import learn  # noqa: E402

TOKENS = 96  # of an answer
ADDING = ("o_proj", "out_proj", "down_proj")  # the matrices that add to the residual stream
PROMPTS = ("Tell me a story about a fox.", "What is the capital of France?", "Write a function that sorts a list.")
COMMON = 24576  # tokens that are likely in the random Qwen3.5


def agreement(large: Any, small: Any) -> float:
    """The share of 512 random positions whose most likely next token is the same."""
    import qwen3_numba
    ids = np.random.default_rng(1).integers(0, large.config.vocab_size, 512)
    best = [np.concatenate([qwen3_numba.forward(model, ids[i:i + 64], cache, True).argmax(axis=-1)
                            for i in range(0, len(ids), 64)])
            for model in (large, small) for cache in [model.engine.new_cache(model.config)]]
    return float((best[0] == best[1]).mean())


def head_agreement(model: Any) -> float:
    """The share of 256 random positions where the MTP head guesses the model's most likely token."""
    import qwen3_numba
    from qwen3_5 import mtp_config
    ids, right = np.random.default_rng(1).integers(0, COMMON, 256), 0
    cache, head = model.engine.new_cache(model.config), model.engine.new_cache.plain(mtp_config(model.config))
    for i in range(0, len(ids), 64):
        best = qwen3_numba.forward(model, ids[i:i + 64], cache, True).argmax(axis=-1)
        for token, expected in zip(ids[i:i + 64], best):
            state = np.ones((1, model.config.hidden_size), np.float32)
            right += model.engine.guess(model, state, np.array([token]), head, 0)[1] == expected
    return right / len(ids)


def scale(file: Path, factor: float) -> None:
    """Multiplies the matrices that add to the residual stream."""
    start = 8 + int.from_bytes(file.open("rb").read(8), "little")
    for name, about in json.loads(file.open("rb").read(start)[8:]).items():
        if name.removesuffix(".weight").endswith(ADDING) and not name.startswith("mtp."):
            data = np.memmap(file, "<u2", "r+", start + about["data_offsets"][0], tuple(about["shape"]))
            data[:] = ((data.astype(np.uint32) << 16).view(np.float32) * np.float32(factor)).view(np.uint32) >> 16


def compare(name: str, model: Any, prompts: list[Any], off: Any, on: Any) -> None:
    """Prints the speed of answers to these prompts with draft=off and draft=on; the first one warms up."""
    from qwen3_lib.generation.completion import Completion
    speeds: dict[bool, list[float]] = {False: [], True: []}
    right = guessed = 0
    for i, prompt in enumerate(prompts):
        tokens = []
        for drafts in (False, True):
            answer = Completion(model, prompt, draft=on if drafts else off, max_new_tokens=TOKENS, temperature=0.0,
                                eos_token_ids=()).finish()
            tokens.append(answer.token_ids)
            if i:
                speeds[drafts].append((TOKENS - 1) / (answer.times[-1] - answer.times[1]))
        right, guessed = right + answer.speculator.accepted, guessed + answer.speculator.guessed
        if tokens[0] != tokens[1]:
            sys.exit(f"{name}: the draft has changed the answer")
    gain = median(with_ / without for without, with_ in zip(speeds[False], speeds[True]))
    source = answer.speculator.sources[-1]
    print(f"{name}: {median(speeds[False]):.1f} tokens/s without a draft, {median(speeds[True]):.1f} with one: {gain:.2f} "
          f"times as fast; {right} of {guessed} guesses right; a guess takes {source.make / answer.speculator.plain:.1%} "
          f"of a pass to make, {source.check / answer.speculator.plain:.1%} to check", flush=True)


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
    for model in (small, *models.values()):
        learn(model)
    for name, model in models.items():
        prompts = [np.random.default_rng(i).integers(0, model.config.vocab_size, 16) for i in range(args.rounds + 1)]
        compare(name, model, prompts, None, small)


def mtp_drafts(args: argparse.Namespace, folder: Path) -> None:
    import qwen3_numba
    from hybrid import CONFIG
    path = make_random_model(CONFIG | {"mtp_num_hidden_layers": 1}, folder,
                             scales=dict.fromkeys(ADDING, 0.25) | {"embed_tokens": 32})  # else layers hide the embedding
    let_head_agree(path, COMMON)
    factor = 0.25
    for wanted in (0.5, 0.75, 0.9) if args.agreement is None else (args.agreement,):
        low, high = 0.0, 1.0
        for _ in range(8):
            share = head_agreement(qwen3_numba.load_model(path, None, args.threads))
            print(f"o_proj, out_proj and down_proj x {factor:.4f}: the head agrees in {share:.1%}", flush=True)
            if abs(share - wanted) < 0.03:
                break
            low, high = (factor, high) if share > wanted else (low, factor)
            scale(path / "model.safetensors", (low + high) / 2 / factor)
            factor = (low + high) / 2
        for form in (None, "int8", "int4"):
            model = qwen3_numba.load_model(path, form, args.threads)
            prompts = [np.random.default_rng(i).integers(0, COMMON, 16) for i in range(args.rounds + 1)]
            compare(f"{form or 'bf16'}, {wanted:.0%}", model, prompts, "off", "auto")


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
            prompts = [model.tokenizer.encode(model.tokenizer.apply_chat_template([{"role": "user", "content": text}]), False)
                       for text in texts]
            compare(form or "bf16", model, prompts, "off", "auto")
        return
    with tempfile.TemporaryDirectory() as folder:
        (mtp_drafts if args.mtp else int4_drafts)(args, Path(folder))


if __name__ == "__main__":
    main()
