"""What the five trainings share: options, optimizers, the loop, how a folder is written and how answers are judged."""

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import load_file, save_file
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
HEAD = "lm_head.weight"  # tied to the embedding: no file has it
IGNORED = -100  # the label of a position that is not trained on
# The type of the products: float32 where the CPU has no instructions for bf16, whose emulation is twenty times slower.
HAS_BF16 = torch.cuda.is_available() or any(torch.cpu.get_capabilities().get(name)
                                            for name in ("avx512_bf16", "amx_bf16"))
PRODUCTS = torch.bfloat16 if HAS_BF16 else torch.float32


def options(about: str, steps: int, each: str, out: Path, threads: int = 1, **more: dict[str, Any]
            ) -> argparse.Namespace:
    """The options of a training, and `more` of them; from here on, random weights are the same in each run."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=steps, help=f"of {each} each (default {steps})")
    parser.add_argument("--threads", type=int, default=threads, help=f"(default {threads})")
    parser.add_argument("--out", type=Path, default=out, metavar="DIR",
                        help=f"folder to write the trained model to (default {out.relative_to(ROOT)})")
    parser.add_argument("--start", type=Path, metavar="DIR", help="go on from the weights of this folder")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE",
                        help="keep all here after 50 steps: the same command goes on after an interruption")
    parser.add_argument("--mix", nargs=2, metavar=("DIR", "SHARE"), help="the result is a mean, with so much of the "
                        "weights of this folder: what --start knew is kept (Wortsman et al. 2022)")
    parser.add_argument("--peak", type=float, default=1.0,
                        help="factor of the learning rates; 0.6 with --start (default 1)")
    for name, settings in more.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **settings)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    return args


def encoded(tokenizer: tokenizers.Tokenizer, told: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts with their answers -> ids and labels [rows, length]: only the answers are trained on."""
    rows = []
    for texts in told:
        asked, said = (tokenizer.encode(text).ids for text in texts)
        rows.append(([*asked, *said], [IGNORED] * len(asked) + said))
    end, most = tokenizer.token_to_id("<|endoftext|>"), max(len(ids) for ids, _ in rows)
    ids, labels = (torch.tensor([row + [fill] * (most - len(row)) for row in part])
                   for part, fill in zip(zip(*rows), (end, IGNORED)))
    return ids, labels


def from_identity(model: nn.Module) -> nn.Module:
    """Random matrices for transformers' layers, so that each layer starts as the identity -> the same model."""
    for name, matrix in model.named_parameters():
        if matrix.dim() == 2 and "embed" not in name:
            nn.init.zeros_(matrix) if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")) else \
                nn.init.normal_(matrix, std=matrix.shape[1] ** -0.5)
    return model


class Muon(torch.optim.Optimizer):
    """Momentum with orthogonal steps, https://kellerjordan.github.io/posts/muon/, scaled as by Kimi's Moonlight.

    torch.optim.Muon multiplies in bf16, one matrix after another: on a CPU without instructions for it ten times
    slower.
    """

    def __init__(self, matrices, momentum: float = 0.95, weight_decay: float = 0.01):
        super().__init__(matrices, {"lr": 0.0, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                shapes.setdefault(p.shape, []).append(p)
            for (rows, columns), alike in shapes.items():
                moments = [self.state[p].setdefault("momentum_buffer", torch.zeros_like(p)) for p in alike]
                gradients = [p.grad for p in alike]
                torch._foreach_lerp_(moments, gradients, 1 - group["momentum"])
                steps = orthogonal(torch.stack(gradients).lerp(torch.stack(moments), group["momentum"]))
                torch._foreach_mul_(alike, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(alike, list(steps), alpha=-0.2 * group["lr"] * max(rows, columns) ** 0.5)


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """Each of the matrices [n, rows, columns] with singular values near 1, by five steps of Newton and Schulz."""
    if x.shape[1] > x.shape[2]:
        return orthogonal(x.mT).mT
    x = (x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)).to(PRODUCTS)
    for _ in range(5):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return x.float()


def learning_rate_factor(step: int, steps: int) -> float:
    """Warm-up over a hundred steps, constant, then linear to zero over the last 45 %."""
    return min(step / 100, 1.0, (1.0 - step / steps) / 0.45)


def train(args: argparse.Namespace, model: nn.Module, name_of: Callable[[str], str], files: dict[str, Any],
          rates: tuple[float, float], losses: Callable[[Any], Iterable[dict[str, torch.Tensor]]],
          batches: Callable[[int, int], Iterable[Any]] = range) -> None:
    """Trains a model for `args.steps` steps; every 50 steps, it prints the means of the losses and writes `args.out`.

    name_of, files: see `write`
    rates: the highest learning rates: of Muon for the matrices, of AdamW for embeddings and vectors
    losses: of a batch, by their names, one part of it after another; all gradients of a batch add up
    batches: those from a step on to the last one; by default, each is the number of its step
    """
    named = dict(model.named_parameters())
    matrices = [p for name, p in named.items() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in named.items() if p.dim() != 2 or "embed" in name]
    optimizers = [Muon(matrices), torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0, fused=True)]
    device, first, seconds = others[0].device, 0, 0.0
    names = {name: name_of(name) for name in model.state_dict() if name != HEAD}
    if args.start:
        state = load_file(args.start / "model.safetensors", str(device))
        model.load_state_dict({name: state[written] for name, written in names.items()}, strict=False)
    if args.checkpoint and args.checkpoint.exists():
        saved = torch.load(args.checkpoint, map_location=device)
        first, seconds = saved["step"], saved["seconds"]
        for part, state in zip([model, *optimizers], saved["states"]):
            part.load_state_dict(state)
    print(f"{sum(p.numel() for p in named.values()) / 1e6:.2f} M parameters on {device}", flush=True)
    began, since, sums = time.perf_counter() - seconds, first, Counter[str]()
    for step, batch in enumerate(batches(first, args.steps), first):
        for part in losses(batch):
            sum(part.values()).backward()
            sums.update({name: loss.detach() for name, loss in part.items()})
        for optimizer, highest in zip(optimizers, rates):
            for group in optimizer.param_groups:
                group["lr"] = args.peak * highest * learning_rate_factor(step, args.steps)
            optimizer.step()
            optimizer.zero_grad()
        if (done := step + 1) % 50 and done < args.steps:
            continue
        means = {name: float(total) / (done - since) for name, total in sums.items()}
        seconds, since = time.perf_counter() - began, done
        sums.clear()
        print(f"step {done}  {seconds / 60:.1f} min ", *(f"{name} {mean:.4f}" for name, mean in means.items()),
              flush=True)
        if not all(map(math.isfinite, means.values())):
            raise SystemExit("the loss is no number any more")
        write(args.out, model, name_of, files)
        if args.checkpoint:
            new, states = args.checkpoint.with_suffix(".new"), [part.state_dict() for part in (model, *optimizers)]
            torch.save({"step": done, "seconds": seconds, "states": states}, new)
            new.replace(args.checkpoint)
    if args.mix:
        state, share = load_file(Path(args.mix[0]) / "model.safetensors", str(device)), float(args.mix[1])
        for name, value in model.state_dict().items():
            if name in names:
                value.lerp_(state[names[name]].float(), share)
        write(args.out, model, name_of, files)


def write(folder: Path, model: nn.Module, name_of: Callable[[str], str], files: dict[str, Any]) -> None:
    """A folder as Qwen's are: files, as texts or objects, and the weights in bf16.

    name_of: the name in Qwen's files for a parameter's own
    """
    folder.mkdir(exist_ok=True, parents=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else \
            json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    save_file({name_of(name): value.detach().to("cpu", torch.bfloat16).contiguous()
               for name, value in model.state_dict().items() if name != HEAD},
              folder / "model.safetensors", metadata={"format": "pt"})


@dataclass
class Score:
    """How many of some answers are right, and what was said in place of the others."""

    right: int = 0
    of: int = 0
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.right} of {self.of} | {self.right / self.of:.1%}"


def judge(kind: str, answers: Iterable[tuple[str, str]]) -> None:
    """Prints how many answers are exactly as wanted, and ten of the others, for pairs (wanted, answer)."""
    score = Score()
    for wanted, answer in answers:
        score.of, score.right = score.of + 1, score.right + (answer == wanted)
        score.failures += [f"  {wanted!r}: {answer[:100]!r}"] * (answer != wanted)
    print(f"| {kind} | {score} |", *score.failures[:10], sep="\n", flush=True)
