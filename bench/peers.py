"""The engines that the measurements compare, behind one interface.

    engine = open_engine("llama-q8_0", path, folder, threads=2, capacity=4096)
    engine.run(ids)           appends tokens to the one sequence it keeps -> logits [1, vocab_size] of the last one
    engine.run(ids, True)     -> the logits of each, [n, vocab_size], valid until the next run
    engine.truncate(length)   forgets all positions from `length` on
    engine.start(prompts)     reads prompts of several sequences -> the first token after each; step() gives one more
    engine.embed(texts)       token ids of texts -> a vector for each, [n, hidden_size]

Nothing heavy is imported before an engine is opened: a process that measures one engine's memory holds no other.
"""
import ctypes
import itertools
import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from harness import ENTRIES, alone, seconds


def matrices_of(config: Any) -> dict[str, tuple[int, int]]:
    """The matrices that a token is multiplied with: all but the embedding; lm_head, whether it is tied or not."""
    import qwen3
    import qwen3_5
    shapes = (qwen3_5 if getattr(config, "linear_layers", ()) else qwen3).tensor_shapes(config)
    return {name: shape for name, shape in shapes.items() if len(shape) == 2 and name != "model.embed_tokens.weight"}


def read_bytes(config: Any, name: str, context: int, sequences: int = 1) -> float:
    """Bytes that a step of decoding reads: all matrices once, but of experts the chosen ones; each sequence's keys,
    values and states, which are written, too."""
    nets, chosen = len(getattr(config, "linear_layers", ())), config.num_experts_per_tok / (config.num_experts or 1)
    cached = 2 * (config.num_hidden_layers - nets) * config.num_key_value_heads * config.head_dim * context
    states = 8 * nets * config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim \
        if nets else 0
    weights = sum(rows * columns * (chosen if ".experts." in matrix else 1)
                  for matrix, (rows, columns) in matrices_of(config).items())
    return weights * ENTRIES[name].weight_bytes + sequences * (cached * ENTRIES[name].kv_bytes + states)


class Engine:
    STEP = 512  # tokens at a time

    def read_prompt(self, ids: Sequence[int]) -> None:
        """The cache holds these tokens and nothing else."""
        self.truncate(0)
        for start in range(0, len(ids), self.STEP):
            self.run(ids[start:start + self.STEP])

    def prefill_speed(self, ids: Sequence[int]) -> float:
        """Tokens per second."""
        return len(ids) / seconds(lambda: self.read_prompt(ids))

    def decode_speed(self, context: int, ids: Sequence[int]) -> float:
        """Tokens per second after the first `context` positions of the cache, by the median token.

        By the mean, other work on the machine would decide: threads of OpenMP that spin for one whose core was taken
        lose tenths of a second at once.
        """
        self.truncate(context)
        return 1 / median(seconds(lambda: self.run([token])) for token in ids)

    def start_speed(self, prompt: Sequence[int]) -> float:
        return len(prompt) / seconds(lambda: self.start([prompt]))

    def steps_speed(self, prompts: Sequence[Sequence[int]], steps: int) -> float:
        """Tokens per second of all sequences together, by the median step."""
        self.start(prompts)
        return len(prompts) / median(seconds(self.step) for _ in range(steps))


class NumbaEngine(Engine):
    STEP = 10**6  # it cuts a prompt itself

    def __init__(self, path: Path, form: str | None, threads: int, capacity: int, activations: str | None = None,
                 tokenizer: bool = False):
        import qwen3_numba
        self.forward = qwen3_numba.forward
        self.model = qwen3_numba.load_model(path, form, threads, tokenizer=tokenizer, activations=activations)
        self.cache, self.capacity = self.model.engine.new_cache(self.model.config, capacity), capacity
        self.weight_bytes = sum(array.nbytes for array in self.model.weights.arrays)

    def settle(self) -> None:
        """The first tokens of an answer move matrices into large pages."""
        while self.model.weights.mapped:
            self.run([0])

    def run(self, ids: Sequence[int], all_logits: bool = False) -> np.ndarray:
        return self.forward(self.model, ids, self.cache, all_logits).reshape(-1, self.model.config.vocab_size)

    def truncate(self, length: int) -> None:
        self.cache.truncate(length)

    def start(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        from qwen3_lib.generation.batch import Batch
        batch = Batch(self.model, len(prompts), self.capacity)
        answers = [batch.add(i, prompt, eos_token_ids=(), temperature=0.0) for i, prompt in enumerate(prompts)]
        while not all(answer.token_ids for answer in answers):
            batch.step()
        self.step = batch.step
        return [answer.token_ids[0] for answer in answers]

    def embed(self, texts: list[list[int]]) -> np.ndarray:
        from qwen3_embed import pooled_states
        return np.array(pooled_states(self.model, [], texts, [], False, 0, self.model.config.context_length,
                                      lambda states, ids: states[-1]))


class NumpyEngine(NumbaEngine):
    def __init__(self, path: Path, capacity: int):
        import qwen3
        self.forward = qwen3.forward
        self.model = qwen3.load_model(path, tokenizer=False)
        self.cache = qwen3.KVCache(self.model.config, capacity)


def torch_model(path: Path, threads: int, kind: str, dtype: str = "float32") -> tuple[Any, Any]:
    """(torch.tensor, transformers' model of this class)."""
    import torch
    import transformers
    torch.set_grad_enabled(False)
    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    return torch.tensor, getattr(transformers, kind).from_pretrained(path, dtype=dtype).eval()


class TorchEngine(Engine):
    def __init__(self, path: Path, threads: int, dtype: str):
        import transformers
        self.tensor, self.model = torch_model(path, threads, "AutoModelForCausalLM", dtype)
        self.new_cache, self.weight_bytes = transformers.DynamicCache, self.model.get_memory_footprint()
        self.truncate(0)

    def run(self, ids: Sequence[int], all_logits: bool = False) -> np.ndarray:
        logits = self.model(self.tensor([list(ids)]), past_key_values=self.cache, use_cache=True,
                            logits_to_keep=0 if all_logits else 1).logits
        return logits[0].float().numpy()

    def truncate(self, length: int) -> None:
        if length == 0:
            self.cache = self.new_cache(config=self.model.config)
        else:  # crop takes minus the number of tokens to remove; 0 removes nothing
            self.cache.crop(length - self.cache.get_seq_length())

    def embed(self, texts: list[list[int]]) -> np.ndarray:
        rows = []
        for batch in (texts[start:start + 8] for start in range(0, len(texts), 8)):
            padding = [[0] * (max(map(len, batch)) - len(text)) for text in batch]
            ids = self.tensor([before + text for before, text in zip(padding, batch)])
            mask = self.tensor([before + [1] * len(text) for before, text in zip(padding, batch)])
            states = self.model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
            rows.append(states[:, -1].numpy())
        return np.concatenate(rows)


class LlamaEngine(Engine):
    """llama.cpp by its C functions, with its defaults but flash attention: a float16 cache, mapped weights.

    `capacity` positions for each of `sequences`, which have a stream of the cache each, the quicker one of its two
    layouts for them; or in all for `texts` that are embedded together. With repack=False, llama.cpp must not bring the
    weights into an order of its own.
    """
    def __init__(self, gguf: Path, threads: int, capacity: int, repack: bool = True, sequences: int = 1,
                 texts: int = 0):
        import llama_cpp
        self.api, self.length, self.capacity = llama_cpp, 0, capacity
        more = {"n_batch": capacity, "n_ubatch": capacity, "n_seq_max": texts, "kv_unified": True, "embeddings": True,
                "flash_attn_type": -1, "pooling_type": llama_cpp.LLAMA_POOLING_TYPE_LAST} if texts else {}
        self.quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)  # lives as long as it may be called
        llama_cpp.llama_log_set(self.quiet, None)
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.use_extra_bufts = repack
        self.model = llama_cpp.llama_model_load_from_file(str(gguf).encode(), model_params)
        if not self.model:
            raise RuntimeError(f"llama.cpp can't load {gguf}")
        params = llama_cpp.llama_context_default_params()
        # Flash attention is off: with it, the default, decoding at 4,096 tokens takes a CPU 1.7 times as long.
        for name, value in ({"n_ctx": capacity * sequences, "n_seq_max": sequences, "n_ubatch": 512,
                             "n_threads": threads, "n_threads_batch": threads, "flash_attn_type": 0} | more).items():
            setattr(params, name, value)
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError(f"llama.cpp has no room for {sequences} x {capacity} positions")
        self.weight_bytes = llama_cpp.llama_model_size(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))

    def decode(self, sequences: Sequence[Sequence[int]], position: int, every: bool = False) -> list[int]:
        """Adds tokens to each sequence, from this position on -> the places of the last ones, whose logits are kept."""
        api, last, at = self.api, [], 0
        batch = api.llama_batch_init(sum(map(len, sequences)), 0, 1)
        for i, ids in enumerate(sequences):
            for j, token in enumerate(ids):
                batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position + j, 1
                batch.seq_id[at][0], batch.logits[at] = i, every or j == len(ids) - 1
                at += 1
            last.append(at - 1)
        batch.n_tokens = at
        status = api.llama_decode(self.context, batch)
        api.llama_batch_free(batch)
        if status:
            raise RuntimeError(f"llama_decode failed with {status}")
        return last

    def run(self, ids: Sequence[int], all_logits: bool = False) -> np.ndarray:
        self.decode([ids], self.length, all_logits)
        self.length += len(ids)
        return np.ctypeslib.as_array(self.api.llama_get_logits(self.context),
                                     (len(ids) if all_logits else 1, self.vocab_size))

    def truncate(self, length: int) -> None:
        self.api.llama_memory_seq_rm(self.api.llama_get_memory(self.context), 0, length, -1)
        self.length = length

    def start(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        self.tokens, self.length = self.best(prompts, 0), len(prompts[0])
        return self.tokens

    def step(self) -> None:
        self.tokens = self.best([[token] for token in self.tokens], self.length)
        self.length += 1

    def best(self, sequences: Sequence[Sequence[int]], position: int) -> list[int]:
        """The most likely token after each sequence."""
        rows = (self.api.llama_get_logits_ith(self.context, i) for i in self.decode(sequences, position))
        return [int(np.ctypeslib.as_array(row, (self.vocab_size,)).argmax()) for row in rows]

    def embed(self, texts: list[list[int]]) -> np.ndarray:
        """As many texts at a time as fit; llama.cpp pools them itself."""
        rows, size = list[np.ndarray](), self.api.llama_model_n_embd(self.model)
        while len(rows) < len(texts):
            left = texts[len(rows):]
            n = int(np.searchsorted(np.cumsum([*map(len, left)]), self.capacity, "right"))
            self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
            self.decode(left[:n], 0, every=True)
            vectors = (ctypes.cast(self.api.llama_get_embeddings_seq(self.context, row), ctypes.POINTER(ctypes.c_float))
                       for row in range(n))
            rows += [np.array(np.ctypeslib.as_array(vector, (size,))) for vector in vectors]
        return np.array(rows)


class AnswerEngine:
    """One that continues no sequence: each measurement is an answer, times(ids, n) the seconds of its n tokens."""
    times: Callable[[Sequence[int], int], Sequence[float]]
    first = itertools.count()  # tokens: another one in each prompt, or OpenVINO's prefix cache would answer

    def prefill_speed(self, ids: Sequence[int]) -> float:
        return len(ids) / self.times([next(self.first), *ids[1:]], 1)[0]

    def decode_speed(self, context: int, ids: Sequence[int]) -> float:
        """Tokens per second after a prompt of `context` tokens, by the median token."""
        return 1 / median(self.times(np.resize(ids, context).tolist(), len(ids) + 1)[1:])


class OpenVinoEngine(AnswerEngine):
    """OpenVINO GenAI with its defaults, timed by itself; held to AVX2, with those of such a CPU, or it would fail."""

    def __init__(self, folder: Path, threads: int):
        import openvino
        import openvino_genai
        self.tensor, self.api = openvino.Tensor, openvino_genai
        more = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0} \
            if os.environ.get("ONEDNN_MAX_CPU_ISA") == "AVX2" else {}
        self.pipeline = openvino_genai.LLMPipeline(folder, "CPU", INFERENCE_NUM_THREADS=threads, **more)

    def times(self, ids: Sequence[int], n: int) -> Sequence[float]:
        config = self.api.GenerationConfig(max_new_tokens=n, ignore_eos=True, do_sample=False,
                                           apply_chat_template=False)
        prompt = np.array([ids], np.int64)
        inputs = self.api.TokenizedInputs(self.tensor(prompt), self.tensor(np.ones_like(prompt)))
        metrics = self.pipeline.generate(inputs, config).perf_metrics
        return [metrics.get_ttft().mean / 1e3, *np.array(metrics.raw_metrics.m_durations) / 1e6]


class CTranslate2Engine(AnswerEngine):
    def __init__(self, folder: Path, threads: int):
        import ctranslate2
        self.words = json.loads((folder / "vocabulary.json").read_text("utf-8"))
        self.model = ctranslate2.Generator(str(folder), compute_type="int8", intra_threads=threads)

    def times(self, ids: Sequence[int], n: int) -> Sequence[float]:
        times = [time.perf_counter()]
        self.model.generate_batch([[self.words[i] for i in ids]], max_length=n, min_length=n, end_token=[],
                                  include_prompt_in_result=False, callback=lambda _: times.append(time.perf_counter()))
        return np.diff(times)


class IkEngine:
    """ik_llama.cpp by its llama-bench, a process for each measurement. It repacks weights if that is faster.

    Flash attention, its default, makes prompts faster and decoding no slower.
    """
    def __init__(self, program: Path, gguf: Path, threads: int):
        if not program.exists():
            raise RuntimeError("it is not built (--ik FOLDER)")
        self.command = [program, "-m", gguf, "-t", str(threads), "-o", "json"]
        speeds = [[max(each["samples_ts"]) for each in self.measured(repack, "-p", "512", "-n", "16", "-r", "2")]
                  for repack in "01"]
        self.prompt, self.decode = ("01"[plain < repacked] for plain, repacked in zip(*speeds))

    def measured(self, repack: str, *work: str) -> list[dict]:
        """What llama-bench prints of each work."""
        done = subprocess.run([*self.command, "-rtr", repack, *work], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"llama-bench: {done.stderr.strip().splitlines()[-1]}")
        return json.loads(done.stdout)

    def prefill_speed(self, ids: Sequence[int]) -> float:
        return self.measured(self.prompt, "-p", str(len(ids)), "-n", "0", "-r", "1")[0]["avg_ts"]

    def decode_speed(self, context: int, ids: Sequence[int]) -> float:
        return self.measured(self.decode, "-p", "0", "-n", "0", "-gp", f"{context},{len(ids)}", "-r", "1")[0]["avg_ts"]


def build_ik(sources: Path, folder: Path) -> None:
    """Compiles llama-bench of ik_llama.cpp with the options in $CMAKE_ARGS, as pip does llama-cpp-python."""
    more = ["-DCMAKE_C_FLAGS=-w", "-DCMAKE_CXX_FLAGS=-w", "-DGGML_IQK_FA_ALL_QUANTS=OFF"]  # of caches, only float16
    more += shlex.split(os.environ.get("CMAKE_ARGS", ""))
    for command in (["-S", sources, "-B", folder, *more],
                    ["--build", folder, "--target", "llama-bench", f"-j{os.cpu_count()}"]):
        subprocess.run(["cmake", *command], check=True, stdout=subprocess.DEVNULL)


def open_engine(name: str, path: Path, folder: Path, threads: int, capacity: int, repack: bool = True,
                **several: int) -> Any:
    """The engine of an entry with the model in `path` and room for `capacity` positions; `folder`: of peers' files."""
    if name.startswith("llama"):
        return LlamaEngine(peer_file(path, folder, name), threads, capacity, repack, **several)
    if name == "numpy":
        return NumpyEngine(path, capacity)
    if name.startswith("torch"):
        return TorchEngine(path, threads, "bfloat16" if name == "torch-bf16" else "float32")
    if name.startswith("openvino"):
        return OpenVinoEngine(peer_file(path, folder, name), threads)
    if name.startswith("ct2"):
        return CTranslate2Engine(peer_file(path, folder, name), threads)
    if name.startswith("ik"):
        return IkEngine(folder / "ik_llama.cpp/bin/llama-bench", peer_file(path, folder, ENTRIES[name].file), threads)
    if file := ENTRIES[name].file:
        return NumbaEngine(peer_file(path, folder, file), None, threads, capacity)
    if name.startswith("bf16"):
        return NumbaEngine(path, None, threads, capacity, "bf16" if name == "bf16-rounded" else "f32", bool(several))
    return NumbaEngine(path, name, threads, capacity, tokenizer=bool(several))


def peer_file(path: Path, folder: Path, name: str, words: bool = False) -> Path:
    """The model in `path` as a peer reads it, in `folder`; written if it isn't there yet."""
    kind = name.partition("-")[0]
    file = folder / (f"{name}.gguf" if kind == "llama" else name)
    if not file.exists():
        write = {"openvino": export_openvino, "ct2": export_ctranslate2, "llama": write_gguf}[kind]
        alone(write, path, unfinished := folder / f"{name}.unfinished", name, words)
        unfinished.rename(file)
    return file


def export_openvino(path: Path, file: Path, name: str, _: bool) -> None:
    """By optimum-cli, whose packages need an environment of their own."""
    form = name.removeprefix("openvino-")
    more = ["--sym", "--group-size", "32", "--ratio", "1.0"] if form == "int4" else []
    if (program := shutil.which("optimum-cli")) is None:
        raise RuntimeError("optimum-cli is not in $PATH (pip install optimum-intel[openvino] nncf)")
    done = subprocess.run([program, "export", "openvino", "--model", path, "--task", "text-generation-with-past",
                           "--weight-format", form, *more, file], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"optimum-cli: {done.stderr.strip().splitlines()[-1]}")


def export_ctranslate2(path: Path, file: Path, name: str, _: bool) -> None:
    from ctranslate2.converters import TransformersConverter
    TransformersConverter(str(path)).convert(str(file), quantization=name.removeprefix("ct2-"), force=True)


def write_gguf(path: Path, file: Path, name: str, words: bool) -> None:
    """Writes the weights of the model in `path` for llama.cpp, in the format of the entry `name`.

    All matrices get the format, rounded as by llama.cpp's own quantizer; norms and routers stay float32. The K formats
    mix several ones, as llama.cpp itself chooses. Without `words`, the file has no tokenizer.
    """
    import test_gguf_file as files
    if "_k" in name:
        return quantize_gguf(peer_file(path, file.parent, "llama-bf16"), file, ENTRIES[name].format)
    raw, keys = json.loads((path / "config.json").read_text()), files.tokenizer_keys(path)
    raw = raw.get("text_config", raw)
    kind, n = raw["model_type"].removesuffix("_text").replace("_", ""), raw["vocab_size"]
    changes = {key: keys[key][:n] for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type")} if words else \
        dict.fromkeys(keys) | {"tokenizer.ggml.model": "no_vocab"}
    write = files.write_hybrid if kind.startswith("qwen35") else files.write_gguf
    write(path, file, ENTRIES[name].format.upper(), **changes | {f"{kind}.vocab_size": n})


def quantize_gguf(source: Path, target: Path, name: str) -> None:
    """llama.cpp's own quantizer."""
    import llama_cpp
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(quiet, None)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
    if status := llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama_model_quantize failed with {status}")

