"""A grammar that is followed: which tokens may come next, as llguidance says. Numbers are NumPy's elsewhere, because
qwen3_lib/server/vetting.py uses this in processes that must be small."""
from __future__ import annotations

from typing import Any, NamedTuple

from tokenizer_utils import InputError, brief

MOST_CERTAIN = 64  # tokens at a time: a grammar may force them without an end


class News(NamedTuple):
    """What may follow an answer."""
    certain: list[int]  # the next tokens, where only one text can follow
    mask: bytes  # a bit for each token that may come after these, the lowest first
    stopped: bool  # whether nothing can


def compiled_grammar(tokens: Any, grammar: str) -> Any:
    """llguidance's matcher of a grammar for a tokenizer, which may take seconds to make. Raises InputError."""
    from llguidance import LLMatcher, LLParserLimits
    limits = LLParserLimits(verbose_errors=False, max_items_in_row=20_000)  # 2,000 are too few for 500 properties
    matcher = LLMatcher(tokens, grammar, log_level=0, limits=limits)
    matcher.compute_bitmask()  # some limits are met only here
    if matcher.is_error():
        error = brief(matcher.get_error(), 500)
        endless = error.startswith("NoExtension")
        raise InputError("the schema can't be used: " + (
            "no answer fits it, because it refers to itself without an end" if endless else error))
    return matcher


class Matcher:
    """The state of a grammar in an answer. After `take`, `news` tells what may follow, once it has `arrived`."""

    def __init__(self, tokens: Any, matcher: Any):
        self.tokens, self.matcher = tokens, matcher.deep_copy()
        self.found: News | None = None
        self.token: int | None = None

    def take(self, token: int) -> None:
        """Takes the next token of the answer, after those that were certain."""
        self.found, self.token = None, token

    def arrived(self, seconds: float) -> bool:
        """Whether there are news, after waiting for so many seconds at most."""
        return True

    def news(self) -> News:
        """What may follow the last token. Raises InputError where llguidance gives up."""
        if self.found is None:
            certain = list[int]()
            if self.token is not None:
                self.matcher.consume_token(self.token)
                while len(certain) < MOST_CERTAIN and not self.matcher.is_stopped() and (more := self.forced()):
                    self.matcher.consume_tokens(more)
                    certain += more
            mask = self.matcher.compute_bitmask()  # of a grammar that has stopped: the end of the text
            if self.matcher.is_error():
                raise InputError(f"the schema can't be followed: {brief(self.matcher.get_error(), 500)}")
            self.found = News(certain, mask, self.matcher.is_stopped())
        return self.found

    def forced(self) -> list[int]:
        """The next tokens, where only one text can follow. Text that reads like a special token is written as text."""
        tokens = self.matcher.compute_ff_tokens()
        if tokens and not self.matcher.validate_tokens(tokens[:1]):  # "<|im_end|>" as the special token
            tokens = self.tokens.greedy_tokenize(self.matcher.compute_ff_bytes().decode(errors="ignore"))
        return tokens[:self.matcher.validate_tokens(tokens)]
