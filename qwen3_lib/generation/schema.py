"""Answers that fit a JSON Schema, a regular expression or a grammar.

llguidance says which tokens may come next; the others can't be drawn. A thought is free: the grammar begins after it.
"""
from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from qwen3_lib.generation.tools import kinds_of
from qwen3_lib.generation.matcher import Matcher, compiled_grammar
from qwen3_lib.generation.prepare import MAX_STRING, prepared
from qwen3_lib.generation.processors import Processor
from tokenizer_utils import AnswerReader, InputError, Tokenizer, brief

LONGEST_GRAMMAR = 2**19  # characters
MOST_RULES = 1000  # of a grammar in Lark, each of which may lead to the next
NEVER = np.float32(-1e20)  # a logit that isn't drawn; finite, so that the check for damaged weights keeps its meaning
# The bits of a byte, the lowest first, as upper limits of eight logits: 60 us for 151,936, fewer than bits as booleans.
CEILINGS = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, np.float32(np.inf), NEVER).astype(np.float32)


class Grammar(NamedTuple):
    """A grammar in llguidance's form, see grammar_of; `matchers`, if it is there, gives a Matcher for each answer."""
    text: str
    matchers: Any = None


def regex(pattern: str) -> Grammar:
    """Answers that match a regular expression as a whole (Rust's syntax, without lookaround)."""
    escaped = re.sub(r"\\.|/", lambda found: found[0] if found[0] != "/" else r"\/", pattern, flags=re.DOTALL)
    return lark(f"start: /{escaped}/")


def lark(text: str) -> Grammar:
    """Answers that a grammar in llguidance's variant of Lark generates. Raises InputError for too many rules."""
    # A chain of thousands would overflow llguidance's stack.
    if (n := len(re.findall(r"^\s*[^\s:]+\s*:", text, re.MULTILINE))) > MOST_RULES:
        raise InputError(f"the grammar has {n:,} rules; at most {MOST_RULES:,} are taken")
    return bounded({"lark_grammar": text})


def bounded(grammar: dict[str, Any]) -> Grammar:
    """A grammar in llguidance's form. Raises InputError for one that is too long."""
    if len(text := json.dumps({"grammars": [grammar]})) > LONGEST_GRAMMAR:
        raise InputError(f"the schema has {len(text):,} characters; at most {LONGEST_GRAMMAR:,} are taken")
    return Grammar(text)


def type_adapter(kind: type) -> Any:
    """pydantic's TypeAdapter of a dataclass or another class. Raises InputError where no schema describes it."""
    try:
        from pydantic import PydanticUserError, TypeAdapter  # here: an extra
    except ImportError as error:
        raise InputError("a class as a schema needs pydantic: pip install pydantic") from error
    try:
        adapter: Any = TypeAdapter(kind)
        adapter.json_schema()
    except PydanticUserError as error:
        raise InputError(f"no JSON Schema describes {kind.__name__}: {brief(error)}") from error
    return adapter


def parsed(schema: Any, text: str) -> Any:
    """JSON that fits a schema -> an object of the class that was given as a schema, or JSON's own values.

    Raises InputError for JSON that isn't complete; a class of pydantic may raise its ValidationError.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise InputError(f"the JSON is not complete: {brief(text[-80:])}") from error
    return type_adapter(schema).validate_json(text) if isinstance(schema, type) else value


def grammar_of(schema: Any, max_string: int | None = None) -> Grammar:
    """The grammar of a JSON Schema (a dict), a dataclass or a class of pydantic, see prepare.py; a Grammar as it is."""
    if isinstance(schema, Grammar):
        return schema
    schema = type_adapter(schema).json_schema() if isinstance(schema, type) else schema
    if not isinstance(schema, dict):
        raise InputError('a schema must be a JSON Schema, {"type": ...}, a class, or regex("...") or lark("...") of '
                         f"qwen3_lib.generation.schema, not {brief(repr(schema), 80)}")
    return bounded({"json_schema": on_one_line(schema, max_string)})


def on_one_line(schema: Any, max_string: int | None) -> Any:
    """The schema of JSON as json.dumps writes it. Else a model might write white space until its context is full."""
    spaces = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
    return spaces | prepared(schema, max_string) if isinstance(schema, dict) else schema


def calls_grammar(tokenizer: Tokenizer, tools: list[dict[str, Any]], several: bool,
                  otherwise: dict[str, Any] | bool = False, max_string: int | None = None) -> Grammar:
    """Answers that call one of these tools, or several times some of them, as the model's template writes calls.

    otherwise: what an answer may be that calls none: True: free text, also before calls; or a JSON Schema
    """
    opening, closing = (tokenizer.token_to_id(token) for token in ("<tool_call>", "</tool_call>"))
    if opening is None or closing is None:
        raise InputError("the model's tokenizer has no <tool_call>, so the model can't be made to call a tool")
    more = ' ("\\n" call)*' if several else ""
    start = "content | calls" if isinstance(otherwise, dict) else "TEXT calls?" if otherwise else "calls"
    content = "" if isinstance(otherwise, bool) else \
        f"content: %json {json.dumps(on_one_line(otherwise, max_string))}\n"
    rules = (calls_in_xml if tokenizer.lists_arguments else calls_in_json)(tools, max_string)
    return bounded({"lark_grammar": f'start: {start}\n{content}TEXT: /(.|\\n)*/\ncalls: call{more}\n'
                                    f'call: <[{opening}]> "\\n" object <[{closing}]>\n{rules}'})


def calls_in_json(tools: list[dict[str, Any]], max_string: int | None) -> str:
    """The rules of a grammar for calls in JSON."""
    rules = [f"object: {' | '.join(f'call{i}' for i in range(len(tools)))}"]
    for i, tool in enumerate(tools):
        function = tool.get("function", tool)
        opening = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": '
        rules.append(f'call{i}: {json.dumps(opening)} arguments{i} "}}\\n"')
        parameters = on_one_line(function.get("parameters") or {"type": "object"}, max_string)
        rules.append(f"arguments{i}: %json {json.dumps(parameters)}")
    return "\n".join(rules) + "\n"


def calls_in_xml(tools: list[dict[str, Any]], max_string: int | None) -> str:
    """The rules of a grammar for calls in XML: texts as they are (without "</"), other arguments as JSON.

    Parameters that are any object, {"type": "object"}, may have any names, and values with "</", too.
    """
    def literal(text: str) -> str:
        return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")

    longest = MAX_STRING if max_string is None else max_string or ""
    any_text = r"([^<]|<[^\/]){0," + f"{longest}}}"
    rules, functions, end = list[str](), list[str](), "\n</parameter>\n"
    for i, tool in enumerate(tools):
        function = tool.get("function", tool)
        about = function.get("parameters") or {}
        properties = about.get("properties") or {} if isinstance(about, dict) else None
        if not isinstance(properties, dict):
            raise InputError(f"the parameters of the tool {brief(function['name'], 80)} must be a JSON Schema")
        opening = f"<function={function['name']}>\n"
        if about and "properties" not in about and about.get("additionalProperties", True):
            functions.append(f"FUNCTION{i}")
            parameters = r"(<parameter=[^<>\n]+>\n(.|\n)*\n<\/parameter>\n)*"
            rules.append(f"FUNCTION{i}: /{literal(opening)}{parameters}<\\/function>\\n/")
            continue
        body = []
        for j, (key, schema) in enumerate(properties.items()):
            start, name = f"<parameter={key}>\n", f"p{i}_{j}"
            values = schema.get("enum") if isinstance(schema, dict) else None
            if next((kind for kind in kinds_of(schema) if kind != "null"), None) == "string":
                name = name.upper()  # a token of the grammar
                texts = "|".join(literal(str(value)) for value in values) if isinstance(values, list) else any_text
                rules.append(f"{name}: /{literal(start)}({texts}){literal(end)}/")
            else:
                schema = {"$defs": about.get("$defs", {})} | schema if isinstance(schema, dict) else schema
                rules.append(f"{name}: {json.dumps(start)} {name}_value {json.dumps(end)}")
                rules.append(f"{name}_value: %json {json.dumps(on_one_line(schema, max_string))}")
            body.append(name if key in (about.get("required") or ()) else f"{name}?")
        functions.append(f"function{i}")
        rules.append(f'function{i}: {json.dumps(opening)} {" ".join(body)} "</function>\\n"')
    return "\n".join([f"object: {' | '.join(functions)}", *rules]) + "\n"


@lru_cache(maxsize=2)
def guide(tokenizer: Tokenizer, n_rows: int, ends: tuple[int, ...]) -> Any:
    """llguidance's tokenizer, which takes a second to make for 151,936 tokens. Raises InputError without llguidance."""
    try:
        from llguidance import LLTokenizer  # here: an extra, and it takes longer to import than an answer may take
    except ImportError as error:
        raise InputError("answers that fit a schema need llguidance: pip install llguidance") from error
    return LLTokenizer(tokenizer.backend.to_str(), n_vocab=n_rows, eos_token=list(ends))


def about_tokens(model: Any) -> tuple[int, tuple[int, ...]]:
    """(rows of the vocabulary, end-of-text tokens) of a model. Raises InputError where it has none of these."""
    if not model.eos_token_ids:
        raise InputError("the model has no end-of-text token, so no answer can end where a schema does")
    return model.config.vocab_size, tuple(model.eos_token_ids)


def matchers(model: Any, grammar: str) -> Callable[[], Matcher]:
    """What gives a Matcher for each answer. Raises InputError for what llguidance can't do."""
    tokens = guide(model.tokenizer, *about_tokens(model))
    return partial(Matcher, tokens, kept_grammar(tokens, grammar))


kept_grammar = lru_cache(maxsize=16)(compiled_grammar)


class Constrained(Processor):
    """Allows only tokens that a schema allows, and takes those that it forces without drawing: see ForcedTokens."""
    PATIENCE, MORE = 0.02, 0.002  # seconds that others wait for its masks from another process; more for each token

    def __init__(self, model: Any, reader: AnswerReader, may_think: bool, schema: Any,
                 max_string: int | None = None):
        tokenizer, n_rows, grammar = model.tokenizer, model.config.vocab_size, grammar_of(schema, max_string)
        self.matcher = (grammar.matchers or matchers(model, grammar.text))()
        self.reader = reader
        self.room = np.empty((4 * -(-n_rows // 32), 8), np.float32)  # for masked logits; a new array costs 15 us
        self.begun = self.taken = False  # whether the grammar has taken a token; whether its news are in `certain`
        # Before the grammar's first token: a thought, unless the prompt has had it, and white space after a thought.
        self.before_it: set[Any] = {reader.think_ids[0]} - {None} if may_think else set()
        self.newlines = {ids[0] for text in ("\n\n", "\n")
                         if len(ids := tokenizer.encode(text, add_special_tokens=False)) == 1}
        self.patience = self.PATIENCE
        self.certain: list[int] = []  # the next tokens, where only one text can follow

    def before(self, logits: np.ndarray) -> np.ndarray:
        """The logits, with NEVER for tokens that can't come next; valid until the next call."""
        if self.reader.inside and not self.begun or self.certain:
            return logits
        mask = np.frombuffer(self.matcher.news().mask, np.uint8, len(self.room))
        if self.before_it and not self.begun:
            mask = mask.copy()
            for token in self.before_it:
                mask[token // 8] |= 1 << token % 8
        CEILINGS.take(mask, axis=0, out=self.room, mode="clip")  # "raise" would copy through another array
        masked = self.room.reshape(-1)[:len(logits)]
        return np.minimum(logits, masked, out=masked)

    def forced(self) -> int | None:
        return self.certain[0] if self.certain else None

    def after(self, token: int | None, forces: Processor | None = None) -> str | None:
        if token is None:
            return None
        if forces not in (None, self) or not self.begun and (self.reader.inside or self.reader.was_inside):
            self.before_it = self.newlines if token == self.reader.think_ids[1] else set()
            return None
        if not self.begun and token in self.before_it:
            self.before_it = set()
            return None
        self.begun = True
        if self.certain:
            self.certain.pop(0)
        else:
            self.matcher.take(token)
            self.taken, start = True, time.perf_counter()
            self.settle(self.patience)
            self.patience = min(max(self.patience - time.perf_counter() + start, 0) + self.MORE, self.PATIENCE)
        return self.ended

    def settle(self, seconds: float) -> bool:
        """Whether the next token can be drawn, after waiting so long at most for what may follow the last one."""
        if not self.matcher.arrived(seconds):
            return False
        if self.taken:
            self.taken = False
            self.certain = [*self.matcher.news().certain]
        return True

    @property
    def ended(self) -> str | None:
        return "stop" if not self.certain and not self.taken and self.begun and self.matcher.news().stopped else None
