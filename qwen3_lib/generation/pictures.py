"""Pictures in conversations: parts of messages become the tokens of pictures, see qwen3_vision.py."""
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from qwen3 import Model, TokenIds
from qwen3_lib.io.pictures import picture_of
from qwen3_vision import MIN_PIXELS, Picture
from tokenizer_utils import InputError

MARK = "<|vision_start|><|image_pad|><|vision_end|>"  # what the chat templates write for a picture


def question(text: str, images: Iterable[Any], max_pixels: int | None = None) -> str | list[dict[str, Any]]:
    """The content of a message that asks about pictures: `taken` reads it."""
    parts = [{"type": "image", "image": image, "max_pixels": max_pixels} for image in images]
    return [*parts, {"type": "text", "text": text}] if parts else text


def taken(model: Model, messages: Any, numbered: bool = False) -> tuple[Any, list[Picture]]:
    """Messages with {"type": "image", "image": a Picture, or what picture_of takes} in their lists of parts
    -> the same with MARK in the place of each picture, and the pictures.
    """
    pictures = list[Picture]()
    if model.pictures is None or not isinstance(messages, list | tuple):
        return messages, pictures

    def text_of(part: Any, role: Any) -> Any:
        if not isinstance(part, dict) or part.get("type") != "image" or "image" not in part:
            return part
        if role == "system":
            raise InputError("a system message can't hold a picture")
        found = part["image"]
        pictures.append(found if isinstance(found, Picture) else
                        model.pictures.show(picture_of(found), part.get("max_pixels"), part.get("min_pixels", MIN_PIXELS)))
        return {"type": "text", "text": f"Picture {len(pictures)}: " * numbered + MARK}

    model.pictures.latest = pictures
    return [each | {"content": [text_of(part, each.get("role")) for part in each["content"]]}
            if isinstance(each, dict) and isinstance(each.get("content"), list) else each
            for each in messages], pictures


def put(model: Model, ids: TokenIds, pictures: list[Picture]) -> TokenIds:
    """A prompt's ids with those of the pictures, in the places that `taken` has marked."""
    if not pictures:
        return ids
    ids, pad = np.asarray(ids), model.tokenizer.token_to_id("<|image_pad|>")
    first, *rest = np.split(ids, np.flatnonzero(ids == pad))
    if len(rest) != len(pictures):
        raise InputError("the text holds <|image_pad|>, or the tokenizer doesn't know it; it stands for a picture")
    return np.concatenate([first, *(part for picture, behind in zip(pictures, rest)
                                    for part in (picture.ids, behind[1:]))])
