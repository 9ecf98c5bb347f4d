"""Mixtures larger than the memory: what is free of it, and whether the experts of a mixture come from the disk."""
from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from qwen3 import Config, Tensor
from qwen3_lib.io.tensors import BY_ROWS, EMBEDDING

SPARE = 2**28  # bytes, beside an eighth of the memory, that experts don't take


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """The bytes that this process may still take, pages of files among them, on Linux; elsewhere 0.

    The least of MemAvailable and of what is left of each limit on a control group, version 1 or 2, of this process: its
    own, those around it, and the one that a container sees as the root.
    """
    found, groups = [], [Path()]
    with contextlib.suppress(OSError, ValueError):
        lines = dict(line.split(":") for line in (proc / "meminfo").read_text("ascii").splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) * 1024)
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "self/cgroup").read_text("utf-8").splitlines():
            _, kinds, place = line.split(":", 2)
            if kinds in ("", "memory"):
                group = Path(place.lstrip("/"))
                groups += [group, *group.parents]
    for group in groups:
        for path, limit, taken in ((cgroups / group, "memory.max", "anon"),
                                   (cgroups / "memory" / group, "memory.limit_in_bytes", "total_rss")):
            with contextlib.suppress(OSError, ValueError, KeyError):  # "max": no limit
                counts = dict(line.split() for line in (path / "memory.stat").read_text("ascii").splitlines())
                found.append(max(int((path / limit).read_text("ascii")) - int(counts[taken]), 0))
    return min(found, default=0)


class FromDisk(NamedTuple):
    """A mixture whose weights are more than the memory; all in bytes."""
    weights: int
    memory: int
    stay: int  # of the weights that each token reads
    token: int  # of the experts that a token chooses

    @property
    def for_experts(self) -> int:
        """The memory for experts; the rest is for keys and values, and what the program works in."""
        return self.memory * 7 // 8 - SPARE - self.stay

    @property
    def fits(self) -> bool:
        """Whether memory holds the other weights and the experts of one token."""
        return self.for_experts >= self.token

    def __str__(self) -> str:
        least = (SPARE + self.stay + self.token) * 8 // 7
        weights, memory, least_memory = map(in_gigabytes, (self.weights, self.memory, least))
        return f"{weights} of weights, {memory} of memory: " + (
            "experts come from the disk" if self.fits else f"too little; it takes {least_memory} at least")


def in_gigabytes(n: int) -> str:
    return f"{n / 1e9:.{0 if n >= 1e10 else 1}f} GB"


def from_disk(config: Config, tensors: Mapping[str, Any], memory: int) -> FromDisk | None:
    """What doesn't fit, if the weights of a mixture are mapped and more than nine tenths of this memory."""
    sizes = {name: tensor.data.nbytes for name, tensor in tensors.items()
             if isinstance(tensor, Tensor) and BY_ROWS not in name}
    weights = sum(sizes.values())
    if not config.sparse_layers or not weights > 0.9 * memory > 0:
        return None
    stay = sum(size for name, size in sizes.items() if stays(name, tensors))
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    return FromDisk(weights, memory, stay, experts * config.num_experts_per_tok // config.num_experts)


def stays(name: str, tensors: Mapping[str, Any]) -> bool:
    """Whether each token reads all of a tensor. Of an embedding that isn't the head, it reads one row."""
    return ".experts." not in name and BY_ROWS not in name and (name != EMBEDDING or "lm_head.weight" not in tensors)
