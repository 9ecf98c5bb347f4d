"""qwen3_lib/kernels/ways.py: the fastest way is chosen once, kept, and gives the same bits as any other."""
import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest

import qwen3
import qwen3_numba
from configs import ROOT
from helpers import assert_one_line, run_main
from packed import FORMATS, packed_vectors, reference, stored
from qwen3_lib.kernels import build, cpu, layout, objects, products, vectors, ways
from qwen3_lib.kernels.layout import F32, INT4, INT8, ROUNDED
from qwen3_lib.kernels.vectors import ONE, Way

pytestmark = pytest.mark.core
PROGRAM = """
import sys
from qwen3_lib.kernels import ways
from qwen3_lib.kernels.layout import FORMATS, F32, INT8
real, ways.SECONDS = ways.speeds, 0
def speeds(form, *more):
    print("measured", FORMATS[form].name, flush=True)
    found = real(form, *more)
    assert len(found) > 2 and all(0.01 < speed < 10000 for speed in found), found
    return [1, 2, *[1] * (len(found) - 2)]
ways.speeds = speeds
print(ways.ways_for({INT8: 1 << 50, F32: 1 << 50}))
print(ways.ways_for({INT8: 1000}))
"""


def product(path, form, way, kind="packed_product"):
    name = f"way_{path}_{form}_{kind}_{way.rows}_{way.prefetches}"
    return build.address_of(name, lambda: objects.compile_product(name, kind, form, 1, way))


def called(address, *arguments):
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))(address)(*arguments)


@pytest.mark.parametrize("path", cpu.PATHS)
@pytest.mark.parametrize("name", ["int8", "int4", "q5_1", "q6_k", "q4_k"])
def test_each_way_gives_the_same_bits(path, name, monkeypatch):
    """Of three blocks, of which the later ones are prefetched."""
    monkeypatch.setattr(vectors, "PATH", path)
    form, n, rng, found = FORMATS[name], 512, np.random.default_rng(0), []
    data, weight = stored(rng.standard_normal((96, n)).astype(np.float32), form)
    whole, scales = rng.integers(-127, 128, (1, n // 32, 32)).astype(np.int8), rng.random((1, n // 32))
    x = packed_vectors(whole, scales.astype(np.float32))
    tried = ways.tried_ways(form)
    assert tried[0] == vectors.way_of(form, ONE) and {way.prefetches for way in tried} == {0, 1, 2}
    for way in tried:
        out = np.zeros(96, np.float32)
        for i in range(3):
            called(product(path, form, way), data[i].ctypes.data, x.ctypes.data, 0, n, out[32 * i:].ctypes.data, 0,
                   data.strides[0] * (i < 2), 0, 1)
        found.append(out.view(np.uint32))
    expected = (whole * scales[..., None]).reshape(n) @ reference(data, weight).T.astype(np.float64)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=0.02)
    assert all(np.array_equal(each, found[0]) for each in found)
    last, place = np.zeros(32, np.float32), data.ctypes.data  # what is measured leaves the results of the last block
    called(product(path, form, tried[0], "each_block"), product(path, form, tried[0]), place, data.strides[0], 3,
           x.ctypes.data, n, last.ctypes.data)
    assert np.array_equal(last.view(np.uint32), found[0][64:])


@pytest.mark.parametrize("name", ["f32", "f16", "bf16", "bf16_rounded"])
def test_each_way_of_floats_gives_the_same_bits(name):
    """Of 7 rows, which are no multiple of four."""
    form, rows, n, rng, found = FORMATS[name], 7, 96, np.random.default_rng(0), []
    data, _ = stored(rng.standard_normal((rows, n)).astype(np.float32), form)
    x = rng.standard_normal(n).astype(np.float32)
    for way in (tried := ways.tried_ways(form)):
        out = np.zeros(rows, np.float32)
        called(product("", form, way, "float_product"), data.ctypes.data, data.strides[0], rows, x.ctypes.data, 0, n,
               out.ctypes.data, 0, 0, 0)
        found.append(out.view(np.uint32))
    assert len(tried) == 5 and {way.rows for way in tried} == {1, 2, 4}
    assert found[0].all() and all(np.array_equal(each, found[0]) for each in found)


@pytest.mark.parametrize("speeds, expected", [
    ((100, 90, 80), 0), ((100, 102, 99), 0), ((100, 103, 99), 0), ((100, 104, 99), 1), ((100, 104, 105), 2),
    ((1, 9), 1)])
def test_the_default_stays_unless_another_is_3_percent_faster(speeds, expected):
    tried = ways.tried_ways(INT8)
    assert ways.fastest(dict(zip(tried, speeds))) == tried[expected]


def processes(folder, n):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    started = [subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE, text=True)
               for _ in range(n)]
    found = [process.communicate(timeout=200)[0].splitlines() for process in started]
    assert not any(process.returncode for process in started)
    return found


def test_measured_once_by_one_of_two_processes(tmp_path):
    """The second start measures nothing and takes the same ways; weights that the cache holds have the default."""
    both = processes(tmp_path / "new", 2)
    assert sorted(line for lines in both for line in lines[:-2]) == ["measured f32", "measured int8"]
    assert both[0][-2:] == both[1][-2:] == processes(tmp_path / "new", 1)[0]
    assert both[0][-2:] == [str(tuple((form, ways.tried_ways(form)[1]) for form in (F32, INT8))), "()"]


@pytest.mark.parametrize("damage", [lambda text: text[:-1], lambda text: text.replace(b"1", b"2"), lambda text: b""])
def test_a_damaged_choice_is_measured_anew(damage, tmp_path):
    """So is one that was made for other sources, another CPU or another cache: they are a part of what is kept."""
    expected = processes(tmp_path / "new", 1)[0]
    file, = (tmp_path / "new").glob("*/way_int8")
    assert layout.FORMATS[INT8].name == "int8" and expected[:2] == ["measured f32", "measured int8"]
    file.write_bytes(damage(file.read_bytes()))
    assert processes(tmp_path / "new", 1)[0] == expected[1:]


def test_nothing_is_measured_where_nothing_can_be_kept(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", "relative"):
        assert processes(folder, 1) == [["()", "()"]]


def test_a_choice_for_another_cache_does_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr(ways, "code_place", lambda: (tmp_path / "here", "sources"))
    build.keep_code(*ways.place_of(INT8), b"2 1 0")
    assert ways.kept_way(INT8) == Way(2, 1, 0) and ways.kept_way(F32) is None
    monkeypatch.setattr(ways, "last_cache", lambda: 1000)
    assert ways.kept_way(INT8) is None


def test_a_model_takes_the_chosen_way(monkeypatch):
    """For one vector of its weights; logits are the same, bit for bit."""
    def logits(chosen):
        asked = dict[int, int]()
        monkeypatch.setattr(qwen3_numba, "ways_for", lambda sizes: asked.update(sizes) or chosen)
        model, taken = qwen3_numba.load_model(qwen3.BUNDLED, "int8"), set()
        real = products.function
        with monkeypatch.context() as patch:
            patch.setattr(products, "function", lambda *about: taken.add(about) or real(*about))
            products.functions_for.cache_clear()
            cache = model.engine.new_cache(model.config)
            found = [qwen3.forward(model, ids, cache) for ids in ([5, 6, 7], [8], [9])]
        arrays = {id(array): array for array in model.weights.arrays}.values()
        assert asked == {INT8: sum(array.nbytes for array in arrays)}
        return found, {way for kind, form, n, way in taken if (kind, form, n) == ("packed_product", INT8, 1)}

    default, other = ways.tried_ways(INT8)[:2]
    (expected, before), (found, after) = logits(()), logits(((INT8, other),))
    assert (before, after) == ({default}, {other}) and np.array_equal(found, expected)


def test_the_table(tmp_path, capfd, monkeypatch):
    """Measures although there is a choice, keeps the new one, and prints what it has found."""
    given = {form: [10.0 + i, 20, 9, 8] for i, form in enumerate((ROUNDED, INT4))} | {INT8: [10, 9, 10.2]}
    monkeypatch.setattr(ways, "code_place", lambda: (tmp_path / "here", "sources"))
    monkeypatch.setattr(ways, "speeds", lambda form, tried, *_: given[form][:len(tried)])
    monkeypatch.setattr(ways.measure, "__defaults__", ((*given,),))
    build.keep_code(*ways.place_of(INT8), b"2 1 0")
    monkeypatch.setattr(ways, "tried_ways", lambda form: [
        *[Way(1 if form == ROUNDED else 2, 1, level) for level in (1, 2, 0)], *[Way(4, 1, 0)] * (form == ROUNDED)])
    status, out, err = run_main(capfd, "--ways", main=qwen3_numba.main)
    assert (status, err) == (0, "") and [line.rstrip() for line in out.splitlines()] == [
        "one vector, GB/s  cache 1  cache 2  no prefetch  4 rows, no prefetch  taken",
        "bf16_rounded      10.0     20.0     9.0          8.0                  cache 2",
        "int4              11.0     20.0     9.0                               cache 2",
        "int8              10.0     9.0      10.2                              cache 1"]
    assert ways.kept_way(INT8) == Way(2, 1, 1) and ways.kept_way(INT4) == Way(2, 1, 2)
    (tmp_path / "file").touch()
    monkeypatch.setattr(ways, "code_place", lambda: (tmp_path / "file" / "here", "sources"))
    status, out, err = run_main(capfd, "--ways", main=qwen3_numba.main)
    assert (status, out) == (1, "")
    assert_one_line(err, "ways can't be kept", "NUMBA_CACHE_DIR")
