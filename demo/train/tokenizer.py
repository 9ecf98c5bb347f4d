"""Conversations as token ids: the tokenizer, a byte-level BPE normalised as Qwen3's, and the tokens trained on."""

import json
import random
from collections import Counter

import numpy as np
import tokenizers

from corpus import Example, conversation
from loop import IGNORED

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
           "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>",
           "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
NAMED = ["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
         "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
# A word is split alike wherever it stands, so that copying it is copying its tokens: a space belongs to the word after
# it only for SPACED_WORDS; quotes, digits and Chinese characters stand alone.
LETTERS = r"[\p{L}&&[^\p{Han}]]+"
SPLIT = rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)(?!\p{{L}})|\p{{Han}}|%s{LETTERS}|\p{{N}}|" \
        rf"%s[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPACED_WORDS = 500
SPARE_ROWS = 20  # rows without a name, as in the real checkpoints


def backend(model: tokenizers.models.BPE, space: str) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Split(tokenizers.Regex(SPLIT % (space, space)), "isolated"),
         tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def train_tokenizer(vocab_size: int, n_examples: int) -> tokenizers.Tokenizer:
    """First pieces of words without the space before them; then a last merge for the space before frequent words."""
    rng = random.Random(0)
    texts = [text for _ in range(n_examples) for text in plain_texts(conversation(rng))]
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size - len(SPECIAL + NAMED) - SPACED_WORDS - SPARE_ROWS,
                                             min_frequency=20, show_progress=False,
                                             initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    pieces = backend(tokenizers.models.BPE(), "")
    pieces.train_from_iterator(texts, trainer)
    learned = json.loads(pieces.to_str())["model"]
    vocabulary, merges = learned["vocab"], [tuple(pair) for pair in learned["merges"]]
    counts = Counter(word for text in texts for word in text.split(" ")[1:])
    spaced = [word for word, _ in counts.most_common() if word.isascii() and word.islower() and word.isalpha()
              and (len(word) > 1 or word == "a") and word in vocabulary]
    for word in ['"', '{"', "+", "-", "=", *spaced][:SPACED_WORDS]:
        if word in vocabulary:
            merges.append(("Ġ", word))
            vocabulary["Ġ" + word] = len(vocabulary)
    tokenizer = backend(tokenizers.models.BPE(vocab=vocabulary, merges=merges), " ?")
    tokenizer.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False, special=False) for token in NAMED])
    return tokenizer


def plain_texts(example: Example) -> list[str]:
    return [text for text, _ in segments(example)] if not example.raw else [example.raw]


def called(calls: list[dict]) -> str:
    def one(function: dict) -> str:
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        return f'<tool_call>\n{{"name": "{function["name"]}", "arguments": {arguments}}}\n</tool_call>'

    return "\n".join(one(call["function"]) for call in calls)


def segments(example: Example) -> list[tuple[str, int]]:
    """The text that template.jinja makes of a conversation, in pieces, each with how many of its first tokens are
    given: the loss is on the rest. What the assistant said before the last question stands there without the thought
    that came first, so its first token is no example of how an answer begins."""
    pieces: list[tuple[str, int]] = []
    messages, given = list(example.messages), 10**9
    system = messages.pop(0)["content"] if messages[0]["role"] == "system" else None
    if system is not None or example.tools:
        text = system or ""
        if example.tools:
            listed = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in example.tools)
            text += ("\n\n" if system is not None else "") + f"# Tools\n\n<tools>{listed}\n</tools>"
        pieces.append((f"<|im_start|>system\n{text}<|im_end|>\n", given))
    question = max(i for i, message in enumerate(messages) if message["role"] == "user")
    for i, message in enumerate(messages):
        role, content = message["role"], message["content"]
        if role == "user":
            pieces.append((f"<|im_start|>user\n{content}<|im_end|>\n", given))
        elif role == "tool":
            first, last = messages[i - 1]["role"] != "tool", i + 1 == len(messages) or messages[i + 1]["role"] != "tool"
            pieces.append(("<|im_start|>user" * first + f"\n<tool_response>\n{content}\n</tool_response>"
                           + "<|im_end|>\n" * last, given))
        else:
            reasoning, is_last = message.get("reasoning_content", ""), i + 1 == len(messages)
            pieces.append(("<|im_start|>assistant\n", given))
            spoken, skipped = content + called(message.get("tool_calls", [])) + "<|im_end|>", 1
            if i > question and (is_last or reasoning):
                thought = f"<think>\n{reasoning}\n</think>\n\n"
                if example.enable_thinking is False:
                    pieces.append((thought, given))
                    skipped = 0
                else:
                    spoken, skipped = thought + spoken, 0
            pieces.append((spoken, skipped))
            if not is_last:
                pieces.append(("\n", given))
    return pieces


def encode_example(example: Example, encode) -> tuple[list[int], list[int]]:
    """(token ids, labels): the label of a position is the token that is to follow it."""
    if example.raw:
        ids = encode(example.raw + "<|endoftext|>")
        return ids, ids[1:] + [IGNORED]
    ids: list[int] = []
    targets: list[int] = []
    for text, given in segments(example):
        piece = encode(text)
        ids += piece
        targets += [IGNORED] * min(given, len(piece)) + piece[given:]
    return ids, targets[1:] + [IGNORED]


def encode_branches(example: Example, encode, longest: int) -> np.ndarray:
    """[4, tokens]: ids, labels, branches, positions, with the conversations `beside` it as long as all are at most
    `longest` tokens. What all begin with, their trunk, stands once, as branch 0; each goes on at the positions after
    it, as if alone."""
    ids, labels = encode_example(example, encode)
    trunk = len(encode(segments(example)[0][0])) if example.beside else 0
    parts = [np.array([ids, labels, [0] * trunk + [1] * (len(ids) - trunk), range(len(ids))])]
    for branch, other in enumerate(example.beside, 2):
        ids, labels = encode_example(other, encode)
        parts.append(np.array([ids, labels, [branch] * len(ids), range(len(ids))])[:, trunk:])
        if sum(part.shape[1] for part in parts) > longest:
            parts.pop()
            break
    return np.concatenate(parts, axis=1)
