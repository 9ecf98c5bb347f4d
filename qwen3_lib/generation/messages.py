"""From messages to the ids of a prompt: texts, and pictures, whose parts become tokens (see qwen3_vision.py)."""
from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

from qwen3 import Model, TokenIds
from qwen3_lib.io.pictures import is_data_url, picture_at, picture_of
from qwen3_vision import MAX_PIXELS, MIN_PIXELS, PIXELS_LIMIT, Picture, prompt_ids, sees
from tokenizer_utils import PICTURES, InputError, Tokenizer, is_picture

MARK = "<|vision_start|><|image_pad|><|vision_end|>"  # what the chat templates write for a picture
DETAILS = {"auto": PIXELS_LIMIT, "high": PIXELS_LIMIT, "low": 2**18}  # OpenAI's word -> most pixels for the model


class TooLong(InputError):
    """A text that has more tokens than the context."""


TEXT_PIECE, BORDER = 2**16, 64  # characters that are encoded on trial; tokens that a border between two of them may add


def encoded(tokenizer: Tokenizer, text: str, room: int, add_special_tokens: bool = True,
            cut: bool = False) -> list[int]:
    """The ids of a text. Raises TooLong for one that can't fit into `room` tokens; or cuts it after them.

    A long text is encoded in pieces first, because all of it could take gigabytes: 200 bytes for each token.
    """
    n = 0
    for end in range(TEXT_PIECE, len(text) + TEXT_PIECE, TEXT_PIECE) if len(text) > TEXT_PIECE else ():
        n += len(tokenizer.encode(text[end - TEXT_PIECE:end], add_special_tokens=False)) - BORDER
        if n > room and cut:
            text = text[:end]
            break
        if n > room:
            raise TooLong(f"prompt is too long: more than {n} tokens > {room} maximum")
    return tokenizer.encode(text, add_special_tokens)


def question(text: str, images: Iterable[Any], max_pixels: int | None = None) -> str | list[dict[str, Any]]:
    """The content of a message that asks about pictures: messages_and_pictures reads it."""
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


class PictureError(InputError):
    """About a picture in a message; `field`: where it stands in its part."""

    def __init__(self, message: str, field: str):
        super().__init__(message)
        self.field = field


def image_of(part: dict[str, Any]) -> Any:
    """The PIL image of a part: its source is any that picture_of takes, or a data: URL."""
    source = given_in(part)["url"]
    return picture_at(source) if part["type"] != "image" or is_data_url(source) else picture_of(source)


def messages_and_pictures(model: Model, messages: Any, numbered: bool = False, max_pixels: int | None = None,
          image_of: Callable[[dict[str, Any]], Any] = image_of, room: int | None = None) -> tuple[Any, list[Picture]]:
    """Messages whose lists of parts hold pictures, see `is_picture` -> the same with MARK in the place of each picture,
    and the pictures.

    `max_pixels`: of pictures whose part has none; `image_of`, from a part to its PIL image. Raises PictureError, and
    TooLong before a picture is computed that brings the tokens of all to `room`, or fills the context.
    """
    pictures, n, room = list[Picture](), 0, model.config.context_length if room is None else room
    if not isinstance(messages, list | tuple):
        return messages, pictures

    def picture_in(part: dict[str, Any], where: str, role: Any) -> Picture:
        nonlocal n
        if not sees(model):
            raise InputError("the model can't see: it has no vision tower")
        if role == "system":
            raise InputError("a system message can't hold a picture")
        if (found := given_in(part).get("url")) is None:
            raise InputError(f"{PICTURES[part['type']]} is missing, or has no url; a picture is a file, or a data: "
                             "URL, data:image/png;base64,...")
        if isinstance(found, Picture):
            return found
        image, sizes = image_of(part), (most_pixels(part, max_pixels), part.get("min_pixels", MIN_PIXELS))
        if (n := n + math.prod(model.media.size(image, *sizes))) >= room:
            raise TooLong(f"{where} brings the tokens of all pictures to {n:,}, and the context has {room:,}: lower "
                          "max_pixels (--max-pixels)")
        return model.media.show(image, *sizes)

    def text_of(part: Any, where: str, role: Any) -> Any:
        if not is_picture(part):
            return part
        where = f"{where}: picture {len(pictures) + 1}"
        try:
            pictures.append(picture_in(part, where, role))
        except TooLong:
            raise
        except InputError as error:
            raise PictureError(f"{where}: {str(error).removeprefix('a picture: ')}", PICTURES[part["type"]]) from error
        return {"type": "text", "text": f"Picture {len(pictures)}: " * numbered + MARK}

    out = [each | {"content": [text_of(part, f"message {i}", each.get("role")) for part in each["content"]]}
           if isinstance(each, dict) and isinstance(each.get("content"), list) else each
           for i, each in enumerate(messages)]
    return out, pictures


def prompt_of(model: Model, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None,
              enable_thinking: bool | None = None, chat_template_kwargs: dict[str, Any] | None = None,
              max_pixels: int | None = None) -> tuple[TokenIds, float, list[Picture]]:
    """(the ids of a conversation, the seconds that its pictures have taken, the pictures: hold them while you use the
    ids)."""
    numbered = isinstance(chat_template_kwargs, dict) and bool(chat_template_kwargs.get("add_vision_id"))
    start = time.perf_counter()
    messages, shown = messages_and_pictures(model, messages, numbered, max_pixels)
    seconds = time.perf_counter() - start if shown else 0.0
    text = model.tokenizer.apply_chat_template(messages, tools, enable_thinking=enable_thinking, join_text_parts=True,
                                               chat_template_kwargs=chat_template_kwargs)
    ids = encoded(model.tokenizer, text, model.config.context_length, add_special_tokens=False)
    return prompt_ids(model, ids, shown), seconds, shown
