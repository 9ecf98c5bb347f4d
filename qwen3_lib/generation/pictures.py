"""Pictures in conversations: parts of messages become the tokens of pictures, see qwen3_vision.py."""
from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from qwen3 import Model, TokenIds
from qwen3_lib.io.pictures import is_data_url, picture_at, picture_of
from qwen3_vision import LARGEST, MAX_PIXELS, MIN_PIXELS, Picture
from tokenizer_utils import PICTURES, InputError, is_picture

MARK = "<|vision_start|><|image_pad|><|vision_end|>"  # what the chat templates write for a picture
DETAILS = {"auto": LARGEST, "high": LARGEST, "low": 2**18}  # OpenAI's word -> most pixels for the model


def question(text: str, images: Iterable[Any], max_pixels: int | None = None) -> str | list[dict[str, Any]]:
    """The content of a message that asks about pictures: `taken` reads it."""
    parts = [{"type": "image", "image": image, "max_pixels": max_pixels} for image in images]
    return [*parts, {"type": "text", "text": text}] if parts else text


def has_pictures(messages: list[dict[str, Any]]) -> bool:
    return any(is_picture(part) for each in messages if isinstance(each.get("content"), list)
               for part in each["content"])


def given_in(part: dict[str, Any]) -> dict[str, Any]:
    """{"url", "detail"} of a part that holds a picture, in OpenAI's form or ours, in which "url" is any source."""
    given = part.get(PICTURES[part["type"]])
    return given if isinstance(given, dict) else part | {"url": given}


def most_pixels(part: dict[str, Any], max_pixels: int | None = None) -> int:
    """The most pixels of a part's picture: its own, or `max_pixels` as far as its detail allows it."""
    if part.get("max_pixels") is not None:
        return part["max_pixels"]
    detail = given_in(part).get("detail", part.get("detail"))
    detail = "auto" if detail is None else detail
    if not isinstance(detail, str) or detail not in DETAILS:
        raise InputError(f"detail must be one of {', '.join(DETAILS)}")
    return min(DETAILS[detail], max_pixels or MAX_PIXELS)


def taken(model: Model, messages: Any, numbered: bool = False,
          max_pixels: int | None = None) -> tuple[Any, list[Picture]]:
    """Messages with {"type": "image", "image": a Picture, or what picture_of takes} in their lists of parts, or data:
    URLs in OpenAI's form -> the same with MARK in the place of each picture, and the pictures. `max_pixels`: of
    pictures whose part has none.
    """
    pictures, n, context = list[Picture](), 0, model.config.context_length
    if not isinstance(messages, list | tuple):
        return messages, pictures

    def picture_in(part: Any) -> Picture:
        nonlocal n
        if isinstance(found := given_in(part)["url"], Picture):
            return found
        image = picture_at(found) if part["type"] != "image" or is_data_url(found) else picture_of(found)
        sizes = most_pixels(part, max_pixels), part.get("min_pixels", MIN_PIXELS)
        if (n := n + math.prod(model.pictures.size(image, *sizes))) >= context:
            raise InputError(f"picture {len(pictures) + 1} brings the tokens of all to {n:,}, and the context has "
                             f"{context:,}: a smaller max_pixels (--max-pixels) makes fewer of them")
        return model.pictures.show(image, *sizes)

    def text_of(part: Any, where: str, role: Any) -> Any:
        if not is_picture(part):
            return part
        if model.pictures is None:
            raise InputError(f"{where} holds a picture, but the model can't see: it has no vision tower")
        if given_in(part).get("url") is None:
            raise InputError(f'{where}: a picture must be {{"type": "image", "image": FILE}}')
        if role == "system":
            raise InputError("a system message can't hold a picture")
        pictures.append(picture_in(part))
        return {"type": "text", "text": f"Picture {len(pictures)}: " * numbered + MARK}

    out = [each | {"content": [text_of(part, f"message {i}", each.get("role")) for part in each["content"]]}
           if isinstance(each, dict) and isinstance(each.get("content"), list) else each
           for i, each in enumerate(messages)]
    if model.pictures is not None:
        model.pictures.latest = pictures
    return out, pictures


def put(model: Model, ids: TokenIds, pictures: list[Picture]) -> TokenIds:
    """Puts the pictures' ids into a prompt's ids, at the places that `taken` has marked."""
    if not pictures:
        return ids
    ids, pad = np.asarray(ids), model.tokenizer.token_to_id("<|image_pad|>")
    first, *rest = np.split(ids, np.flatnonzero(ids == pad))
    if len(rest) > len(pictures):
        raise InputError("messages: a text holds <|image_pad|>, which stands for a picture: leave it out, or put a "
                         "space into it")
    if len(rest) < len(pictures):
        raise InputError("the tokenizer doesn't know <|image_pad|>, or the chat template leaves pictures out")
    return np.concatenate([first, *(part for picture, behind in zip(pictures, rest)
                                    for part in (picture.ids, behind[1:]))])
