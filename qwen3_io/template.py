"""Renders chat templates as transformers does, in jinja2's sandbox.

A chat template is a program that comes with a model's files. The sandbox keeps this program away from Python's
internals, and MAX_SIZE bounds the text that one step makes: a product, a formatted, padded, replaced, joined or
printed text. The program can still loop for ever, fill the memory with many values, or compare long lists for minutes:
Ctrl-C stops a rendering after its current step, and only the operating system limits its memory.
"""
import functools
import json
import re
from collections.abc import Callable, Iterable, MappingView
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import compiler, ext, filters, nodes, sandbox

MAX_TEMPLATE = 2**16  # characters; the longest of 70 published templates has 17,000
MAX_SIZE = 2**24  # characters, and 8 for an element; four million tokens, more than a model reads
FIELDS = {"%": re.compile(r"%(\([^()]*\))?[-+ #0_^]*\d{0,3}(\.\d{0,3})?[A-Za-z%]"),  # widths below 1000, and
          "{": re.compile(r"{{|}}|{\w*(![rsa])?(:(?![^{}]*\d{4})[^{}]*)?}")}  # no attributes or nested fields


def _checked(size: int, limit: int = MAX_SIZE) -> int:
    if size > limit:
        raise jinja2.TemplateRuntimeError(f"stopped, because a step would make a value larger than {limit}")
    return size


def _size(value: Any) -> int:
    """Characters and elements of a nested value; a list that occurs twice counts twice, as when it is printed."""
    inner: Any = [*value, *value.values()] if isinstance(value, dict) else value
    listed = isinstance(value, (list, tuple, dict, MappingView))
    size = 8 * len(inner) + sum(_size(item) for item in inner) if listed else 0
    return _checked(len(value) if isinstance(value, str) else size)


def _gathered(items: Iterable[Any], separator: str = "") -> list[Any]:
    size = 0  # of the joined items
    return [item for item in items if (size := _checked(size + 1 + len(separator) + _size(item)))]


def _formatted(mark: str, text: Any, *values: Any, **named: Any) -> int:
    rest, n_fields = FIELDS[mark].subn("", text) if isinstance(text, str) else ("", 0)
    if mark in rest:
        raise jinja2.TemplateRuntimeError("stopped, because it formats with more than plain fields like %s or {:.3f}")
    return len(rest) + n_fields * (2000 + _size([values, named]))


def _product(value: Any, *args: Any, **kwargs: Any) -> int:
    return (len(value) or 1 if hasattr(value, "__len__") else 1000) * sum(
        abs(x) if isinstance(x, int) else _size(x) for x in (*args, *kwargs.values()))


PERCENT, BRACES = (functools.partial(_formatted, mark) for mark in FIELDS)
SIZES: dict[str, Callable[..., int]] = {  # of a result before its step: methods of texts, filters and tests, by name
    **dict.fromkeys("batch center expandtabs indent ljust lstrip rfind rindex rjust round rpartition rstrip slice "
                    "strip translate trim urlize wordwrap zfill".split(), _product),  # length × widths, × texts
    "replace": lambda text, old, new, count=None: len(str(text)) + len(str(new)) * str(text).count(str(old)),
    "format": PERCENT, "format_map": BRACES, "divisibleby": PERCENT, "even": PERCENT, "odd": PERCENT}  # value % number


def _bounded(function: Any, size: Callable[..., int]) -> Any:
    skipped = int(hasattr(function, "jinja_pass_arg"))  # the context or environment
    return functools.wraps(function)(lambda *args, **kwargs: (
        _checked(size(*args[skipped:], **kwargs)), function(*args, **kwargs))[1])


class _Generation(ext.Extension):  # the tag marks the assistant's text for training; here the body is rendered
    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=lineno)


class _Code(compiler.CodeGenerator):
    def visit_List(self, node: Any, frame: Any) -> None:  # measures new lists, tuples and dicts
        load = getattr(node, "ctx", "load") == "load"  # the names in {% for key, value in ... %} are a tuple, too
        self.write("environment.finalize(" * load)
        getattr(super(), f"visit_{type(node).__name__}")(node, frame)
        self.write(")" * load)

    visit_Tuple = visit_Dict = visit_List

    def visit_Concat(self, node: Any, frame: Any) -> None:
        self.write("(markup_join if context.eval_ctx.autoescape else str_join)(")
        self.visit(nodes.List(node.nodes), frame)
        self.write(")")


class _Sandbox(sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _Code
    concat = staticmethod(lambda pieces: "".join(_gathered(pieces)))  # the output of templates, macros and blocks

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr not in ("encode", "to_bytes") and super().is_safe_attribute(obj, attr, value):
            return True
        raise jinja2.exceptions.SecurityError(f"access to {attr!r} of a {type(obj).__name__} is unsafe")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = [x for x in (left, right) if isinstance(x, int)]
        if operator == "%":
            size = PERCENT(left, right)
        elif len(numbers) == 2:  # 2**16 bits, because the time for a product grows faster than the product
            size = 2**8 * left.bit_length() * (right if operator == "**" else 1) + 2**8 * right.bit_length()
        else:
            size = sum(_size(x) if numbers else len(x) for x in (left, right) if hasattr(x, "__len__"))
        _checked(size * (numbers[0] if operator == "*" and len(numbers) == 1 else 1))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = getattr(obj, "__wrapped__", obj)  # jinja2 wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str) and name == "join":
            args = tuple(_gathered(items, owner) for items in args)
        elif isinstance(owner, str) and (size := BRACES if name == "format" else SIZES.get(name)):
            _checked(size(owner, *args, **{key: kwargs[key] for key in kwargs if not key.startswith("_")}))
        return super().call(context, obj, *args, **kwargs)


def compile_template(source: str) -> jinja2.Template:
    """A compiled chat template. It is a foreign program, so this and render can raise any exception."""
    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None,
               sort_keys: bool = False) -> str:
        _checked(1000 * (indent if isinstance(indent, int) else _size(indent)))  # a line may be that many levels deep
        encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return "".join(_gathered(encoder.iterencode(x)))

    @jinja2.pass_context
    def join(context: Any, value: Any, d: str = "", attribute: Any = None) -> str:
        items = value if attribute is None else filters.sync_do_map(context, value, attribute=attribute)
        return filters.sync_do_join(context.eval_ctx, _gathered(items, str(d)), d)
    env = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols],
                   finalize=lambda value: (_size(value), value)[1], optimized=False)
    for table in (env.filters, env.tests):
        table |= {name: _bounded(table[name], SIZES[name]) for name in SIZES if name in table}
    env.filters |= {"join": join, "tojson": tojson}
    env.globals |= {"raise_exception": raise_exception, "dict": lambda *args, **kwargs: dict(*args, **kwargs),
                    "strftime_now": _bounded(lambda format: datetime.now().strftime(format), PERCENT)}
    del env.globals["lipsum"]
    return env.from_string(source[:_checked(len(source), MAX_TEMPLATE)])


def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    return template.render(variables)
