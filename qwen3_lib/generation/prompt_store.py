"""Prompts on the disk: the keys and values of their prefixes, found again after a restart.

A file holds BLOCK positions of a cache (or fewer, where a conversation may go on), or the states of delta nets after
the last of them. Its name is the hash of all tokens up to there and of all else that decides these numbers. So the
names in the folder are the index, whoever wrote the files, and the files' times say when they were last used.
"""
from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from qwen3 import InputError, KVCache, Model
from qwen3_lib.io.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from qwen3_lib.io.cores import available_cpus
from qwen3_lib.io.tensors import both_ends
from qwen3_lib.io.writing import SAFETENSORS_DTYPES, check_place, header_of, write_whole

LAYOUT = "qwen3 prompts 1"  # of the files; another one is never found
BLOCK = 256  # positions of a file
WORTH_LOADING = 16  # so many positions pay for reading a file
RECENT = 10**8  # nanoseconds: a folder that changed so recently may change again in the same tick of its file system
HEADER = 2**10  # bytes that a file's header has at most
NAME = re.compile(r"[0-9a-f]{40}-([0-9]{1,9})\.(rows|state)(\.\w+\.tmp)?")  # hash, position, what; .tmp: half written
OUR_DTYPES = {short: np.dtype(name) for name, short in SAFETENSORS_DTYPES.items()}


def fingerprint(model: Model, cache: KVCache) -> str:
    """A short text that tells models apart: config, both ends of each tensor, how weights and cache are kept."""
    kept = f"{getattr(model.weights, 'format', None)} {cache.dtype} {cache.k.shape[3]}"
    digest = hashlib.sha256(f"{model.config} {kept}".encode())
    if (folder := model.source.adapter) is not None:
        for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
            digest.update((folder / file).read_bytes())
    for name, tensor in sorted((model.source.tensors | model.source.heads | model.source.tower).items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode() + both_ends(tensor))
    return digest.hexdigest()


class PromptStore:
    """Prefixes of a model's prompts in a folder, at most `budget` bytes; those that weren't used for longest go first.

    Several processes may use one folder. A file that is damaged, or that can't be written, costs a line on stderr and
    the time to compute its tokens. Raises InputError for a folder that can't be written.
    """

    def __init__(self, model: Model, folder: str | Path, budget: int):
        self.model, self.folder, self.budget = model, Path(folder), budget
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (OSError, ValueError) as error:  # ValueError: a NUL character in the name
            raise InputError(f"{folder}: no folder for prompts: {getattr(error, 'strerror', None) or error}") from error
        check_place(self.folder / "x")
        cache = model.engine.new_cache(model.config, 1)
        self.start = f"{LAYOUT} {sys.byteorder} {fingerprint(model, cache)}"
        self.stateful = bool(cache.state(0))  # whether a state belongs to the positions at which it can go on
        self.names, self.stops, self.seen = set[str](), list[int](), 0  # the folder's, and when it last changed
        self.buffers, self.failed = threading.local(), False  # failed: the last file couldn't be written

    # ---- Names -------------------------------------------------------------------------------------------------------

    def known(self, ids: np.ndarray) -> np.ndarray:
        """Tokens [n] as numbers that mean the same in each process, [n] or [n, 5]: those of pictures and sounds by
        what these were made of. It ends before one that is gone.
        """
        if (media := self.model.media) is None:
            return np.ascontiguousarray(ids, np.int64)
        known = np.zeros((len(ids), 5), np.int64)
        known[:, 0] = ids
        numbers, end = np.where(ids < 0, ~ids >> 36, -1), len(ids)
        for number in {*numbers[ids < 0].tolist()}:
            here, found = numbers == number, media.known.get(number)
            known[here, 0] |= -1 << 36
            if found is None:
                end = min(end, int(here.argmax()))
            else:
                known[here, 1:] = np.frombuffer(found.digest, np.int64)
        return known[:end]

    def named(self, known: np.ndarray, salt: str, stops: Iterable[int]) -> Iterator[tuple[int, str]]:
        """(position, the name of its files) for each of some rising positions."""
        digest, before = hashlib.sha256(f"{self.start} {len(salt)} {salt}".encode("utf-8", "surrogatepass")), 0
        for stop in stops:
            digest.update(known[before:stop].data)
            before = stop
            yield stop, f"{digest.copy().hexdigest()[:40]}-{stop}"

    def look(self) -> None:
        """Reads the names in the folder, if it has changed."""
        with contextlib.suppress(OSError):  # a folder that is gone
            if (changed := os.stat(self.folder).st_mtime_ns) != self.seen:
                found = [match for name in os.listdir(self.folder) if (match := NAME.fullmatch(name)) and not match[3]]
                self.names, self.stops = {match[0] for match in found}, sorted({int(match[1]) for match in found})
                self.seen = changed if time.time_ns() - changed > RECENT else 0

    def find(self, token_ids: np.ndarray, salt: str = "") -> tuple[int, list[str]]:
        """The longest known prefix of tokens [n] -> (its length, its files), which count as used now."""
        self.look()
        known, best, whole = self.known(token_ids), (0, list[str]()), list[str]()
        for stop, name in self.named(known, salt, [stop for stop in self.stops if stop <= len(known)]):
            if (stop - 1) // BLOCK > len(whole):
                break
            if f"{name}.rows" in self.names:
                files = [*whole, f"{name}.rows"]
                whole = whole if stop % BLOCK else files
                if not self.stateful or f"{name}.state" in self.names:
                    best = stop, files + [f"{name}.state"] * self.stateful
        self.touch(best[1], time.time_ns())
        return best

    def touch(self, names: Iterable[str], now: int) -> None:
        for name in names:
            with contextlib.suppress(OSError):  # another process has deleted it
                os.utime(self.folder / name, ns=(now, now))

    def forget(self, name: str) -> None:
        """Deletes a file."""
        self.names.discard(name)
        with contextlib.suppress(OSError):
            os.unlink(self.folder / name)

    # ---- Reading -----------------------------------------------------------------------------------------------------

    def load(self, cache: KVCache, token_ids: np.ndarray, salt: str = "") -> None:
        """Adds to a cache what the folder has of tokens [n] beyond the cache's, which are the first of them."""
        def read(name: str) -> dict[str, np.ndarray]:
            """Writes the file's rows into the cache -> {}; or the arrays of a state."""
            _, position, kind = re.split(r"[-.]", name)
            found, end = self.read(name), int(position)
            if kind == "state":
                return {key: array.copy() for key, array in found.items()}
            for key, array in cache.rows((end - 1) // BLOCK * BLOCK, end).items():
                array[...] = found[key]
            return {}

        while True:
            stop, files = self.find(token_ids, salt)
            if stop < cache.length + WORTH_LOADING:
                return
            cache.reserve(stop - cache.length)
            state = dict[str, np.ndarray]()
            with ThreadPoolExecutor(available_cpus()) as threads:
                works = [(name, threads.submit(read, name)) for name in files[cache.length // BLOCK:]]
            try:
                for name, work in works:
                    state |= work.result()
                return cache.go_on(token_ids[cache.length:stop], state)
            except (OSError, ValueError, KeyError, TypeError) as error:
                failed = {other: work.exception() for other, work in works} | {name: error}
                for other, why in failed.items():  # all at once: a power cut damages many
                    if why is not None:
                        if not isinstance(why, FileNotFoundError):  # another process has deleted it
                            say(f"{self.folder / other}: damaged, so its tokens are computed again")
                        self.forget(other)

    def read(self, name: str) -> dict[str, np.ndarray]:
        """The arrays of a file, in memory that this thread's next file takes. Raises OSError, ValueError if damaged."""
        with open(self.folder / name, "rb", buffering=0) as file:
            size, buffer = os.fstat(file.fileno()).st_size, getattr(self.buffers, "of_thread", np.empty(0, np.uint8))
            if size > len(buffer):
                self.buffers.of_thread = buffer = np.empty(size, np.uint8)  # new memory takes longer than reading
            if file.readinto(buffer[:size].data) != size:
                raise ValueError("cut off")
        begin = 8 + int.from_bytes(buffer[:8].tobytes(), "little")
        entries, data = json.loads(buffer[8:begin].tobytes()), buffer[begin:size]
        said = entries.pop("__metadata__", None) if isinstance(entries, dict) else None
        if said != {"crc32": str(crc_of(entries, [data]))}:
            raise ValueError("damaged")
        return {key: data[slice(*each["data_offsets"])].view(OUR_DTYPES[each["dtype"]]).reshape(each["shape"])
                for key, each in entries.items()}

    # ---- Writing -----------------------------------------------------------------------------------------------------

    def save(self, cache: KVCache, salt: str = "", since: int | None = None) -> None:
        """Writes what the folder lacks of a cache, its first positions first. Nothing that was used after `since`, by
        time.time_ns (default: now), goes for it.

        Beside whole blocks it writes where a conversation may go on: the cache's end, and the last end of a turn, from
        which a client may render the last answer in another way; all ends of turns whose states the cache has.
        """
        now, known, ids = time.time_ns(), self.known(cache.token_ids[:cache.length]), cache.token_ids
        turns = (np.flatnonzero(np.isin(ids[:len(known)], self.model.eos_token_ids)) + 1).tolist()
        ends = [stop for stop in {*turns[0 if self.stateful else -1:], len(known)} - {0}
                if cache.common_prefix(ids[:stop]) == stop]
        wanted = dict[str, Callable[[], dict[str, np.ndarray]]]()
        for stop, name in self.named(known, salt, sorted({*range(BLOCK, len(known) + 1, BLOCK), *ends})):
            wanted[f"{name}.rows"] = partial(cache.rows, (stop - 1) // BLOCK * BLOCK, stop)
            if self.stateful and stop in ends:
                wanted[f"{name}.state"] = partial(cache.state, stop)
        files, before = self.files(), since or now
        for name, content in wanted.items():
            if name not in files:
                arrays = content()
                n_bytes = HEADER + sum(array.nbytes for array in arrays.values())
                if not self.make_room(n_bytes, wanted, before) or not self.write(name, arrays):
                    return
        self.make_room(0, wanted, before)  # another process may have written at the same time
        self.touch(wanted, now)

    def make_room(self, n_bytes: int, kept: Collection[str], before: int) -> bool:
        """Deletes files that were last used before a time, the oldest first, but not those kept, until so many bytes
        more are within the budget -> whether they are."""
        files = self.files()
        used = n_bytes + sum(size for _, size in files.values())
        oldest = sorted((used_at, -int(NAME.fullmatch(name)[1]), name, size)  # type: ignore[index]
                        for name, (used_at, size) in files.items() if name not in kept and used_at < before)
        for *_, name, size in oldest:
            if used <= self.budget:
                break
            self.forget(name)
            used -= size
        return used <= self.budget

    def files(self) -> dict[str, tuple[int, int]]:
        """name -> (when it was last used, its bytes), half written ones among them."""
        found = dict[str, tuple[int, int]]()
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # another process has deleted it
                    if NAME.fullmatch(entry.name):
                        found[entry.name] = entry.stat().st_mtime_ns, entry.stat().st_size
        return found

    def write(self, name: str, arrays: dict[str, np.ndarray]) -> bool:
        """Writes a file for its user alone, whole or not at all -> whether it could; the first failure is said."""
        entries = header_of(arrays)
        head = json.dumps({"__metadata__": {"crc32": str(crc_of(entries, arrays.values()))}} | entries).encode()
        head += b" " * ((-8 - len(head)) % 64)

        def fill(file: BinaryIO) -> None:
            file.write(len(head).to_bytes(8, "little") + head)
            for array in arrays.values():
                for part in array:
                    file.write(np.ascontiguousarray(part).data)

        try:
            write_whole(self.folder / name, fill, 0o600, durable=False)
        except InputError as error:
            if not self.failed:
                say(f"prompts are not kept on the disk: {error}")
            self.failed = True
            return False
        self.failed = False
        return True


def crc_of(entries: dict[str, Any], arrays: Iterable[np.ndarray]) -> int:
    """CRC-32 over what a file's header says of its arrays, and over their bytes."""
    value = zlib.crc32(json.dumps(entries).encode())
    for array in arrays:
        for part in [array] if array.flags.c_contiguous else array:  # part by part, which takes less memory
            value = zlib.crc32(np.ascontiguousarray(part).data, value)
    return value


def say(text: str) -> None:
    if sys.stderr is not None:
        print(text, file=sys.stderr)
