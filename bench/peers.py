"""The engines that bench/run.py, bench/batch.py and bench/quality.py compare, behind one interface.

    engine = open_engine("llama-q8_0", path, gguf_folder, threads=2, capacity=4096)
    engine.run(ids)           appends tokens to the one sequence it keeps -> logits [1, vocab_size] of the last one
    engine.run(ids, True)     -> the logits of each, [n, vocab_size], valid until the next run
    engine.truncate(length)   forgets all positions from `length` on

    python bench/peers.py model.gguf 5 17 3    llama.cpp's start-up: prints the first token after these ids

Nothing heavy is imported before an engine is opened: a process that measures one engine's memory holds no other.
"""
import argparse
import ctypes
import importlib.util
import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]


@dataclass(frozen=True)
class Entry:
    """A row of the tables. `weight_bytes` counts the bytes of a weight, its share of the group's scale included."""
    engine: str
    format: str
    weight_bytes: float
    kv_bytes: int  # of a number in the KV cache
    needs: tuple[str, ...]  # packages
    for_speed: bool = True  # else only its quality is compared
    file: str = ""  # the entry whose GGUF file it reads


# What is compared with each other stands together, so that it is also measured close together.
ENTRIES = {
    "bf16": Entry("this engine", "bf16", 2, 2, ("numba",)),
    "bf16-rounded": Entry("this engine", "bf16, activations too", 2, 2, ("numba",)),
    "llama-bf16": Entry("llama.cpp", "bf16", 2, 2, ("llama_cpp", "gguf")),
    "openvino-fp16": Entry("OpenVINO", "bf16", 2, 1, ("openvino_genai",)),  # computed in bf16 if the CPU can
    "int8": Entry("this engine", "int8", 34 / 32, 2, ("numba",)),
    "llama-q8_0": Entry("llama.cpp", "Q8_0", 34 / 32, 2, ("llama_cpp", "gguf")),
    "openvino-int8": Entry("OpenVINO", "int8", 1, 1, ("openvino_genai",)),
    "int4": Entry("this engine", "int4", 5.06 / 8, 2, ("numba",)),  # of the 0.6B: some matrices have more bits
    "llama-q4_0": Entry("llama.cpp", "Q4_0", 18 / 32, 2, ("llama_cpp", "gguf")),
    "openvino-int4": Entry("OpenVINO", "int4", 4.5 / 8, 1, ("openvino_genai",)),
    "q4_k_m": Entry("this engine", "Q4_K_M", 5.42 / 8, 2, ("numba", "llama_cpp", "gguf"), file="llama-q4_k_m"),
    "llama-q4_k_m": Entry("llama.cpp", "Q4_K_M", 5.33 / 8, 2, ("llama_cpp", "gguf")),
    "llama-q5_k_m": Entry("llama.cpp", "Q5_K_M", 5.9 / 8, 2, ("llama_cpp", "gguf"), False),
    "llama-q6_k": Entry("llama.cpp", "Q6_K", 6.6 / 8, 2, ("llama_cpp", "gguf"), False),
    "llama-iq4_xs": Entry("llama.cpp", "IQ4_XS", 4.6 / 8, 2, ("llama_cpp", "gguf"), False),
    "numpy": Entry("plain NumPy", "float32", 4, 4, ()),
    "torch": Entry("transformers + torch", "float32", 4, 4, ("torch", "transformers")),
}
# Where the name to install isn't the name to import.
PACKAGES = {"llama_cpp": "llama-cpp-python", "openvino_genai": "openvino-genai"}


def missing_packages(name: str) -> list[str]:
    """The packages that an engine needs and that are not installed."""
    missing = [package for package in ENTRIES[name].needs if importlib.util.find_spec(package) is None]
    return [PACKAGES.get(package, package) for package in missing]


def opened(name: str, start: Callable[[bool], Any], notes: list[str]) -> Any:
    """start(True): what opens an engine in a process of its own -> its result; None if it can't, with a note why.

    llama.cpp gets a second chance: on some CPUs it crashes when it brings the weights into an order of its own, which
    start(False) forbids.
    """
    reason = f"{', '.join(missing)} not installed" if (missing := missing_packages(name)) else ""
    for repack in () if missing else (True, False) if name.startswith("llama") else (True,):
        try:
            result = start(repack)
        except RuntimeError as error:  # the engine's own, or because its process has crashed
            reason = str(error)
            continue
        if not repack:
            notes.append(f"{name} runs without repacked weights (use_extra_bufts), with which it failed: {reason}")
        return result
    notes.append(f"{name} is left out: {reason}")
    return None


class NumbaEngine:
    def __init__(self, path: Path, form: str | None, threads: int, capacity: int, activations: str | None = None):
        import qwen3_numba
        self.forward = qwen3_numba.forward
        self.model = qwen3_numba.load_model(path, form, threads, tokenizer=False, activations=activations)
        self.cache = self.model.engine.new_cache(self.model.config, capacity)
        self.weight_bytes = sum(array.nbytes for array in self.model.weights.arrays)

    def run(self, ids: Sequence[int], all_logits: bool = False) -> np.ndarray:
        return self.forward(self.model, ids, self.cache, all_logits).reshape(-1, self.model.config.vocab_size)

    def truncate(self, length: int) -> None:
        self.cache.truncate(length)


class NumpyEngine(NumbaEngine):
    def __init__(self, path: Path, capacity: int):
        import qwen3
        self.forward = qwen3.forward
        self.model = qwen3.load_model(path, tokenizer=False)
        self.cache = qwen3.KVCache(self.model.config, capacity)


class TorchEngine:
    def __init__(self, path: Path, threads: int):
        import torch
        import transformers
        torch.set_grad_enabled(False)
        torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()
        self.tensor, self.new_cache = torch.tensor, transformers.DynamicCache
        self.model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.cache = self.new_cache(config=self.model.config)

    def run(self, ids: Sequence[int], all_logits: bool = False) -> np.ndarray:
        logits = self.model(self.tensor([list(ids)]), past_key_values=self.cache, use_cache=True,
                            logits_to_keep=0 if all_logits else 1).logits
        return logits[0].numpy()

    def truncate(self, length: int) -> None:
        if length == 0:
            self.cache = self.new_cache(config=self.model.config)
        else:  # crop takes minus the number of tokens to remove; 0 removes nothing
            self.cache.crop(length - self.cache.get_seq_length())


class LlamaEngine:
    """llama.cpp by its C functions, with its defaults but flash attention: a float16 cache, mapped weights.

    `capacity` positions for each of `sequences`. With repack=False, llama.cpp must not bring the weights into an order
    of its own.
    """

    def __init__(self, gguf: Path, threads: int, capacity: int, sequences: int = 1, repack: bool = True):
        import llama_cpp
        self.api = llama_cpp
        self.quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)  # lives as long as it may be called
        llama_cpp.llama_log_set(self.quiet, None)
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.use_extra_bufts = repack
        self.model = llama_cpp.llama_model_load_from_file(str(gguf).encode(), model_params)
        if not self.model:
            raise RuntimeError(f"llama.cpp can't load {gguf}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_ubatch = capacity * sequences, sequences, 512
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = 0  # off: with it, the default, decoding at 4,096 tokens takes a CPU 1.7 times as long
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp has no room for {sequences} x {capacity} positions")
        self.weight_bytes = llama_cpp.llama_model_size(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def run(self, ids: Sequence[int], all_logits: bool = False) -> np.ndarray:
        n = len(ids)
        tokens, wanted = (self.api.llama_token * n)(*ids), (ctypes.c_int8 * n)(*[1] * n)
        batch = self.api.llama_batch_get_one(tokens, n)
        if all_logits:
            batch.logits = wanted
        if status := self.api.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode failed with {status}")
        return np.ctypeslib.as_array(self.api.llama_get_logits(self.context), (n if all_logits else 1, self.vocab_size))

    def truncate(self, length: int) -> None:
        self.api.llama_memory_seq_rm(self.api.llama_get_memory(self.context), 0, length, -1)


class OpenVinoEngine:
    """OpenVINO GenAI with its defaults. It continues no sequence: each measurement is an answer, timed by OpenVINO."""

    def __init__(self, folder: Path, threads: int):
        import openvino
        import openvino_genai
        self.tensor, self.api = openvino.Tensor, openvino_genai
        self.pipeline = openvino_genai.LLMPipeline(folder, "CPU", INFERENCE_NUM_THREADS=threads)
        self.first = itertools.count()  # tokens: another one in each prompt, or OpenVINO's prefix cache would answer

    def answer(self, ids: Sequence[int], n: int) -> Any:
        """Times of an answer of n tokens to the prompt `ids`."""
        config = self.api.GenerationConfig(max_new_tokens=n, ignore_eos=True, do_sample=False,
                                           apply_chat_template=False)
        prompt = np.array([ids], np.int64)
        inputs = self.api.TokenizedInputs(self.tensor(prompt), self.tensor(np.ones_like(prompt)))
        return self.pipeline.generate(inputs, config).perf_metrics

    def prefill_speed(self, ids: Sequence[int]) -> float:
        return len(ids) / self.answer([next(self.first), *ids[1:]], 1).get_ttft().mean * 1e3

    def decode_speed(self, context: int, ids: Sequence[int]) -> float:
        """Tokens per second after a prompt of `context` tokens, by the median token."""
        prompt = np.resize(ids, context)
        return 1e6 / median(self.answer(prompt, len(ids) + 1).raw_metrics.m_durations)


def export_openvino(path: Path, folder: Path, name: str) -> None:
    """Writes the model in `path` for OpenVINO, by optimum-cli, whose packages need an environment of their own."""
    form = name.removeprefix("openvino-")
    more = ["--sym", "--group-size", "32", "--ratio", "1.0"] if form == "int4" else []
    if (program := shutil.which("optimum-cli")) is None:
        raise RuntimeError("optimum-cli is not in $PATH (pip install optimum-intel[openvino] nncf)")
    done = subprocess.run([program, "export", "openvino", "--model", path, "--task", "text-generation-with-past",
                           "--weight-format", form, *more, folder / name], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"optimum-cli: {done.stderr.strip().splitlines()[-1]}")


def open_engine(name: str, path: Path, gguf_folder: Path, threads: int, capacity: int, repack: bool = True) -> Any:
    """The engine of an entry with the model in `path`, with room for `capacity` positions."""
    if name.startswith("llama"):
        return LlamaEngine(gguf_file(gguf_folder, name), threads, capacity, repack=repack)
    if name == "numpy":
        return NumpyEngine(path, capacity)
    if name == "torch":
        return TorchEngine(path, threads)
    if name.startswith("openvino"):
        return OpenVinoEngine(gguf_folder / name, threads)
    if file := ENTRIES[name].file:
        return NumbaEngine(gguf_file(gguf_folder, file), None, threads, capacity)
    if name == "bf16-rounded":
        return NumbaEngine(path, None, threads, capacity, "bf16")
    return NumbaEngine(path, None if name == "bf16" else name, threads, capacity)


# ----------------------------------------------------------------------------------------------------------------------
# GGUF: the same weights in a file for llama.cpp, which has no tokenizer
# ----------------------------------------------------------------------------------------------------------------------


def gguf_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.gguf"


def write_gguf(path: Path, folder: Path, name: str, copies: int = 1, words: bool = False) -> None:
    """Writes the weights of the model in `path` for llama.cpp, in the format of the entry `name`.

    All matrices get the format, the embedding, too; norms and routers stay float32. It rounds as llama.cpp's own
    quantizer does. The K and IQ formats mix several ones, as llama.cpp itself chooses. In a mixture of experts, those
    of a layer become one tensor. With `copies`, the one layer of the model becomes so many equal ones, held in memory
    once. With `words`, the file has the tokenizer, too, without which llama.cpp makes no text.
    """
    import gguf
    import qwen3
    from qwen3_lib.io.models import Checkpoint
    if "_k" in name or "iq" in name:
        if not gguf_file(folder, "llama-bf16").exists():
            write_gguf(path, folder, "llama-bf16")
        quantize_gguf(gguf_file(folder, "llama-bf16"), gguf_file(folder, name), ENTRIES[name].format)
        return
    config, stored = Checkpoint(path).config(), Checkpoint(path).stored()
    kind = gguf.GGMLQuantizationType[ENTRIES[name].format.upper()]
    architecture = gguf.MODEL_ARCH.QWEN3MOE if config.num_experts else gguf.MODEL_ARCH.QWEN3
    writer = gguf.GGUFWriter(gguf_file(folder, name), gguf.MODEL_ARCH_NAMES[architecture])
    add_metadata(writer, replace(config, num_hidden_layers=config.num_hidden_layers * copies), path if words else None)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)

    def converted(tensor: str, target: Any) -> np.ndarray:
        dtype, data, *_ = stored[tensor]
        if dtype == "BF16" and target is gguf.GGMLQuantizationType.BF16:
            return data.view(np.uint8)
        return gguf.quantize(qwen3.to_float32(stored[tensor]), target)

    for tensor in [tensor for tensor in stored if ".experts." not in tensor or ".experts.0." in tensor]:
        plain = stored[tensor].data.ndim == 1 or tensor.endswith(".mlp.gate.weight")
        target = gguf.GGMLQuantizationType.F32 if plain else kind
        if ".experts.0." in tensor:
            values = np.stack([converted(tensor.replace(".experts.0.", f".experts.{i}."), target)
                               for i in range(config.num_experts)])
        else:
            values = converted(tensor, target)
        found = names.get_name(tensor.replace(".experts.0.", ".experts."), try_suffixes=(".weight",))
        for i in range(copies if found.startswith("blk.") else 1):
            writer.add_tensor(found if copies == 1 else found.replace("blk.0.", f"blk.{i}."), values, raw_dtype=target)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize_gguf(source: Path, target: Path, name: str) -> None:
    """llama.cpp's own quantizer."""
    import llama_cpp
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, None)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
    if status := llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama_model_quantize failed with {status}")


def add_metadata(writer: Any, config: Any, tokenizer: Path | None) -> None:
    """The model's sizes, and the tokenizer in a folder, under the names by which llama.cpp looks for them."""
    if tokenizer:
        from test_gguf_file import tokenizer_keys
        keys = {name.rpartition(".")[2]: value for name, value in tokenizer_keys(tokenizer).items()}
        n = config.vocab_size
        unused = range(len(keys["tokens"]), n)
        writer.add_tokenizer_model(keys["model"])
        writer.add_tokenizer_pre(keys["pre"])
        writer.add_token_list((keys["tokens"] + [f"[PAD{i}]" for i in unused])[:n])
        writer.add_token_types((keys["token_type"] + [5] * len(unused))[:n])
        writer.add_token_merges(keys["merges"])
        writer.add_eos_token_id(keys["eos_token_id"])
    else:
        writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.num_experts:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gguf", type=Path)
    parser.add_argument("ids", type=int, nargs="+")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    print(LlamaEngine(args.gguf, args.threads, 256).run(args.ids)[0].argmax())


if __name__ == "__main__":
    main()
