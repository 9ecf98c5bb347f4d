"""The experts of a mixture larger than the memory: the kernel that reads chosen ones from the disk into slots.

Each layer has slots of its own, so that a token's other layers can't push out its experts. A new expert replaces the
one whose last use is longest ago. All threads read, a whole expert at a time, past the page cache (O_DIRECT), which
costs the CPU work for each page. Where a read fails, the expert's mapped bytes are taken: the same numbers.
"""
import numpy as np

from qwen3_lib.kernels import fields
from qwen3_lib.kernels.crew import items, wait
from qwen3_lib.kernels.fields import compiled
from qwen3_lib.kernels.intrinsics import result_at
from qwen3_lib.kernels.layout import FEW

# Of `fetching`: the function's address, the turns so far, how many experts are missing, and from LIST on, which ones.
PREAD, TURNS, MISSING, LIST = range(4)
SWEPT = 4  # many tokens, a prompt's, choose nearly all experts: these replace each other in one slot of so many


@compiled
def changing(n_slots, n_tokens):
    """How many of a layer's slots, the first ones, may change their expert in a turn."""
    return n_slots if n_tokens <= FEW else max(n_slots // SWEPT, 1)


@compiled
def turns_for(layer, n_tokens, job):
    """In how many turns, each with a range of the experts, a layer needs no more slots than may change."""
    n_slots, n_experts = len(fields.slots(job)[layer]), len(fields.experts(job)[layer])
    room = changing(n_slots, n_tokens)
    few = n_slots == 0 or n_tokens * fields.chosen(job).shape[1] <= room
    return 1 if few else (n_experts + room - 1) // room


@compiled
def fetch(crew, layer, begin, stop, n_tokens, job):
    """Brings the chosen ones of the experts begin to stop - 1 into slots. Without slots, they have their places."""
    slots, starts, fetching = fields.slots(job)[layer], fields.starts(job), fields.fetching(job)
    experts, blocks, slot_of = fields.experts(job)[layer], fields.blocks(job)[layer], fields.slot_of(job)[layer]
    room = changing(len(slots), n_tokens)
    if len(slots) > 0:
        for _ in items(1, crew):
            assign(slots, room, slot_of, starts, begin, min(stop, len(slot_of)), fetching)
        wait(crew)
        for i in items(min(room, n_tokens * fields.chosen(job).shape[1]), crew):
            if i < fetching[MISSING]:
                e = fetching[LIST + i]
                read(experts[e], blocks[e], slots[slot_of[e]].address, fetching[PREAD])
        wait(crew)


@compiled
def assign(slots, room, slot_of, starts, begin, stop, fetching):
    """Lists the missing experts in `fetching`, and gives each the slot whose last use is longest ago.

    Of the slots from `room` on, only empty ones.
    """
    fetching[TURNS] += 1
    fetching[MISSING] = 0
    for e in range(begin, stop):
        if starts[e] < starts[e + 1] and slot_of[e] >= 0:
            slots[slot_of[e]].used = fetching[TURNS]
    for e in range(begin, stop):
        if starts[e] < starts[e + 1] and slot_of[e] < 0:
            best = 0
            for s in range(1, len(slots)):
                if (s < room or slots[s].expert < 0) and slots[s].used < slots[best].used:
                    best = s
            if slots[best].expert >= 0:
                slot_of[slots[best].expert] = -1
            slots[best].expert, slots[best].used, slot_of[e] = e, fetching[TURNS], best
            fetching[LIST + fetching[MISSING]] = e
            fetching[MISSING] += 1


@compiled
def read(expert, blocks, slot, pread):
    """Reads the matrices of an expert [3] into its slot."""
    whole = True
    for i in range(len(blocks)):
        b = blocks[i]
        if b.length > 0:
            asked = (b.length + 4095) // 4096 * 4096  # beyond the end of the file, less comes
            whole = result_at(pread, (b.file, slot + b.into, asked, b.start)) >= b.length and whole
    for i in range(len(blocks)):
        expert[i].address = slot + blocks[i].behind if whole else blocks[i].mapped
