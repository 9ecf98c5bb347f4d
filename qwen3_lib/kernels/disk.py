"""Where the experts of a mixture larger than the memory lie in its files, and the memory for some of them: slots.py."""
from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
import tempfile
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from qwen3_lib.io.errors import InputError
from qwen3_lib.kernels.layout import (CONTEXT, EVENTS, FILE_BLOCK, LIST, MOST_READS, PANEL, PREAD, REQUEST, SLOT,
                                      SUBMIT, SYSCALL, WHICH, Layers, is_packed, padded)

PAGE = 4096  # of a disk: O_DIRECT reads whole ones
# The numbers of Linux's io_setup, io_destroy, io_getevents and io_submit.
AIO = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}


def no_slots(n_layers: int) -> dict[str, np.ndarray]:
    """The fields of Layers whose experts are in memory."""
    return {"blocks": np.zeros((n_layers, 0, 3), FILE_BLOCK), "slots": np.zeros(0, SLOT),
            "slot_of": np.zeros((n_layers, 0), np.int64), "fetching": np.zeros(LIST, np.int64)}


class Files:
    """The files that are mapped into this process, opened a second time, past the page cache."""

    def __init__(self) -> None:
        self.handles = dict[str, int]()
        self.places = list[tuple[int, int, int, str, int]]()  # first address, end, offset in the file, path, inode
        for line in open("/proc/self/maps", encoding="utf-8", errors="surrogateescape"):
            span, _, offset, _, inode, *path = line.rstrip("\n").split(None, 5)
            if path and inode != "0":
                start, end = (int(each, 16) for each in span.split("-"))
                self.places.append((start, end, int(offset, 16), path[0], int(inode)))
        weakref.finalize(self, lambda handles: [*map(os.close, handles)], self.handles.values())

    def place(self, address: int) -> tuple[int, int]:
        """(the handle of the file whose byte is mapped to this address, that byte). Raises OSError."""
        for start, end, offset, path, inode in self.places:
            if start <= address < end:
                if path not in self.handles:
                    where = opened_as(inode) if path.endswith(" (deleted)") else path
                    handle = self.handles[path] = os.open(where, os.O_RDONLY | os.O_DIRECT)
                    if os.fstat(handle).st_ino != inode:
                        raise OSError(f"{path} has been replaced")
                return self.handles[path], address - start + offset
        raise OSError("not mapped")


def opened_as(inode: int) -> str:
    """The name of a file without a name, which this process has open."""
    return next((name for name in (f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd"))
                 if os.path.exists(name) and os.stat(name).st_ino == inode), "")


class ExpertFile:
    """A file without a name, into which experts go that are packed while loading. It ends with the process."""

    def __init__(self, path: Path, size: int):
        """In a model's folder. Raises InputError where nothing can be written."""
        self.folder, self.used = path if path.is_dir() else path.parent, 0
        try:
            self.file = tempfile.TemporaryFile(dir=self.folder, buffering=0)
            self.file.truncate(size)  # which takes no room yet
        except OSError as error:
            raise self.unwritable(error) from error
        self.mapping = mmap.mmap(self.file.fileno(), size, access=mmap.ACCESS_READ)

    def unwritable(self, error: OSError) -> InputError:
        return InputError(f"{self.folder}: experts don't fit into memory, so they are packed into a file there, which "
                          f"can't be written: {error.strerror}")

    def take(self, data: np.ndarray) -> np.ndarray:
        """The same numbers [rows, n], mapped. Raises InputError if the disk is full."""
        start, self.used = self.used, self.used + padded(data.nbytes, 64)
        left = np.ascontiguousarray(data).data.cast("B")
        try:
            while left:
                left = left[os.pwrite(self.file.fileno(), left, start + data.nbytes - len(left)):]
        except OSError as error:
            raise self.unwritable(error) from error
        return np.frombuffer(self.mapping, data.dtype, data.size, start).reshape(data.shape)


def blocks_of(experts: np.ndarray, files: Files) -> tuple[np.ndarray, int]:
    """WEIGHT [n, 3] of a layer's experts -> FILE_BLOCK [n, 3], the bytes of a slot. Raises OSError.

    Matrices that are neighbours in a file are read at once; each read begins and ends at whole pages.
    """
    blocks, most = np.zeros(experts.shape, FILE_BLOCK), 0
    for expert, row in zip(experts, blocks):
        room, behind_last = 0, (0, 0)  # used of the slot; the file and the byte where the last matrix ends
        order = np.argsort(expert["address"])
        for i in order:
            w, block = expert[i], row[i]
            size = int(w.stride) * (padded(int(w.rows), PANEL) // PANEL if is_packed(int(w.form)) else int(w.rows))
            handle, byte = files.place(int(w.address))
            block.mapped = w.address
            if (handle, byte) == behind_last:
                first.length += size
            else:
                room = padded(room, PAGE)
                first, block.file, block.start, block.into = block, handle, byte // PAGE * PAGE, room
                block.length = byte % PAGE + size
            block.behind = first.into + byte - first.start
            room, behind_last = int(first.into + first.length), (handle, byte + size)
        most = max(most, padded(room, PAGE))
    return blocks, most


class SlotMemory:
    """So many bytes for experts, and Linux's AIO to read them; its context is 0 where the system refuses it."""

    def __init__(self, size: int):
        self.space = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.space.madvise(mmap.MADV_HUGEPAGE)  # they are read faster
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.space))
        self.libc, context = ctypes.CDLL(None), ctypes.c_ulong(0)
        setup, destroy, self.events, self.submit = AIO.get(platform.machine(), (-1,) * 4)
        self.libc.syscall(ctypes.c_long(setup), ctypes.c_long(MOST_READS), ctypes.byref(context))
        self.context = context.value
        end = weakref.finalize(self, self.libc.syscall, ctypes.c_long(destroy), context)  # waits for reads on their way
        end.atexit = False  # threads may still read then, and the system does it when the process ends

    def address_of(self, function: str) -> int:
        """Of a function of C."""
        return ctypes.cast(self.libc[function], ctypes.c_void_p).value or 0


def with_slots(layers: Layers, n_experts: int, memory: int, files: Files) -> tuple[Layers, Any]:
    """The same with slots for experts in so many bytes -> (layers, what keeps the slots). Raises OSError.

    A layer has one slot at least, and at most as many as experts.
    """
    sparse = [i for i, router in enumerate(layers.routers) if router.rows > 0]
    found = {i: blocks_of(layers.experts[i, :n_experts], files) for i in sparse}
    size = max(most for _, most in found.values())
    n_slots = min(n_experts, max(memory // len(sparse) // size, 1))
    space, n = SlotMemory(n_slots * len(sparse) * size), len(layers.routers)
    blocks, slots = np.zeros((n, n_experts, 3), FILE_BLOCK), np.zeros((n, n_slots), SLOT)
    slots["layer"] = slots["expert"] = -1
    slots["used"] = sys.maxsize  # an expert takes the slot with the least number: never one of a dense layer
    for j, i in enumerate(sparse):
        blocks[i], slots["used"][i] = found[i][0], 0
        slots["address"][i] = space.address + (np.arange(n_slots) + j * n_slots) * size
    fetching = np.zeros(LIST + n_experts, np.int64)
    fetching[[PREAD, SYSCALL]] = space.address_of("pread"), space.address_of("syscall")
    fetching[[SUBMIT, EVENTS, CONTEXT]] = space.submit, space.events, space.context
    fetching[WHICH] = fetching.ctypes.data + 8 * REQUEST
    slot_of = np.full((n, n_experts), -1)
    return layers._replace(blocks=blocks, slots=slots.reshape(-1), slot_of=slot_of, fetching=fetching), (space, files)
