"""How the threads that run a kernel share its work, and how they wait. team.py has the threads.

Work is cut into pieces, and each thread has a share of them. It takes its own pieces from the first one on, so its
caches and pages stay; then the last ones of others, so nobody waits for a slow core, or a busy one. It takes several
at a time while many are left, and one at the end. Threads wait for pieces and never for each other: a thread whose
core was taken holds up the others only if it is in the midst of a piece. Then a thread that waits lends it its core
(Linux). Otherwise it finds all pieces taken later, and catches up.

So whatever a thread reads outside of its pieces must be the same during the whole job: the number of pieces above all.
"""
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from qwen3_lib.kernels import fields
from qwen3_lib.kernels.cpu import FEATURES
from qwen3_lib.kernels.fields import compiled
from qwen3_lib.kernels.intrinsics import int64s_at, result_at
from qwen3_lib.kernels.layout import (ABANDONED, C_FUNCTIONS, IN_C, CHOSEN, CPUS, CPUS_SIZE, DONE, FEW, HOLDS, LENT,
                                      MEMBER_SIZE, MEMBERS, PROMISED, READY, THREAD, TIME, WAITING)
from qwen3_lib.kernels.vectors import I32, I64, call

# Pieces for each thread, of few tokens and of many. Few tokens take 20 to 60 us a matrix, to begin a piece costs 0.5.
PIECES, MANY_PIECES = 2, 32
MOST_TAKEN = 4  # so many are taken at a time, at the end half of those that are left: then nobody waits for long
# How often a waiting thread looks until it calls sched_yield: for 25 us on a Zen 5, longer than a piece of few tokens.
# How often it calls that: for 0.1 ms; after so many times, 20 us, it looks for a thread to lend its core to. Then it
# sleeps for so many us in between: a core without work takes a waiting thread from another one.
LOOKS, YIELDS, YIELDS_UNTIL_LENT, NAP = 1000, 250, 50, 50
CLOCK_GETTIME, SCHED_GETCPU, SCHED_GETAFFINITY, SCHED_SETAFFINITY = range(len(C_FUNCTIONS))


class Crew(NamedTuple):
    """A thread among those that run a kernel together."""
    rank: int
    n_threads: int
    shared: int  # the address of int64 [crew_size(n_threads)], zeros at first: see layout.py


@intrinsic
def loaded(context, address):
    """The int64 at an address that other threads write to."""
    def codegen(context, b, signature, args):
        return b.load_atomic(b.inttoptr(args[0], I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def added(context, address, n):
    """The int64 at an address + n, which is there now."""
    def codegen(context, b, signature, args):
        return b.add(b.atomic_rmw("add", b.inttoptr(args[0], I64.as_pointer()), args[1], "acq_rel"), args[1])

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def exchanged(context, address, old, new):
    """Whether the int64 at an address was `old`, and is `new` now."""
    def codegen(context, b, signature, args):
        address = b.inttoptr(args[0], I64.as_pointer())
        return b.extract_value(b.cmpxchg(address, args[1], args[2], "acq_rel", "acquire"), 1)

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic
def pause(context, n):
    """Lets others run while a thread waits, which has looked n times: see LOOKS."""
    def codegen(context, b, signature, args):
        if FEATURES.get("sse2"):
            call(b, "llvm.x86.sse2.pause", ir.VoidType())  # for a thread that shares the core
        yields, naps = WAITING
        with b.if_then(b.icmp_signed(">=", args[0], I64(LOOKS)), likely=False):
            call(b, yields, I32)
            with b.if_then(b.icmp_signed(">=", args[0], I64(LOOKS + YIELDS))):
                call(b, naps, I32, I32(NAP))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@compiled
def crew_of(record, rank):
    return Crew(rank, fields.n_threads(record), fields.shared(record))


@compiled
def taken(queue, number, n, own):
    """Takes some of the n pieces of a thread: the first ones, or not for oneself the last -> (which, how many).

    A queue is an int64: the number of a work, then how many pieces are taken from the end, and from the start. One with
    a lower number is of a work that is over, and counts nothing.
    """
    while True:
        word = loaded(queue)
        if word >> 32 > number:
            return 0, 0
        counts = word & 0xFFFFFFFF if word >> 32 == number else 0
        first, last = counts & 0xFFFF, counts >> 16
        left = n - first - last
        if left <= 0:
            return 0, 0
        some = max(min(left // 2, MOST_TAKEN), 1)
        if exchanged(queue, word, number << 32 | counts + (some if own else some << 16)):
            return first if own else n - last - some, some


@compiled
def pieces_for(n_tokens, crew):
    """How many pieces there are of a work on so many tokens, or fewer."""
    return crew.n_threads * (PIECES if n_tokens <= FEW else MANY_PIECES)


@compiled
def pieces(n, unit, n_tokens, crew):
    """(start, end) of the parts of range(n) that a thread works on for so many tokens, in whole units.

    All threads ask for the same pieces in the same order, and a work's pieces are taken before anybody asks for the
    next one's. So the number of pieces before it tells which work a queue is about.
    """
    units, parts = (n + unit - 1) // unit, pieces_for(n_tokens, crew)
    step = max((units + parts - 1) // parts, 1) * unit
    count, members = (n + step - 1) // step, crew.shared + 8 * MEMBERS
    mine = int64s_at(member(crew, crew.rank), (MEMBER_SIZE,))
    number = mine[PROMISED]
    mine[PROMISED] += count
    mine[HOLDS] = 1
    for turn in range(crew.n_threads):
        other = crew.rank + turn - (crew.n_threads if crew.rank + turn >= crew.n_threads else 0)
        before, end = count * other // crew.n_threads, count * (other + 1) // crew.n_threads
        while True:
            i, some = taken(members + 8 * MEMBER_SIZE * other, number, end - before, turn == 0)
            if some == 0:
                break
            start = (before + i) * step
            yield start, min(start + some * step, n)
            mine[READY] += some
        if exchanged(crew.shared + 8 * DONE, number + count - mine[READY], number + count):  # all others are done
            mine[READY] = 0
            break


@compiled
def items(n, crew):
    """The numbers of range(n) that a thread works on."""
    for start, end in pieces(n, np.int64(1), n, crew):
        for i in range(start, end):
            yield i


@compiled
def wait(crew):
    """Waits until all pieces so far are done, or a thread has failed."""
    mine = int64s_at(member(crew, crew.rank), (MEMBER_SIZE,))
    promised, done = mine[PROMISED], crew.shared + 8 * DONE
    if mine[READY] > 0:
        added(done, mine[READY])
        mine[READY] = 0
    mine[HOLDS] = 0
    n, other = 0, np.int64(-1)
    while loaded(done) < promised and loaded(crew.shared + 8 * ABANDONED) == 0:
        pause(n)
        n += 1
        if other < 0 and n > LOOKS and (n % YIELDS_UNTIL_LENT == 0 or n > LOOKS + YIELDS):
            other = lend_core(crew, mine)
            if other >= 0:
                n += YIELDS  # it sleeps: the other thread has the core
    if other >= 0:
        take_back(crew, mine, int64s_at(member(crew, other), (MEMBER_SIZE,)))


# ---- A core for a thread that others wait for ------------------------------------------------------------------------
# Linux alone moves a thread only 0.5 ms after it last ran, and a busy program may keep it from its core for 5 ms.

@compiled
def member(crew, rank):
    """The address of the int64 [MEMBER_SIZE] of a thread, see layout.py."""
    return crew.shared + 8 * (MEMBERS + MEMBER_SIZE * rank)


@compiled
def c_call(crew, name, arguments):
    """What a C function returns, an int; `name`: its number in C_FUNCTIONS."""
    return np.int32(result_at(loaded(crew.shared + 8 * (IN_C + name)), arguments))


@compiled
def cpu_time(crew, mine, thread):
    """The CPU time of a thread in ns. Linux makes the number of its clock from its own number."""
    c_call(crew, CLOCK_GETTIME, (~thread << 3 | 6, mine.ctypes.data + 8 * TIME))
    return mine[TIME] * 10**9 + mine[TIME + 1]


@compiled
def set_cpus(crew, mine, thread, where):
    """Lets a thread run on the CPUs at CPUS or CHOSEN only, and moves it there if need be."""
    c_call(crew, SCHED_SETAFFINITY, (thread, np.int64(8 * CPUS_SIZE), mine.ctypes.data + 8 * where))


@compiled
def this_cpu(crew):
    """(the place among the int64 of a set of CPUs, the bit there) of the CPU that this thread runs on."""
    cpu = np.int64(c_call(crew, SCHED_GETCPU, (np.int64(0),)))
    return cpu // 64, np.int64(1) << cpu % 64


@compiled
def lend_core(crew, mine):
    """Moves a thread that may hold pieces and whose CPU time stands still to this thread's core -> its rank, or -1."""
    for other in range(crew.n_threads):
        theirs = int64s_at(member(crew, other), (MEMBER_SIZE,))
        thread, holds = theirs[THREAD], loaded(theirs.ctypes.data + 8 * HOLDS)
        if other == crew.rank or thread == 0 or holds == 0:
            continue
        if cpu_time(crew, mine, thread) == cpu_time(crew, mine, thread) and \
                exchanged(theirs.ctypes.data + 8 * LENT, 0, 1):
            place = thread, np.int64(8 * CPUS_SIZE), mine.ctypes.data + 8 * CPUS
            if c_call(crew, SCHED_GETAFFINITY, place) == 0:
                word, bit = this_cpu(crew)
                for i in range(CPUS_SIZE):
                    mine[CHOSEN + i] = bit if i == word else 0
                set_cpus(crew, mine, thread, CHOSEN)
                return other
    return np.int64(-1)


@compiled
def take_back(crew, mine, theirs):
    """Lets a thread run where it could before; if it is on this thread's core, it goes to another one first."""
    word, bit = this_cpu(crew)
    for i in range(CPUS_SIZE):
        mine[CHOSEN + i] = mine[CPUS + i] & ~bit if i == word else mine[CPUS + i]
    set_cpus(crew, mine, theirs[THREAD], CHOSEN)
    set_cpus(crew, mine, theirs[THREAD], CPUS)
    theirs[LENT] = 0
