"""Seconds that Qwen3-ASR-0.6B takes for a sound, part by part, beside transformers: bench/SPEECH.md.

    python bench/speech.py [--seconds 30] [--tokens 100] [--engines int8]      without --engines: all that are installed

Random weights in the exact shape, a sound of noise, and an answer of so many tokens. Each engine has a process of its
own, and they take turns; medians. The real-time factor is the seconds of all parts, divided by those of the sound. Our
tower is NumPy's; its convolutions also stand beside the speed of one plain product of their size.
"""
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

import harness
from harness import Bench, engines_table
from peers import torch_model

NAMES = ("bf16-rounded", "int8", "torch", "torch-bf16")
PARTS = ("log-mel", "tower", "prompt", "answer")
AUDIO = {"d_model": 896, "encoder_layers": 18, "encoder_attention_heads": 14, "encoder_ffn_dim": 3584,
         "output_dim": 1024, "downsample_hidden_size": 480}
PLACES, INPUTS, OUTPUTS = 25 * 32, 9 * 480, 480  # of the second convolution, as a product
CONVOLUTIONS = 2 * 480 * (50 * 64 * 9 + PLACES * INPUTS + 13 * 16 * INPUTS)  # operations for a second of sound


def hearing_model(path: Path) -> Path:
    """A folder in transformers' layout, with random weights in the shape of Qwen3-ASR-0.6B."""
    from configs import asr_config
    from make_random_model import make_random_model, official_config
    config = asr_config("0.6B", native=True)
    return make_random_model(config | {"audio_config": config["audio_config"] | AUDIO,
                                       "text_config": official_config("0.6B")}, path, tokenizer=harness.ROOT / "demo")


class Ours:
    def __init__(self, path: Path, threads: int, name: str):
        import qwen3_numba
        self.model = qwen3_numba.load_model(path, "int8" if name == "int8" else None, threads)
        self.heard: Any = self.model.media
        _ = self.heard.weights  # read before the clock starts

    def parts(self, samples: np.ndarray, n_tokens: int) -> list[Callable[[], object]]:
        """The work of each of PARTS, each for what the one before has given."""
        import qwen3
        import qwen3_asr
        from qwen3_lib.io.cores import in_threads
        model, w, config = self.model, self.heard.weights, self.heard.config
        cache, found = model.engine.new_cache(model.config), dict[str, Any]()

        def tower() -> None:
            mel, step = found["mel"], config.n_window_infer
            found["sound"] = sound = qwen3_asr.Sound(next(qwen3_asr.SOUND_NUMBERS), np.concatenate([*in_threads(
                lambda i: qwen3_asr.audio_tower(mel[i:i + step], w, config), range(0, len(mel), step))]))
            self.heard.known[sound.number] = sound

        def prompt() -> None:
            qwen3.forward(model, [*range(1, 10), *found["sound"].ids.tolist(), *range(10, 16)], cache)

        return [lambda: found.update(mel=qwen3_asr.log_mel(samples)), tower, prompt,
                lambda: [qwen3.forward(model, [i], cache) for i in range(n_tokens)]]

    def convolutions(self) -> float:
        """Their operations per second, as a part of those of a plain product."""
        import qwen3_asr
        rng, w = np.random.default_rng(0), self.heard.weights
        x, mel = (rng.standard_normal(shape, np.float32) for shape in ((PLACES, INPUTS), (100, 128)))
        with threadpool_limits(1):  # each core has a window
            plain, ours = (min(harness.seconds(work) for _ in range(9)) for work in (
                lambda: x @ w["conv2d2.weight"].T, lambda: qwen3_asr.embed_chunk(mel, w)))
        return CONVOLUTIONS / ours / (2 * PLACES * INPUTS * OUTPUTS / plain)


class Theirs:
    def __init__(self, path: Path, threads: int, name: str):
        kind = "bfloat16" if name == "torch-bf16" else "float32"
        self.tensor, self.model = torch_model(path, threads, "Qwen3ASRForConditionalGeneration", kind)

    def parts(self, samples: np.ndarray, n_tokens: int) -> list[Callable[[], object]]:
        import torch
        from transformers.models.qwen3_asr.feature_extraction_qwen3_asr import Qwen3ASRFeatureExtractor
        model, read, found = self.model, Qwen3ASRFeatureExtractor(), dict[str, Any]()
        text = model.model.language_model

        def tower() -> None:
            mel = found["mel"]
            found["vectors"] = model.get_audio_features(mel["input_features"].to(model.dtype), mel["attention_mask"])

        def run(x: Any) -> None:
            out = text(inputs_embeds=x, past_key_values=found.get("cache"), use_cache=True)
            found["cache"] = out.past_key_values
            model.lm_head(out.last_hidden_state[:, -1:])

        def prompt() -> None:
            words, vectors = text.embed_tokens(torch.arange(1, 16)), found["vectors"].pooler_output
            run(torch.cat([words[:9], vectors.reshape(-1, words.shape[-1]), words[9:]])[None])

        return [lambda: found.update(mel=read(samples, sampling_rate=16_000, return_attention_mask=True)),
                tower, prompt, lambda: [run(text.embed_tokens(torch.tensor([[i]]))) for i in range(n_tokens)]]


def start(name: str, path: Path, _: Path, threads: int, repack: bool) -> Ours | Theirs:
    return (Theirs if name.startswith("torch") else Ours)(path, threads, name)


def measured(engine: Ours | Theirs, n_samples: int, n_tokens: int) -> list[float]:
    """The seconds of each of PARTS."""
    samples = 0.1 * np.random.default_rng(0).standard_normal(n_samples, np.float32)
    times = [time.perf_counter()]
    for work in engine.parts(samples, n_tokens):
        work()
        times.append(time.perf_counter())
    return np.diff(times).tolist()


def main() -> None:
    parser = harness.options(__doc__, 3)
    parser.add_argument("--seconds", type=int, default=30, help="of sound (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=100, help="of the answer (default: %(default)s)")
    parser.add_argument("--engines", choices=NAMES, nargs="+", default=NAMES)
    args = harness.parsed(parser)
    with Bench(args, hearing_model) as bench:
        for name in args.engines:
            bench.open(name, start)
        bench.each("parts", measured, 16_000 * args.seconds, args.tokens)
        rows = {name: np.median(bench.values[name, "parts"], axis=0) for name in bench.workers}
        shares = [bench.workers[name](Ours.convolutions) for name in bench.workers if not name.startswith("torch")]
        lines = engines_table([*(f"{part}, s" for part in PARTS), "real-time factor"], {
            name: [f"{value:.2f}" for value in row] + [f"{row.sum() / args.seconds:.3f}"]
            for name, row in rows.items()})
        bench.publish("SPEECH.md", f"{args.seconds} s of sound, {args.tokens} tokens:", "", *lines, "",
                      f"Our convolutions run at {max(shares, default=np.nan):.2f} of the speed of a plain product.")


if __name__ == "__main__":
    main()
