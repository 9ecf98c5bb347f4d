"""Tokens per second of a mixture of experts, by this engine and by llama.cpp, in one run.

    python bench/moe.py                  4 layers of Qwen3-30B-A3B at full width; 15 GB of memory and of disk

Random weights; the two engines of a format are in memory together. The output of attention, much alike for all tokens,
must not outweigh the embedding, or all choose the same few experts: so the embedding is made large and o_proj small,
and 512 different tokens choose nearly all experts of each layer. The text goes to bench/MOE.md.
"""
from functools import partial
from typing import Any

import numpy as np

import harness
from harness import ENTRIES, PAIRS, Bench, engines_table
from peers import matrices_of, open_engine

PROMPT, CONTEXT, STEPS = 512, 16, 48  # tokens
N_PROMPTS = 16  # prompts of CONTEXT tokens, whose first tokens are compared


def mixture() -> dict[str, Any]:
    """config.json of Qwen3-30B-A3B."""
    from make_random_model import official_config
    return official_config("8B") | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4}


def token_bytes(config: Any, name: str) -> float:
    """The bytes of weights that a token reads: all matrices but the embedding, and of the experts the chosen ones."""
    from qwen3_lib.kernels.layout import packed_shape
    from qwen3_lib.kernels.packing import PACKED, packed_form
    total = 0.0
    for tensor, shape in matrices_of(config).items():
        router = tensor.endswith(".mlp.gate.weight")
        size = np.prod(packed_shape(*shape, packed_form(tensor, name))) if name in PACKED and not router else \
            np.prod(shape) * (4 if router else ENTRIES[name].weight_bytes)
        total += float(size) * (config.num_experts_per_tok / config.num_experts if ".experts." in tensor else 1)
    return total


def first_tokens(engine: Any, ids: list[int]) -> list[int]:
    """The most likely token after each prompt."""
    prompts = np.reshape(ids[:N_PROMPTS * CONTEXT], (N_PROMPTS, CONTEXT)).tolist()
    return [engine.truncate(0) or int(engine.run(prompt)[0].argmax()) for prompt in prompts]


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--layers", type=int, default=4, help="default: %(default)s")
    args = harness.parsed(parser)
    from make_random_model import make_random_model
    about = mixture() | {"num_hidden_layers": args.layers}
    make = partial(make_random_model, about, shards=args.layers + 1,
                   scales={"embed_tokens": about["hidden_size"] ** 0.5, "o_proj": 0.125})
    with Bench(args, make) as bench:
        config, rows = bench.config, dict[str, list[str]]()
        ids = np.random.default_rng(0).permutation(config.vocab_size)[:PROMPT].tolist()
        for pair in PAIRS.items():
            for name in pair:
                bench.open(name, open_engine, PROMPT + STEPS, check=partial(first_tokens, ids=ids))
            bench.each("prefill", "prefill_speed", ids)
            bench.each("decode", "decode_speed", CONTEXT, ids[-STEPS:])
            for name in [*bench.workers]:
                read = token_bytes(config, name)
                rows[name] = [f"{read / 1e9:.2f}", f"{bench.median(name, 'decode'):.2f}",
                              f"{bench.median(name, 'prefill'):.1f}", f"{bench.share(name, 'decode', read):.2f}",
                              bench.same(name)]
                bench.close(name)
                (bench.folder / f"{name}.gguf").unlink(missing_ok=True)
        bench.publish("MOE.md", f"{config.num_hidden_layers} layers of width {config.hidden_size}, each with "
                      f"{config.num_experts} experts, {config.num_experts_per_tok} of them for a token:", "",
                      *engines_table(["read per token, GB", f"decode at {CONTEXT}, tokens/s",
                                      f"prefill {PROMPT}, tokens/s", "decode: of the bandwidth",
                                      "first tokens as the first engine"], rows), "",
                      *bench.ratios("decode", "prefill"))


if __name__ == "__main__":
    main()
