"""The options of an answer, each defined once: its name, its type, its least value, its meaning.

qwen3.chat shows them in its signature; the command line, batch files and the server take them from here.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

from qwen3 import MoreOptions, Sampling, SamplingOptions, checked_number, checked_whole
from qwen3_vision import PIXELS_LIMIT
from tokenizer_utils import InputError, brief


DRAFTS = ("auto", "off")
SAMPLING = tuple(Sampling.__dataclass_fields__)


class GivenOptions(SamplingOptions, MoreOptions, total=False):
    """The names and types of AnswerOptions, for type checkers."""
    max_new_tokens: int | None
    eos_token_ids: Iterable[int] | None
    seed: int | None


def option(meaning: str, metavar: str = "", least: int | None = None) -> Any:
    """A field: None leaves it to the model, or off. Whole numbers have a least value."""
    return field(default=None, metadata={"help": meaning, "metavar": metavar, "least": least})


@dataclass(frozen=True)
class AnswerOptions:
    """The options of an answer. Raises InputError for values out of range."""
    max_new_tokens: int | None = option("longest answer, in tokens (default: until the model ends the answer, or the "
                                        "context is full)", "N", 1)
    eos_token_ids: Iterable[int] | None = option("end-of-text tokens in place of the model's; () never ends early")
    think_budget: int | None = option("end the reasoning after N tokens, then answer", "N", 0)
    stop_loops: bool | None = option("end a thought that repeats the same text again and again, and an answer that "
                                     "does so")
    stop: str | Iterable[str] | None = option("texts that end the answer and are not part of it; they don't apply to a "
                                              "thought")
    schema: Any = option("what the answer must fit: a JSON Schema, a dataclass, a class of pydantic, or a Grammar")
    max_string: int | None = option("the longest string in an answer to a JSON Schema that sets no limit, in "
                                    "characters; 0 means any length, of numbers, too (default: 4096)", "N", 0)
    temperature: float | None = option("0 takes the most likely token, 1 draws tokens with the model's probabilities, "
                                       "more than 1 makes rare tokens likelier", "T")
    top_k: int | None = option("draw only from the K most likely tokens; 0 means all", "K")
    top_p: float | None = option("draw only from the most likely tokens that together reach the probability P", "P")
    min_p: float | None = option("draw only tokens at least P times as likely as the most likely token", "P")
    repetition_penalty: float | None = option("above 1: tokens of the prompt and the answer get less likely", "X")
    presence_penalty: float | None = option("above 0: tokens of the answer get less likely", "X")
    frequency_penalty: float | None = option("above 0: tokens of the answer get less likely each time they occur", "X")
    seed: int | None = option("the same seed draws the same tokens", "N", 0)
    logit_bias: dict[Any, float] | None = option("numbers from -100 to 100 that are added to the logits of tokens, by "
                                                 "their ids")
    logprobs: int | None = option("record the logprob of each token and of N alternatives, from the model's own "
                                  "logits", "N", 0)
    lookup: int | None = option("guess up to N tokens from the text so far, and check the guesses in one pass: the "
                                "same answer, faster if the answer repeats the text", "N", 0)
    draft: Any = option("what guesses tokens, which are checked in one pass: the same answer, faster if most guesses "
                        "are right. auto: the model's own MTP head, if it has one, as long as that pays (the fast "
                        "engine's default); off: nothing; or a smaller model with the same tokenizer", "NAME")
    max_pixels: int | None = option("most pixels of a picture, which is made smaller: 1,024 pixels are a token", "N")

    def __post_init__(self) -> None:
        for each in fields(self):
            if each.metadata["least"] is not None and getattr(self, each.name) is not None:
                checked_whole(each.name, getattr(self, each.name), each.metadata["least"])
        if not isinstance(self.stop_loops, bool | None):
            raise InputError(f"stop_loops must be true or false, not {brief(repr(self.stop_loops))}")
        if not isinstance(self.eos_token_ids, Iterable | None):
            raise InputError(f"eos_token_ids must be a list of token ids, not {brief(repr(self.eos_token_ids), 80)}")
        if isinstance(self.draft, str) and self.draft not in DRAFTS:
            raise InputError(f"draft must be a model, or {' or '.join(DRAFTS)}, not {brief(repr(self.draft))}")
        if self.max_pixels is not None:
            checked_number("max_pixels", self.max_pixels, 1, PIXELS_LIMIT)
        Sampling().updated(**{name: getattr(self, name) for name in SAMPLING})
        object.__setattr__(self, "stop", checked_stop(self.stop))  # as a tuple

    def over(self, defaults: Sampling) -> Self:
        """The same, with these settings where none is given."""
        return replace(self, **{name: value for name, value in asdict(defaults).items() if getattr(self, name) is None})

    @property
    def given(self) -> dict[str, Any]:
        """The options that differ from their defaults."""
        return {name: value for name, value in vars(self).items() if value not in (None, ())}

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn, once all of it is given: see `over`. Raises InputError before."""
        return Sampling(**{name: getattr(self, name) for name in SAMPLING})


MOST_STOPS, LONGEST_STOP = 64, 1024  # characters; each token is compared with all of them


def checked_stop(stop: str | Iterable[str] | None) -> tuple[str, ...]:
    """Stop texts as a tuple. Raises InputError for too many or too long ones, and for an empty one."""
    stop = () if stop is None else stop
    several = isinstance(stop, Iterable) and not isinstance(stop, str | dict)
    texts: tuple[Any, ...] = tuple(stop) if several else (stop,)
    if wrong := [text for text in texts if not isinstance(text, str) or not text]:
        raise InputError(f"a stop text must be a text of at least one character, not {brief(repr(wrong[0]))}")
    if len(texts) > MOST_STOPS or max(map(len, texts), default=0) > LONGEST_STOP:
        raise InputError(f"stop must be at most {MOST_STOPS} texts of at most {LONGEST_STOP:,} characters each")
    return texts


OPTION_NAMES = tuple(AnswerOptions.__dataclass_fields__)


def options_of(given: Mapping[str, Any]) -> AnswerOptions:
    """The options with these names and values. Raises InputError for unknown names."""
    if unknown := given.keys() - {*OPTION_NAMES}:
        raise InputError(f"{brief(min(unknown))} is none of the options {', '.join(OPTION_NAMES)}")
    return AnswerOptions(**given)
