"""Mixtures larger than the memory: experts come from the disk, with the bits of those in memory."""
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from configs import FLASH, HYBRID_MOE, ROOT
from helpers import (assert_one_line, logits_of, message_of, random_ids, read_safetensors, run_main,
                     states_of, with_tensors)
from make_random_model import make_random_model, random_tensor
from published import CASES, quantize_model
from qwen3_5 import mtp_config
from qwen3_lib.app import models
from qwen3_lib.io import disk
from qwen3_lib.io.disk import SPARE, available_memory, from_disk
from qwen3_lib.io.packed import save_quantized
from qwen3_lib.kernels import disk as kernels_disk
from qwen3_lib.kernels.layout import COMING, CONTEXT
from test_qwen3_moe import MOE, fuse
import qwen3_numba as fast

pytestmark = [pytest.mark.core, pytest.mark.skipif(sys.platform != "linux", reason="Linux reads past the page cache")]
MANY = MOE | {"num_experts": 24, "num_experts_per_tok": 3, "hidden_size": 64, "moe_intermediate_size": 96}


def saved(path):
    save_quantized(fast.load_model(make_random_model(MANY, path / "plain", "float32"), "int4"), path / "saved", "int4")
    return path / "saved"


def fused(path):
    fuse(make_random_model(MANY, path, "float32"))
    return path


SOURCES = {
    "saved": saved, "fused": fused, "two files": lambda path: make_random_model(MANY, path, "bfloat16", 2),
    "a dense layer": lambda path: make_random_model(MANY | {"mlp_only_layers": [1]}, path, "float32"),
    "an MTP head": lambda path: make_random_model(HYBRID_MOE | {
        "mtp_num_hidden_layers": 1, "num_experts": 24, "hidden_size": 64, "moe_intermediate_size": 64}, path),
    "streams": lambda path: make_random_model(FLASH | {
        "mtp_num_hidden_layers": 1, "num_experts": 24, "hidden_size": 64, "moe_intermediate_size": 64,
        "ple_embed_dim": 64}, path, "bfloat16")}


def results(path, quantize=None, threads=2):
    """(the logits of prompts and tokens, and a guess where there is a head; the weights)."""
    model = fast.load_model(path, quantize, threads=threads)
    cache, ids, out = model.engine.new_cache(model.config), random_ids(90), []
    for part in (ids[:40], *np.array(ids[40:60])[:, None], ids[60:63], ids[63:]):
        out.append(fast.forward(model, part, cache, True))
    if model.weights.mtp is not None:
        head = model.engine.new_cache.plain(mtp_config(model.config))
        states, token = model.engine.guess(model, states_of(model, ids[:-1]), np.array(ids[1:]), head, 0)
        out += [states, np.array(token)]
    return out, model.weights


def give_slots(monkeypatch, slots):
    """The next model that is loaded finds memory for about so many experts of each layer."""
    def found(config, tensors, _):
        least = from_disk(config, tensors, 1)
        return least._replace(memory=(least.token * slots // config.num_experts_per_tok + least.stay + SPARE) * 8 // 7
                              + 8)

    monkeypatch.setattr(fast, "from_disk", found)


def slots_or_skip(w):
    if not w.slots:
        pytest.skip("this file system has no O_DIRECT")
    return w.layers.slots.reshape(len(w.layers.routers), -1)


@pytest.mark.parametrize("slots", [5, 12])
@pytest.mark.parametrize("source", SOURCES)
def test_the_bits_of_experts_in_memory(source, slots, tmp_path, monkeypatch, capsys):
    """With fewer slots than experts that a prompt chooses: it reads them in turns."""
    path = SOURCES[source](tmp_path / "model")
    expected, w = results(path)
    assert not len(w.layers.slots) and not w.slots
    give_slots(monkeypatch, slots)
    found, w = results(path)
    held = slots_or_skip(w)
    assert "experts come from the disk" in capsys.readouterr().err
    assert all(map(np.array_equal, found, expected))
    assert 0 < held.shape[1] <= slots
    for layers in (w.layers, *([w.mtp.layer.layers] if w.mtp else [])):
        in_slots = layers.slots[layers.slots["address"] > 0]
        where = in_slots["layer"], in_slots["expert"]
        assert (in_slots["expert"] >= 0).all() and len({*zip(*map(np.ndarray.tolist, where))}) == len(in_slots)
        assert (layers.slots[layers.slot_of[where]] == in_slots).all() and not in_slots["coming"].any()
        behind = layers.experts["address"][where] - in_slots["address"][:, None]
        assert (0 <= behind).all() and (behind < np.diff(in_slots["address"]).min()).all()


def in_gguf(form):
    def write(path):
        pytest.importorskip("gguf")
        from test_gguf_file import write_gguf
        return write_gguf(make_random_model(WIDE, path, "float32"), path / "x.gguf", form)

    return write


def in_form(name):
    def write(path):
        quantize_model(make_random_model(MANY, path, "float32"), *CASES[name])
        return path

    return write


WIDE = MANY | {"hidden_size": 256, "moe_intermediate_size": 256}
PACKED = {"GGUF, Q4_0": (in_gguf("Q4_0"), None), "GGUF, Q8_0": (in_gguf("Q8_0"), None),
          "MLX": (in_form("MLX, 4 bits, scales in float16"), None), "AWQ": (in_form("AWQ, groups of 32"), None),
          "FP8": (in_form("FP8 by output"), None), "int8": (fused, "int8"), "int4": (SOURCES["an MTP head"], "int4")}


@pytest.mark.parametrize("slots", [5, 12])
@pytest.mark.parametrize("source", PACKED)
def test_experts_that_are_packed_while_loading(source, slots, tmp_path, monkeypatch, capsys):
    """They go into a file that nobody sees; the bits are those of experts in memory, in a saved folder, too."""
    make, quantize = PACKED[source]
    path = make(tmp_path / "model")
    folder = path if path.is_dir() else path.parent
    expected, w = results(path, quantize)
    names = sorted(os.listdir(folder))
    assert not w.slots
    give_slots(monkeypatch, slots)
    found, w = results(path, quantize)
    slots_or_skip(w)
    assert "experts come from the disk" in capsys.readouterr().err
    assert all(map(np.array_equal, found, expected)) and sorted(os.listdir(folder)) == names
    if quantize:
        save_quantized(fast.load_model(path, quantize), tmp_path / "saved", quantize)
        monkeypatch.undo()
        assert all(map(np.array_equal, results(tmp_path / "saved")[0], expected))


def test_a_folder_or_a_disk_that_takes_no_experts(tmp_path, monkeypatch):
    path = fused(tmp_path)
    give_slots(monkeypatch, 8)
    monkeypatch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert_one_line(message_of(fast.load_model, path, "int8"), str(path), "can't be written: No space left")


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("source", ["two files", "an MTP head", "streams"])
def test_a_system_without_aio(source, threads, tmp_path, monkeypatch):
    """Threads read; with AIO or without it, their number changes no bit."""
    path = SOURCES[source](tmp_path)
    expected, _ = results(path)
    for numbers in (kernels_disk.AIO, {}):
        monkeypatch.setattr(kernels_disk, "AIO", numbers)
        give_slots(monkeypatch, 5)
        found, w = results(path, threads=threads)
        slots_or_skip(w)
        assert all(map(np.array_equal, found, expected))
        assert bool(numbers) or w.layers.fetching[CONTEXT] == 0


@pytest.mark.parametrize("field, value", [("file", -1), ("start", 1 << 40)])
def test_a_read_that_fails(field, value, tmp_path, monkeypatch):
    """Refused at once, or beyond the end of the file: the mapped bytes are the same."""
    path = saved(tmp_path)
    expected, _ = results(path)
    give_slots(monkeypatch, 8)
    model = fast.load_model(path, threads=2)
    slots_or_skip(model.weights)
    model.weights.layers.blocks[field][:, ::2] = value
    assert np.array_equal(logits_of(model, random_ids(40)), expected[0])
    layers = model.weights.layers
    assert (layers.experts["address"][:, :24:2] == layers.blocks["mapped"][:, ::2]).all()
    assert not layers.slots["coming"].any()


def never_chosen(path):
    """A model whose second layer's first experts no token chooses: of 24 logits, three are above zero."""
    with_tensors(make_random_model(MANY, path, "float32") / "model.safetensors", {
        "model.layers.1.mlp.gate.weight": np.concatenate([np.zeros((6, 64), np.float32), random_tensor(
            np.random.default_rng(0), (18, 64), "float32")])})
    return path


@pytest.mark.parametrize("n, ahead", [(31, False), (32, True)])
def test_the_next_layer_is_read_ahead(n, ahead, tmp_path, monkeypatch):
    """For a prompt with four times as many choices as experts; experts that nobody chooses then change no bit."""
    expected = logits_of(fast.load_model(never_chosen(tmp_path)), random_ids(n))
    give_slots(monkeypatch, 24)
    model = fast.load_model(tmp_path)
    slots_or_skip(model.weights)
    if not model.weights.layers.fetching[CONTEXT]:
        pytest.skip("this system refuses AIO")
    assert np.array_equal(logits_of(model, random_ids(n)), expected)
    layers = model.weights.layers
    assert (layers.slot_of[1, :6] >= 0).any() == ahead and not layers.slots["coming"].any()


def test_a_forked_process(tmp_path, monkeypatch):
    """What its parent has asked for never comes to it."""
    path = saved(tmp_path)
    give_slots(monkeypatch, 8)
    model = fast.load_model(path, threads=2)
    slots, expected = slots_or_skip(model.weights), logits_of(model, random_ids(40))
    some = slots[0, :2]
    before = some["coming"].copy(), model.weights.layers.fetching[COMING]
    some["coming"], model.weights.layers.fetching[COMING] = 1, 2  # on their way, as if a job had failed
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        os._exit(0 if np.array_equal(logits_of(model, random_ids(40)), expected) else 1)
    some["coming"], model.weights.layers.fetching[COMING] = before
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert np.array_equal(logits_of(model, random_ids(40)), expected)


def test_what_a_freed_model_leaves(tmp_path, monkeypatch):
    """The system's place for reads goes with the slots."""
    def places():
        return Path("/proc/self/maps").read_text().count("[aio]")

    before, path = places(), saved(tmp_path)
    give_slots(monkeypatch, 8)
    model = fast.load_model(path, threads=2)
    slots_or_skip(model.weights)
    assert places() - before == (model.weights.layers.fetching[CONTEXT] != 0)
    logits_of(model, random_ids(40))
    del model
    gc.collect()
    assert places() == before


def test_the_last_used_stay(tmp_path, monkeypatch):
    """A layer's slots hold the experts that its last tokens chose; a prompt changes a quarter of them.

    A prompt leaves experts of its last layer there; of the next tokens, new experts replace these first.
    """
    give_slots(monkeypatch, 12)
    model = fast.load_model(make_random_model(MANY, tmp_path, "float32"), threads=2)
    slots, cache = slots_or_skip(model.weights)[0], model.engine.new_cache(model.config)

    def held():
        return {e: used for layer, e, used in slots[["layer", "expert", "used"]].tolist() if layer == 0}

    for token in random_ids(40):  # all slots have an expert then
        fast.forward(model, [token], cache)
    for token in random_ids(20, 1):
        before = held()
        fast.forward(model, [token], cache)
        after = held()
        chosen = {e for e, used in after.items() if used > max(before.values())}
        gone, stayed = before.keys() - after.keys(), before.keys() & after.keys() - chosen
        assert len(chosen) == 3 and len(after) == len(slots)
        assert max([before[e] for e in gone], default=0) <= min(before[e] for e in stayed)
    fast.forward(model, random_ids(60, 2), cache)
    assert len(after.keys() & held().keys()) == len(held()) == len(slots) - len(slots) // 4
    before = held()
    fast.forward(model, [5], cache)
    assert before.keys() <= held().keys()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_an_expert_is_one_block_of_a_saved_file(kind, tmp_path):
    """Gate, up and down are neighbours, so that one read brings all three."""
    model = fast.load_model(make_random_model(MANY, tmp_path / "plain", "float32"), kind)
    save_quantized(model, tmp_path / "saved", kind)
    header, _ = read_safetensors(tmp_path / f"saved/model.{kind}.safetensors")
    for layer in range(model.config.num_hidden_layers):
        for e in range(24):
            spans = [header[f"model.layers.{layer}.mlp.experts.{e}.{name}_proj.weight"]["data_offsets"]
                     for name in ("gate", "up", "down")]
            assert spans[0][1] == spans[1][0] and spans[1][1] == spans[2][0]


# ---- The memory ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("files, expected", [
    ({}, 9_000_000), ({"memory.max": 5_000_000, "memory.stat": "anon 1000000"}, 4_000_000),
    ({"memory.max": "max", "memory.stat": "anon 1000000"}, 9_000_000),
    ({"a/memory.max": 5_000_000, "a/memory.stat": "file 7\nanon 0", "a/b/memory.max": 6_000_000,
      "a/b/memory.stat": "anon 2000000"}, 4_000_000),
    ({"memory/c/memory.limit_in_bytes": 3_000_000, "memory/c/memory.stat": "cache 9\ntotal_rss 1000000"}, 2_000_000),
    ({"memory/memory.limit_in_bytes": 3_000_000, "memory/memory.stat": "total_rss 4000000"}, 0),
    ({"memory/c/memory.limit_in_bytes": 2**63 - 4096, "memory/c/memory.stat": "total_rss 0"}, 9_000_000)])
def test_the_memory_of_control_groups(files, expected, tmp_path):
    """Versions 1 and 2: a process's own group, those around it, and the root that a container sees."""
    for name, text in ({"proc/meminfo": "MemTotal: 20 kB\nMemAvailable: 8789 kB",
                        "proc/self/cgroup": "4:cpu:/x\n3:memory:/c\n0::/a/b"} | {
                        f"groups/{name}": text for name, text in files.items()}).items():
        (file := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
    assert abs(available_memory(tmp_path / "proc", tmp_path / "groups") - expected) < 1000


def test_no_memory_is_known_elsewhere(tmp_path):
    assert available_memory(tmp_path, tmp_path) == 0


def test_what_a_list_and_loading_say(tmp_path, monkeypatch, capfd):
    """What fits says nothing; and no slots are taken where not even a token's experts fit."""
    path = saved(tmp_path)
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))

    monkeypatch.setattr(disk, "SPARE", 0)

    def said(memory):
        monkeypatch.setattr(models, "available_memory", lambda: memory)
        monkeypatch.setattr(fast, "available_memory", lambda: memory)
        _, text, _ = run_main(capfd, "--list", "--model", path)
        w = fast.load_model(path).weights
        return text.splitlines()[-1], capfd.readouterr().err, len(w.slots)

    for memory in (0, 2 * size):
        line, shown, slots = said(memory)
        assert line.endswith("yes (--fast)") and "memory" not in shown and not slots
    line, shown, _ = said(size * 9 // 10)
    assert line.endswith("0.0 GB of memory: experts come from the disk")
    assert shown.startswith(f"{path}: 0.0 GB of weights, 0.0 GB of memory: ")
    line, shown, slots = said(size // 10)
    assert "too little; it takes 0.0 GB at least" in line and "too little" in shown and not slots


def test_the_least_memory():
    """What a line names is as little as fits."""
    def line(memory):
        return str(disk.FromDisk(weights=17_000_000_000, memory=memory, stay=800_000_000, token=1_000_000_000))

    assert line(2_200_000_000) == "17 GB of weights, 2.2 GB of memory: too little; it takes 2.4 GB at least"
    assert line(2_360_000_000).endswith("it takes 2.4 GB at least") and line(2_370_000_000).endswith("from the disk")


def memory_group(size):
    root = Path("/sys/fs/cgroup/memory")
    root, limit = (root, "memory.limit_in_bytes") if root.exists() else (root.parent, "memory.max")
    group = root / f"qwen3-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(size))
    except OSError as error:
        pytest.skip(f"no memory group can be made: {error}")
    return group


@pytest.mark.parametrize("quantize, n_experts", [(None, 64), ("int8", 128)])
def test_in_a_small_memory_group(quantize, n_experts, tmp_path):
    """A process with less memory than the model's 300 MB gives the same logits; also if it packs them first."""
    config = MOE | {"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": n_experts}
    path = make_random_model(config, tmp_path / "model")
    program = ("import sys, os; open(sys.argv[2], 'w').write(str(os.getpid()))\n"
               "import qwen3_numba as fast; from qwen3_lib.io import disk; disk.SPARE = 2**26\n"
               "model = fast.load_model(sys.argv[1], sys.argv[3] or None, threads=2)\n"
               "cache = model.engine.new_cache(model.config)\n"
               "out = [fast.forward(model, part, cache) for part in ([*range(300)], [5], [6], [7])]\n"
               "print(len(model.weights.slots), *(row.tobytes().hex() for row in out))")
    free = subprocess.run([sys.executable, "-c", program, path, os.devnull, quantize or ""], cwd=ROOT,
                          capture_output=True, text=True)
    group = memory_group(280 << 20)
    try:
        done = subprocess.run([sys.executable, "-c", program, path, group / "cgroup.procs", quantize or ""], cwd=ROOT,
                              capture_output=True, text=True, timeout=120)
    finally:
        group.rmdir()
    assert done.returncode == 0, done.stderr
    (n, *expected), (slots, *found) = free.stdout.split(), done.stdout.split()
    assert n == "0" and found == expected
    assert "experts come from the disk" in done.stderr and slots == "1"
