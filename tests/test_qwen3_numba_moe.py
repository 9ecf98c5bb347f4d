"""The mixture of experts in the fast engine: against qwen3.py. Bits: test_qwen3_numba_exact.py."""
import json

import numpy as np
import pytest

import qwen3
from configs import VOCABULARY
from helpers import logits_of, random_ids, run_main, with_tensors
from make_random_model import make_random_model
from packed import FromPython
from qwen3_lib.io.facts import weight_bytes
from qwen3_lib.kernels import experts
from qwen3_lib.kernels.layout import ROUTING
from test_qwen3_moe import MOE, fuse
from test_qwen3_numba import distance, tensor_of
import qwen3_numba as fast

pytestmark = pytest.mark.core
kernels = FromPython(experts)


# ---- The same logits -------------------------------------------------------------------------------------------------

CASES = {
    "all layers sparse": ({}, "float32"), "bfloat16": ({}, "bfloat16"), "float16": ({}, "float16"),
    "sparse step 2": ({"decoder_sparse_step": 2}, "bfloat16"), "a dense layer": ({"mlp_only_layers": [1]}, "float32"),
    "not normalised": ({"norm_topk_prob": False}, "float32"), "all experts": ({"num_experts_per_tok": 8}, "bfloat16"),
    "one expert": ({"num_experts_per_tok": 1}, "float32"), "tied": ({"tie_word_embeddings": True}, "bfloat16"),
    "odd sizes": ({"hidden_size": 37, "moe_intermediate_size": 51, "head_dim": 6, "num_experts": 5}, "bfloat16"),
    "300 experts": ({"num_experts": 300, "num_hidden_layers": 1}, "bfloat16"),
    "experts wider than dense layers": ({"moe_intermediate_size": 160, "mlp_only_layers": [0]}, "bfloat16"),
}


@pytest.mark.parametrize("case", CASES)
def test_logits(case, tmp_path):
    changes, dtype = CASES[case]
    path = make_random_model(MOE | changes, tmp_path, dtype)
    ids = random_ids(70)
    expected = logits_of(qwen3.load_model(path), ids)
    for threads in (1, 3):
        model = fast.load_model(path, threads=threads, kv_dtype="f32", activations="f32")
        assert distance(logits_of(model, ids), expected) < 1e-5


def test_fused_experts(tmp_path):
    """The layout of transformers 5: the same bits as from one tensor per expert, quantized, too."""
    path, ids = make_random_model(MOE, tmp_path, "float32"), random_ids(20)
    separate = [logits_of(fast.load_model(path, quantize), ids) for quantize in (None, "int8")]
    fuse(path)
    for quantize, expected in zip((None, "int8"), separate):
        assert np.array_equal(logits_of(fast.load_model(path, quantize), ids), expected)


def test_a_router_with_large_logits(tmp_path):
    """Of +-1,000: nothing overflows, and the shares are those of qwen3.py."""
    chosen, shares = np.empty(2, np.int64), np.empty(2, np.float32)
    kernels.choose(np.array([-1000, 1000, 999, -1000], np.float32), np.array([(0, 0)], ROUTING)[0], chosen, shares)
    assert chosen.tolist() == [1, 2]
    np.testing.assert_allclose(shares, [1 / (1 + np.exp(-1)), 1 / (1 + np.e)], rtol=1e-5)
    path = make_random_model(MOE, tmp_path, "float32")
    name = "model.layers.0.mlp.gate.weight"
    with_tensors(path / "model.safetensors", {name: 300 * np.array(tensor_of(path, name).data)})
    ids = random_ids(40)
    model = fast.load_model(path, kv_dtype="f32", activations="f32")
    assert distance(logits_of(model, ids), logits_of(qwen3.load_model(path), ids)) < 1e-3


def test_equal_experts_are_chosen_in_their_order(tmp_path):
    path = make_random_model(MOE | {"num_experts_per_tok": 2}, tmp_path, "float32")
    router = np.array(tensor_of(path, "model.layers.0.mlp.gate.weight").data)
    with_tensors(path / "model.safetensors", {"model.layers.0.mlp.gate.weight": 0 * router})
    ids = random_ids(20)
    expected = logits_of(qwen3.load_model(path), ids)
    assert distance(logits_of(fast.load_model(path, kv_dtype="f32", activations="f32"), ids), expected) < 1e-5


def test_only_chosen_experts_count(tmp_path, monkeypatch):
    """All others are NaN."""
    path, ids, moe, chosen = make_random_model(MOE, tmp_path, "float32"), [5], qwen3.moe, []

    def noted(x, gate, experts, config):
        chosen.append(np.argsort(-qwen3.linear(x, gate)[0], kind="stable")[:config.num_experts_per_tok])
        return moe(x, gate, experts, config)

    monkeypatch.setattr(qwen3, "moe", noted)
    expected = logits_of(qwen3.load_model(path), ids)
    with_tensors(path / "model.safetensors", {
        f"model.layers.{i}.mlp.experts.{e}.up_proj.weight": np.full((24, 32), np.nan)
        for i, some in enumerate(chosen) for e in {*range(8)} - {*some}})
    assert distance(logits_of(fast.load_model(path, kv_dtype="f32", activations="f32"), ids), expected) < 1e-5


# ---- The kernels' steps ----------------------------------------------------------------------------------------------

def test_choose():
    rng, n = np.random.default_rng(0), 40
    for k in (1, 3, n):
        logits = np.round(rng.normal(0, 2, n)).astype(np.float32)  # with ties
        expected = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum()
        order = np.argsort(-expected, kind="stable")[:k]
        for normalized in (0, 1):
            chosen, shares = np.empty(k, np.int64), np.empty(k, np.float32)
            kernels.choose(logits.copy(), np.array([(normalized, 0)], ROUTING)[0], chosen, shares)
            assert np.array_equal(chosen, order)
            np.testing.assert_allclose(shares, expected[order] / (expected[order].sum() if normalized else 1), 1e-5)
    for broken in (np.nan, np.inf):  # each expert once, and nothing that passes for a number
        logits[7] = broken
        kernels.choose(logits.copy(), np.array([(0, 0)], ROUTING)[0], chosen, shares)
        assert sorted(chosen) == [*range(n)] and np.isnan(shares).all()


def test_pairs_are_sorted_and_shared():
    """Each row of each expert belongs to one part, whatever their number; the pairs are in the experts' order."""
    rng, n = np.random.default_rng(0), 12
    for m, k in ((1, 3), (40, 3), (7, 12)):
        chosen = np.array([rng.permutation(n)[:k] for _ in range(m)])
        rows, starts = chosen.copy(), np.full(n + 2, -1)
        kernels.sort_by_expert(rows, starts)
        assert np.array_equal(np.sort(rows.reshape(-1)), np.arange(m * k))
        assert np.array_equal(np.diff(starts[:n + 1]), np.bincount(chosen.reshape(-1), minlength=n))
        for (t, r), row in np.ndenumerate(rows):
            assert starts[chosen[t, r]] <= row < starts[chosen[t, r] + 1]
        for size in (5, 64, 100):
            for n_parts in (1, 2, 5, 64):
                for first, end in zip(starts[:n], starts[1:n + 1]):
                    parts = [kernels.expert_share(size, first, end, m * k, (part, part + 1), n_parts)
                             for part in range(n_parts) if end > first]
                    done = [row for start, stop in parts for row in range(start, stop)]
                    assert done == ([*range(size)] if end > first else [])
                    assert all(start % 32 == 0 for start, stop in parts if start < stop)


# ---- The command line ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("main", [qwen3.main, fast.main])
def test_a_mixture_of_experts_from_the_command_line(main, tmp_path, capfd):
    folder = make_random_model(MOE | {"vocab_size": VOCABULARY}, tmp_path / "moe", "float32")
    listed = json.loads(run_main(capfd, "--list", "--json", "--model", folder, main=main)[1].splitlines()[-1])
    assert listed["runs"] and listed["why_not"] is None
    status, _, err = run_main(capfd, "--model", folder, "--max-tokens", 4, "--stats", "Hello", main=main)
    assert status == 0 and "a token goes through" in err


def test_bytes_that_a_token_reads(tmp_path):
    """Of 8 experts 3, and all else once, the router in float32; the embedding is only looked up."""
    model = fast.load_model(make_random_model(MOE | {"hidden_size": 64, "moe_intermediate_size": 32}, tmp_path))
    attention = 64 * 64 + 2 * 32 * 64 + 64 * 64
    assert weight_bytes(model) == 2 * (320 * 64 + 3 * (attention + 3 * 3 * 32 * 64)) + 4 * 3 * 8 * 64
