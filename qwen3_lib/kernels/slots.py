"""The experts of a mixture larger than the memory: the kernel that reads chosen ones from the disk into slots.

Each layer has slots of its own, so that a token's other layers can't push out its experts. A new expert replaces the
one whose last use is longest ago. The many tokens of a prompt choose nearly all experts: these pass through a part of
all layers' slots, so that what decoding needs stays.

Reads go past the page cache (O_DIRECT), which costs the CPU work for each page. By Linux's AIO, one thread asks for all
missing experts of a turn at once, and for those of a prompt's next turns, and of its next layer: they are read while
this turn is computed. Where the system refuses AIO, as some sandboxes do, all threads read the missing experts, and
none ahead. Where a read fails, the expert's mapped bytes are taken. All of it gives the same numbers.
"""
import numpy as np

from qwen3_lib.kernels import fields
from qwen3_lib.kernels.crew import LOOKS, YIELDS, items, pause, wait
from qwen3_lib.kernels.fields import compiled
from qwen3_lib.kernels.intrinsics import result_at
from qwen3_lib.kernels.layout import (COMING, CONTEXT, EVENT, EVENTS, FEW, LIST, MISSING, MOST_READS, PREAD, REQUEST,
                                      SUBMIT, SYSCALL, TURN, WHICH)

SWEPT = 4  # a prompt's experts replace each other in one slot of so many
LIKELY = 4  # with so many times as many choices as experts, a layer needs nearly all: e^-4 is 2 %


@compiled
def changing(n_tokens, job):
    """(the slots of a layer, how many of them, the first ones, may change their expert for so many tokens)."""
    n_slots = len(fields.slots(job)) // len(fields.routers(job))
    return n_slots, n_slots if n_tokens <= FEW else max(n_slots // SWEPT, 1)


@compiled
def turns_for(n_tokens, job):
    """In how many turns, each with a range of the experts, a layer needs no more slots than may change.

    A prompt's next turn needs as many: they are other layers' slots, or half of an only layer's.
    """
    n_experts, (n_slots, room) = fields.experts(job).shape[1], changing(n_tokens, job)
    if n_tokens > FEW and len(fields.routers(job)) == 1:
        room = max(room // 2, 1)
    few = n_slots == 0 or n_tokens * fields.chosen(job).shape[1] <= room
    return 1 if few else (n_experts + room - 1) // room


@compiled
def turn_of(turn, turns, job):
    """(first, last + 1) of a turn's experts, without the shared one."""
    n_experts, n = fields.experts(job).shape[1], fields.slot_of(job).shape[1]
    return min(n_experts * turn // turns, n), min(n_experts * (turn + 1) // turns, n)


@compiled
def fetch(crew, layer, last, turn, turns, job):
    """Brings the chosen experts of a turn into slots. Without slots, they have their places.

    When it ends, others may be on their way: of the turns after it, and of the next layer before `last`.
    """
    fetching, n_experts = fields.fetching(job), fields.experts(job).shape[1]
    if len(fields.slots(job)) > 0:
        for _ in items(1, crew):
            assign(layer, last, turn, turns, job)
        wait(crew)
        for i in items(min((n_experts + turns - 1) // turns, fields.chosen(job).size), crew):
            if i < fetching[MISSING]:
                read(fetching[LIST + i], job)
        wait(crew)


@compiled
def assign(layer, last, turn, turns, job):
    """Has a turn's missing experts read into slots, or lists these slots for all threads; then has later turns' experts
    read ahead.

    A slot's last use is the number of this turn, or the next number if its expert was read ahead. So no expert of this
    turn replaces another one, and what is read ahead replaces neither these nor what the turn before has read ahead.
    """
    slots, slot_of, starts, fetching = fields.slots(job), fields.slot_of(job), fields.starts(job), fields.fetching(job)
    (begin, stop), next_, now = turn_of(turn, turns, job), layer + 1, fetching[TURN] + 2
    fetching[TURN], fetching[MISSING] = now, 0
    for e in range(begin, stop):
        while starts[e] < starts[e + 1] and not held(layer, e, now, now, job):
            note_one(job)
    while next_ < last and fields.routers(job)[next_].rows == 0:
        next_ += 1
    likely = next_ < last and turns > 1 and fields.chosen(job).size >= LIKELY * slot_of.shape[1]
    read_next(layer, next_, turn, turns, 2 * turns if likely else turns, job)
    for e in range(begin, stop):
        while starts[e] < starts[e + 1] and slots[slot_of[layer, e]].coming > 0:
            note_one(job)
    while next_ == last and turn + 1 == turns and fetching[COMING] > 0:  # a job leaves no read on its way
        note_one(job)


@compiled
def read_next(layer, next_, turn, turns, end, job):
    """Has the experts of the turns after this one read, until a slot is missing. Turns of the next layer have the
    numbers from `turns` on."""
    starts, fetching = fields.starts(job), fields.fetching(job)
    for each in range(turn + 1, end):
        begin, stop = turn_of(each % turns, turns, job)
        for e in range(begin, stop):
            if each >= turns or starts[e] < starts[e + 1]:
                here = layer if each < turns else next_
                if fetching[CONTEXT] == 0 or not held(here, e, fetching[TURN] - 1, fetching[TURN] + 1, job):
                    return


@compiled
def held(layer, e, before, turn, job):
    """Whether an expert is in a slot, or on its way to one, see `bring`; then this turn is the slot's last use."""
    slot_of = fields.slot_of(job)[layer]
    if slot_of[e] < 0 and (fields.fetching(job)[COMING] > MOST_READS - 3 or not bring(layer, e, before, job)):
        return False
    fields.slots(job)[slot_of[e]].used = turn
    return True


@compiled
def bring(layer, e, before, job):
    """Gives an expert a slot that no turn from `before` on has used, and has it read -> whether there is such a slot.

    Decoding takes a slot of its layer, first those where a prompt has left another layer's experts. A prompt takes one
    of all that may change, or an empty one of its layer.
    """
    slots, slot_of, fetching = fields.slots(job), fields.slot_of(job), fields.fetching(job)
    many, (n_slots, room), best, least = len(fields.x(job)) > FEW, changing(len(fields.x(job)), job), -1, before
    for i in range(len(slot_of)):
        for s in range(i * n_slots, i * n_slots + (n_slots if i == layer else room if many else 0)):
            used = slots[s].used if many or slots[s].layer == i else 0
            if used < least and slots[s].coming == 0 and (s < i * n_slots + room or slots[s].expert < 0):
                best, least = s, used
    if best < 0:
        return False
    if slots[best].expert >= 0:
        slot_of[slots[best].layer, slots[best].expert] = -1
    slots[best].layer, slots[best].expert, slot_of[layer, e] = layer, e, best
    if fetching[CONTEXT] != 0:
        read(best, job)
    else:
        fetching[LIST + fetching[MISSING]] = best
        fetching[MISSING] += 1
    return True


@compiled
def read(number, job):
    """Reads the matrices of an expert into its slot, or asks the system to."""
    slot, pread = fields.slots(job)[number], fields.fetching(job)[PREAD]
    blocks = fields.blocks(job)[slot.layer, slot.expert]
    slot.whole = 1
    for i in range(len(blocks)):
        b = blocks[i]
        if b.length > 0:
            size = (b.length + 4095) // 4096 * 4096  # beyond the end of the file, less comes
            if asked(b.file, slot.address + b.into, size, b.start, 3 * number + i, job):
                slot.coming += 1
            elif result_at(pread, (b.file, slot.address + b.into, size, b.start)) < b.length:
                slot.whole = 0
    settle(slot, job)


@compiled
def asked(file, address, size, start, number, job):
    """Whether the system takes a request to read, and will name this number. If it takes not even one, none follows."""
    fetching = fields.fetching(job)
    if fetching[CONTEXT] == 0:
        return False
    request = fetching[REQUEST:EVENT]  # Linux's struct iocb, which it copies
    request[0], request[2], request[3], request[4], request[5] = number, file << 32, address, size, start
    taken = result_at(fetching[SYSCALL], (fetching[SUBMIT], fetching[CONTEXT], np.int64(1),
                                          fetching[WHICH:].ctypes.data)) == 1
    if not taken and fetching[COMING] == 0:
        fetching[CONTEXT] = 0
    fetching[COMING] += taken
    return taken


@compiled
def settle(slot, job):
    """Tells where the matrices of a slot's expert are, when all reads have ended."""
    expert, blocks = fields.experts(job)[slot.layer, slot.expert], fields.blocks(job)[slot.layer, slot.expert]
    if slot.coming == 0:
        for i in range(len(blocks)):
            expert[i].address = slot.address + blocks[i].behind if slot.whole else blocks[i].mapped


@compiled
def note_one(job):
    """Takes note of a read that has ended, or waits a little.

    In a forked process none ends that its parent has asked for: the mapped bytes are taken.
    """
    slots, fetching = fields.slots(job), fields.fetching(job)
    event = fetching[EVENT:LIST]  # Linux's struct io_event
    n = result_at(fetching[SYSCALL], (fetching[EVENTS], fetching[CONTEXT], np.int64(0), np.int64(1), event.ctypes.data,
                                      np.int64(0)))
    if n > 0:
        slot = slots[event[0] // 3]
        slot.coming -= 1
        fetching[COMING] -= 1
        if event[2] < fields.blocks(job)[slot.layer, slot.expert, event[0] % 3].length:
            slot.whole = 0
        settle(slot, job)
    elif n == 0:
        pause(np.int64(LOOKS + YIELDS))
    else:
        fetching[CONTEXT], fetching[COMING] = 0, 0
        for i in range(len(slots)):
            if slots[i].coming > 0:
                slots[i].coming, slots[i].whole = 0, 0
                settle(slots[i], job)
