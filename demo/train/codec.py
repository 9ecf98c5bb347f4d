"""The codec of `speaking.py`: from sounds to codes, by k-means, and back, by the decoder of Qwen3-TTS, which learns it.

The decoder's parameters have their names in Qwen's files, after "decoder.". Its sizes are in DECODER.
"""
import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from transformers.audio_utils import mel_filter_bank

RATE, FRAME = 24000, 1920  # samples in a second, and in a frame of 80 ms
PERIOD = 240  # samples: the pitch is 100 Hz, so a frame has eight periods
WINDOW = 600  # of the log-mel, whose columns are a period apart: 25 and 10 ms, as Qwen3-ASR hears
GROUPS, SIZE = 4, 128  # codebooks, and the vectors of each
DECODER = {
    "codebook_dim": 64, "codebook_size": SIZE, "num_quantizers": GROUPS, "num_semantic_quantizers": 1,
    "latent_dim": 80, "decoder_dim": 96, "hidden_size": 64, "intermediate_size": 128, "head_dim": 32,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2, "sliding_window": 72,
    "rms_norm_eps": 1e-5, "rope_theta": 10000, "max_position_embeddings": 8000, "attention_bias": False,
    "attention_dropout": 0.0, "hidden_act": "silu", "layer_scale_initial_scale": 0.3,
    "upsampling_ratios": [2, 2, 2], "upsample_rates": [2, 4, 30]}
CROP, LEAD = 14, 2  # frames of a sound that are trained on at once, and those that only lead in
IDENTITY = 16.0  # a snake's beta that makes it the identity


def in_phase(samples: np.ndarray) -> np.ndarray:
    """Speech of 100 Hz whose periods begin at multiples of 10 ms: so the same vowel has the same samples in each frame.

    Windows of two periods, each moved to where the fundamental's phase is zero, are added up. [samples], whole frames
    """
    padded, made = np.pad(samples, 3 * PERIOD), np.zeros(len(samples) + 6 * PERIOD)
    places, around = np.arange(2, len(padded) // PERIOD - 2) * PERIOD, np.arange(-2 * PERIOD, 2 * PERIOD)
    near = padded[places[:, None] + around] * np.hanning(4 * PERIOD + 1)[:-1]
    fundamental = near @ np.exp(-2j * np.pi * around / PERIOD)
    is_voice = np.abs(fundamental) > 0.08 * np.sqrt((near ** 2).sum(1) * PERIOD)
    moves = np.where(is_voice, -np.angle(fundamental) / (2 * np.pi) * PERIOD, 0).round().astype(int)
    around, window = around[PERIOD:-PERIOD], np.hanning(2 * PERIOD + 1)[:-1]
    for place, move in zip(places, moves):
        made[place + around] += padded[place + move + around] * window
    return made[3 * PERIOD:-3 * PERIOD].astype(np.float32)


@cache
def mel_filters() -> torch.Tensor:
    """For 128 pitches up to 8,000 Hz: [301, 128]."""
    return torch.from_numpy(mel_filter_bank(WINDOW // 2 + 1, 128, 0, 8000, RATE, "slaney", "slaney")).float()


def log_mel(samples: torch.Tensor) -> torch.Tensor:
    """[rows, samples] -> [rows, samples / 240, 128], as Qwen3-ASR hears them, but with a fixed floor."""
    padded = F.pad(samples, (WINDOW // 2, WINDOW // 2 - 1))
    found = torch.stft(padded, WINDOW, PERIOD, window=torch.hann_window(WINDOW), center=False, return_complex=True)
    return (torch.view_as_real(found).square().sum(-1).mT @ mel_filters()).clamp(min=3e-5).log10()


class Codes:
    """Residual k-means of a frame's eight log-mel columns, by their largest principal components: what encodes."""

    def __init__(self, sounds: list[torch.Tensor]):
        frames = torch.cat([columns_of(sound) for sound in sounds])
        self.mean = frames.mean(0)
        _, values, axes = torch.pca_lowrank(frames, DECODER["codebook_dim"] // 2, niter=4)
        self.axes = axes * 8 / values[0] * len(frames) ** 0.5  # so the largest component's spread is 8
        points, self.books = (frames - self.mean) @ self.axes, list[torch.Tensor]()
        for _ in range(GROUPS):
            self.books.append(k_means(points, SIZE))
            points = points - self.books[-1][nearest(points, self.books[-1])]

    def of(self, sound: torch.Tensor) -> torch.Tensor:
        """[samples] -> [frames, groups]"""
        points, codes = (columns_of(sound) - self.mean) @ self.axes, list[torch.Tensor]()
        for book in self.books:
            codes.append(nearest(points, book))
            points = points - book[codes[-1]]
        return torch.stack(codes, 1)


def columns_of(sound: torch.Tensor) -> torch.Tensor:
    """[samples] -> [frames, 8 * 128]"""
    return log_mel(sound[None]).reshape(len(sound) // FRAME, -1)


def nearest(points: torch.Tensor, book: torch.Tensor) -> torch.Tensor:
    """The number of the nearest vector of a codebook, for each point."""
    return torch.cat([torch.cdist(part, book).argmin(1) for part in points.split(8192)])


def k_means(points: torch.Tensor, n: int) -> torch.Tensor:
    """n centres after 30 rounds; a centre without points moves to a random one."""
    book = points[torch.randperm(len(points))[:n]]
    for _ in range(30):
        owner = nearest(points, book)
        count = torch.bincount(owner, minlength=n)
        book = torch.zeros_like(book).index_add_(0, owner, points) / count.clamp(min=1)[:, None]
        book[count == 0] = points[torch.randint(len(points), (int((count == 0).sum()),))]
    return book


class Causal(nn.Module):
    """A convolution that sees no future."""

    def __init__(self, n: int, m: int, kernel: int, dilation: int = 1, groups: int = 1):
        super().__init__()
        self.conv, self.left = nn.Conv1d(n, m, kernel, dilation=dilation, groups=groups), (kernel - 1) * dilation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(F.pad(x, (self.left, 0)))


class Up(nn.Module):
    """A transposed convolution; what needs the future is cut off."""

    def __init__(self, n: int, m: int, kernel: int, stride: int):
        super().__init__()
        self.conv, self.stride = nn.ConvTranspose1d(n, m, kernel, stride), stride

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)[..., :x.shape[-1] * self.stride]


class Snake(nn.Module):
    def __init__(self, n: int, beta: float = 0.0):
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.zeros(n)), nn.Parameter(torch.full((n,), beta))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (x * self.alpha.exp()[:, None]).sin().square() / (self.beta.exp()[:, None] + 1e-9)


class Residual(nn.Module):
    def __init__(self, n: int, dilation: int):
        super().__init__()
        self.act1, self.conv1, self.act2, self.conv2 = Snake(n), Causal(n, n, 7, dilation), Snake(n), Causal(n, n, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv2(self.act2(self.conv1(self.act1(x))))


class Block(nn.Module):
    """`rate` times as many times, half of the channels, three residual units."""

    def __init__(self, n: int, rate: int):
        super().__init__()
        self.block = nn.Sequential(Snake(n), Up(n, n // 2, 2 * rate, rate), *(Residual(n // 2, d) for d in (1, 3, 9)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


class ConvNeXt(nn.Module):
    def __init__(self, n: int):
        super().__init__()
        self.dwconv, self.norm = Causal(n, n, 7, groups=n), nn.LayerNorm(n, 1e-6)
        self.pwconv1, self.pwconv2 = nn.Linear(n, 4 * n), nn.Linear(4 * n, n)
        self.gamma = nn.Parameter(torch.full((n,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.gamma * self.pwconv2(F.gelu(self.pwconv1(self.norm(self.dwconv(x).mT))))).mT


def rotated(x: torch.Tensor) -> torch.Tensor:
    """RoPE of [rows, heads, frames, head_dim]."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] * DECODER["rope_theta"] ** (-torch.arange(half) / half)
    a, b = x.split(half, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class Attention(nn.Module):
    """To the last 72 frames."""

    def __init__(self, n: int):
        super().__init__()
        inner = DECODER["num_attention_heads"] * DECODER["head_dim"]
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(n, inner, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(inner, n, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, DECODER["head_dim"])).transpose(1, 2)
                   for project in (self.q_proj, self.k_proj, self.v_proj))
        back = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
        seen = (back >= 0) & (back < DECODER["sliding_window"])
        return self.o_proj(F.scaled_dot_product_attention(rotated(q), rotated(k), v, seen).transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, n: int, m: int):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(n, m, bias=False), nn.Linear(n, m, bias=False)
        self.down_proj = nn.Linear(m, n, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Scale(nn.Module):
    def __init__(self, n: int):
        super().__init__()
        self.scale = nn.Parameter(torch.full((n,), DECODER["layer_scale_initial_scale"]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Layer(nn.Module):
    def __init__(self, n: int):
        super().__init__()
        self.self_attn, self.mlp = Attention(n), SwiGLU(n, DECODER["intermediate_size"])
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(n, 1e-5), nn.RMSNorm(n, 1e-5)
        self.self_attn_layer_scale, self.mlp_layer_scale = Scale(n), Scale(n)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn_layer_scale(self.self_attn(self.input_layernorm(x)))
        return x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))


class Transformer(nn.Module):
    def __init__(self, latent: int, n: int):
        super().__init__()
        self.input_proj, self.output_proj = nn.Linear(latent, n), nn.Linear(n, latent)
        self.layers = nn.Sequential(*(Layer(n) for _ in range(DECODER["num_hidden_layers"])))
        self.norm = nn.RMSNorm(n, 1e-5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output_proj(self.norm(self.layers(self.input_proj(x.mT)))).mT


class Book(nn.Module):
    def __init__(self, vectors: torch.Tensor):
        super().__init__()
        self.embedding_sum = nn.Parameter(vectors.clone())
        self.register_buffer("cluster_usage", torch.ones(len(vectors)))


class Quantizer(nn.Module):
    """Codebooks whose vectors are added."""

    def __init__(self, books: list[torch.Tensor]):
        super().__init__()
        self.vq = nn.ModuleDict({"layers": nn.ModuleList(nn.ModuleDict({"_codebook": Book(book)}) for book in books)})
        self.output_proj = nn.Conv1d(books[0].shape[1], DECODER["codebook_dim"], 1, bias=False)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        found = [F.embedding(each, layer["_codebook"].embedding_sum)
                 for each, layer in zip(codes.unbind(-1), self.vq["layers"])]
        return self.output_proj(sum(found).mT)


class Decoder(nn.Module):
    """Codes [rows, frames, groups] -> samples [rows, 1920 * frames]. It begins with the codebooks of k-means.

    At 24,000 Hz, the snakes and residual units begin as the identity and aren't trained: they would take ten times as
    long as all the rest.
    """

    def __init__(self, books: list[torch.Tensor]):
        super().__init__()
        latent, wide, rates = DECODER["latent_dim"], DECODER["decoder_dim"], DECODER["upsample_rates"]
        self.quantizer = nn.ModuleDict({"rvq_first": Quantizer(books[:1]), "rvq_rest": Quantizer(books[1:])})
        self.pre_conv = Causal(DECODER["codebook_dim"], latent, 3)
        self.pre_transformer = Transformer(latent, DECODER["hidden_size"])
        self.upsample = nn.Sequential(*(nn.Sequential(Up(latent, latent, n, n), ConvNeXt(latent))
                                        for n in DECODER["upsampling_ratios"]))
        blocks, last = [Block(wide >> i, rate) for i, rate in enumerate(rates)], wide >> len(rates)
        self.decoder = nn.Sequential(Causal(latent, wide, 7), *blocks, Snake(last, IDENTITY), Causal(last, 1, 7))
        for unit in blocks[-1].block[2:]:
            nn.init.zeros_(unit.conv2.conv.weight)
            nn.init.zeros_(unit.conv2.conv.bias)

    def forward(self, codes: torch.Tensor, whole: bool = False) -> torch.Tensor:
        """whole: with what is the identity"""
        x = self.quantizer["rvq_first"](codes[..., :1]) + self.quantizer["rvq_rest"](codes[..., 1:])
        x = self.decoder[:-3](self.upsample(self.pre_transformer(self.pre_conv(x))))
        x = self.decoder[-3:-1](x) if whole else self.decoder[-3].block[:2](x)
        return self.decoder[-1](x)[:, 0]


def losses_of(made: torch.Tensor, said: torch.Tensor) -> dict[str, torch.Tensor]:
    """Differences of two sounds [rows, samples]: of their samples, log-mels and spectra of 43 ms."""
    spectra = [torch.view_as_real(torch.stft(x, 1024, 256, window=torch.hann_window(1024), return_complex=True)
                                  ).square().sum(-1).add(1e-6).log() for x in (made, said)]
    return {"samples": 5 * (made - said).abs().mean(), "log-mel": (log_mel(made) - log_mel(said)).abs().mean(),
            "spectrum": 0.1 * (spectra[0] - spectra[1]).abs().mean()}


def codec_losses(decoder: Decoder, sounds: list[torch.Tensor], codes: list[torch.Tensor], step: int
                 ) -> Iterator[dict[str, torch.Tensor]]:
    """For eight crops of the sounds, all of them of CROP frames or longer."""
    rng, given, said, lead = random.Random(f"codec {step}"), [], [], []
    for _ in range(8):
        i = rng.randrange(len(sounds))
        start = max(rng.randrange(-3, len(codes[i]) - CROP + 1), 0)
        lead.append(LEAD if start else 0)
        given.append(codes[i][start:start + CROP])
        said.append(sounds[i][(start + lead[-1]) * FRAME:][:(CROP - LEAD) * FRAME])
    made = [samples[n * FRAME:][:(CROP - LEAD) * FRAME] for n, samples in zip(lead, decoder(torch.stack(given)))]
    yield losses_of(torch.stack(made), torch.stack(said))


def codec_config() -> dict[str, Any]:
    """The codec's config.json, without the encoder, which k-means replaces."""
    return {"architectures": ["Qwen3TTSTokenizerV2Model"], "model_type": "qwen3_tts_tokenizer_12hz",
            "input_sample_rate": RATE, "output_sample_rate": RATE, "decode_upsample_rate": FRAME,
            "encode_downsample_rate": FRAME, "encoder_valid_num_quantizers": GROUPS, "decoder_config": DECODER}
