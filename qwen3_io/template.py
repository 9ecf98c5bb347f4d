"""Chat templates, rendered as transformers renders them, but so that they can do no harm.

    template = compile_template(source)
    text = render(template, {"messages": [...], ...})

A chat template comes with a model: it is a program in jinja's language that somebody else wrote.
"""
import json
import math
import re
import sys
import time
import types
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor
import markupsafe
from jinja2 import nodes

# ----------------------------------------------------------------------------------------------------------------------
# Chat templates: limits
#
# A template is a program that came with a model's files, and a program can run forever or fill the memory. jinja2's
# sandbox keeps it away from Python's internals; here, a meter gives each rendering three limits:
#
#     time      MAX_SECONDS. Looked at between steps, so each step must be short by itself
#     a value   MAX_SIZE: characters, and ELEMENT for each element of a list or dict, in all levels together
#     memory    MAX_MEMORY: bytes of the values made and of the output. Only large values are given back when they go
#
# The last two grow with the conversation, so that none is refused for its length.
#
# Why nothing gets past: (1) All that makes a value, compares values, prints, or enters the body of a loop or a macro
# goes through the meter: calls and most operators in _Sandbox, filters and tests in _limited, the rest by _AddMeter.
# (2) Nearly all steps make at most a few times what they are given, so it is enough to measure their results. Those
# that can multiply it (a product, a field's width, replace, join, indent, ...) are checked before they are done.
# (3) Everything that there is, is listed here. What published templates do without (center, encode, wordwrap, lipsum,
# include, ...) is not there. Namespaces are the only values that change, and these are not printed.

MAX_TEMPLATE = 2**16  # characters, for compiling has no deadline; the longest of 70 published templates has 17,000
MAX_SECONDS = 10.0
MAX_SIZE = 4_000_000
MAX_MEMORY = 2**28
MAX_DEPTH = 1000  # lists in lists in lists; Python does not print or compare deeper ones either
ELEMENT = 8
LARGE = 2**14  # bytes
METER = "the meter"  # the variable that holds it: no template can write a name with a space

FREE_FILTERS = ("attr", "count", "d", "default", "first", "float", "last", "length")  # quick, nothing new
TEXT_FILTERS = ("abs", "capitalize", "e", "escape", "indent", "int", "lower", "round", "safe", "string", "title",
                "trim", "upper")
ITEM_FILTERS = ("dictsort", "groupby", "items", "list", "map", "max", "min", "reverse", "sort", "sum")
CHOOSING_FILTERS = ("reject", "rejectattr", "select", "selectattr", "unique")
COSTLY_TESTS = ("!=", "<", "<=", "==", ">", ">=", "divisibleby", "eq", "equalto", "even", "ge", "greaterthan", "gt",
                "in", "le", "lessthan", "lower", "lt", "ne", "odd", "upper")
TEXT_METHODS = frozenset(
    "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace "
    "istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit "
    "rstrip split splitlines startswith strip swapcase title upper".split())  # and format, which jinja2 hands out
VIEWS = (type({}.keys()), type({}.values()), type({}.items()))
CONTAINERS = (list, tuple, dict, *VIEWS)
METHODS: dict[type, frozenset[str]] = {
    str: TEXT_METHODS, markupsafe.Markup: TEXT_METHODS, dict: frozenset({"get", "items", "keys", "values"}),
    list: frozenset({"count", "index"}), tuple: frozenset({"count", "index"}),
    jinja2.runtime.LoopContext: frozenset({
        "changed", "cycle", "depth", "depth0", "first", "index", "index0", "last", "length", "nextitem", "previtem",
        "revindex", "revindex0"}),
    **dict.fromkeys((int, bool, float, complex, range, type, *VIEWS), frozenset())}
PERCENT_FIELD = re.compile(r"%(?:\(\w*\))?[-+ #0]*\d{0,3}(?:\.\d{0,3})?[A-Za-z%]")
BRACE_FIELD = re.compile(r"{{|}}|{\w*(?:![rsa])?(?::[^{}]?[<>=^]?[-+ ]?#?\d{0,3}[,_]?(?:\.\d{0,3})?[A-Za-z%]?)?}")


def _refused(why: str) -> jinja2.TemplateRuntimeError:
    return jinja2.TemplateRuntimeError(f"stopped, because it {why}")


def _size(value: Any, limit: float = math.inf) -> int:
    """The characters and elements of a nested value; what is in it twice counts twice, as when it is printed."""
    size, level = 0, [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, CONTAINERS):
                size += ELEMENT * len(item)
                if size > limit:
                    return size
                inner.extend(item)
                if isinstance(item, dict):
                    inner.extend(item.values())
        if not inner:
            return size
        level = inner
    raise _refused(f"nests a value more than {MAX_DEPTH} levels deep")


class _Meter:
    """What one rendering may still cost. What takes a value here gives it back as it is."""

    def __init__(self, variables: dict[str, Any]):
        size = _size(variables)
        self.deadline = time.monotonic() + MAX_SECONDS
        self.max_size = MAX_SIZE + 4 * size
        self.memory = MAX_MEMORY + 40 * size
        self.large: dict[int, Any] = {}  # by id: counted, and given back by refund
        self.unchecked = 0  # bytes of large values since refund looked

    def spend(self, n_bytes: int) -> None:
        self.memory -= n_bytes
        if self.memory < 0:
            raise _refused("makes too much text or too many values")
        if time.monotonic() > self.deadline:
            raise _refused(f"takes longer than {MAX_SECONDS:g} seconds")

    def allow(self, size: int) -> None:
        if size > self.max_size:
            raise _refused(f"makes a value of more than {self.max_size} characters")

    def measured(self, value: Any) -> Any:
        """A new value."""
        if isinstance(value, str):
            self.allow(len(value))
        elif isinstance(value, (list, tuple, dict)):
            self.allow(_size(value, self.max_size))
        elif isinstance(value, types.GeneratorType):
            return self.lazy(value, self.measured)
        return self.sliced(value)

    def sliced(self, value: Any) -> Any:
        """A part of an old value: not looked into, as nothing in it is new."""
        n_bytes = sys.getsizeof(value)
        if n_bytes < LARGE:
            small_number = isinstance(value, (int, float)) and -2**60 < value < 2**60
            self.spend(0 if small_number else n_bytes)
        elif id(value) not in self.large:
            self.spend(n_bytes)
            self.large[id(value)] = value
            self.unchecked += n_bytes
            if self.unchecked > MAX_MEMORY // 8:
                self.refund()
        return value

    def refund(self) -> None:
        """Gives back what was spent on large values that are gone: a text may grow, message by message, to the end."""
        for key in list(self.large):
            if sys.getrefcount(self.large[key]) == 2:  # one is in self.large, one is getrefcount's own
                self.memory += sys.getsizeof(self.large.pop(key))
        self.unchecked = 0

    def lazy(self, items: Iterator[Any], counted: Any) -> "_Items":
        self.spend(1000)
        return _Items(items, counted)

    def timed(self, value: Any) -> Any:
        """An old value, or the result of a comparison, that can have taken long to find."""
        self.spend(0)
        return value

    def spread(self, items: Iterable[Any]) -> list[Any]:
        """The items in a call's `*items`, which are copied a few times on the way."""
        items = [self.measured(item) for item in items]
        self.spend(40 * len(items))
        return items

    def spread_keywords(self, values: dict[str, Any]) -> dict[str, Any]:
        self.spend(400 * len(values))
        return values

    def added(self, total: Any, *others: Any) -> Any:
        """`total + other + other + ...`. Short texts on the way need no measuring: the last one is measured."""
        for other in others:
            total = total + other
            if type(total) is not str or len(total) > 1000:
                self.measured(total)
        return self.measured(total)

    def joined(self, items: Iterable[Any], separator: str = "") -> str:
        """The items as one text. Their sum is known before they are joined."""
        texts, size = [], 0
        for item in items:
            texts.append(str(item))
            size += len(separator) + len(texts[-1])
            self.allow(size)
        return self.measured(separator.join(texts))

    def concatenated(self, *items: Any) -> str:
        return self.joined(items)

    def printed(self, value: Any) -> str:
        text = value if isinstance(value, str) else str(value)
        self.spend(4 * len(text) + 64)  # a single wide character makes all the output 4 bytes a character
        return text

    def absent(self, tag: str) -> None:
        raise _refused(f"uses a tag that chat templates cannot have: {tag}")

    def entered(self, n_characters: int) -> None:
        """The body of a loop or macro, which prints so much text of its own."""
        self.spend(4 * n_characters)


class _Items:
    """What a lazy filter yields, counted as it comes. (Python 3.12 crashes on chains of nothing but generators.)"""

    def __init__(self, items: Iterator[Any], counted: Any):
        self._items, self._counted = items, counted

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self._counted(next(self._items))


def _meter_filter(method: Any) -> Any:
    @jinja2.pass_context
    def function(context: jinja2.runtime.Context, /, *values: Any) -> Any:
        return method(context.parent[METER], *values)
    return function


# These are filters since compiled templates call filters directly. With their "~", no template can write the names.
METER_FILTERS = {f"~{name}": _meter_filter(getattr(_Meter, name))
                 for name in ("measured", "sliced", "timed", "spread", "spread_keywords", "added", "concatenated",
                              "printed", "entered", "absent")}


class _AddMeter(jinja2.visitor.NodeTransformer):
    """Rewrites a parsed template so that what costs something goes through the meter. It renders the same as before."""

    def through(self, name: str, node: nodes.Expr | None, *args: nodes.Expr) -> nodes.Filter:
        return nodes.Filter(node, name, list(args), [], None, None, lineno=0 if node is None else node.lineno)

    def visit_Output(self, node: nodes.Output) -> nodes.Output:
        literal = (nodes.TemplateData, nodes.Const)  # counted by body
        node.nodes = [n if isinstance(n, literal) else self.through("~printed", self.visit(n)) for n in node.nodes]
        return node

    def entered(self, n_characters: int, lineno: int) -> nodes.ExprStmt:
        return nodes.ExprStmt(self.through("~entered", nodes.Const(n_characters, lineno=lineno)), lineno=lineno)

    def body(self, node: Any) -> Any:
        """What can be repeated: counts the text that it prints by itself."""
        printed = [part for output in node.find_all(nodes.Output) for part in output.nodes]
        n_characters = sum(len(part.data) if isinstance(part, nodes.TemplateData) else
                           len(str(part.value)) + 64 if isinstance(part, nodes.Const) else 0 for part in printed)
        self.generic_visit(node)
        node.body.insert(0, self.entered(n_characters, node.lineno))
        return node

    def visit_Macro(self, node: nodes.Macro) -> list[nodes.Stmt]:
        return [self.entered(250, node.lineno), self.body(node)]  # to define it makes objects of a thousand bytes

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.body(node)
        if node.test is not None:
            node.test = self.through("~timed", node.test)
        return node

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.FilterBlock:
        body = [self.entered(250, node.lineno), self.body(node)]
        return nodes.FilterBlock(body, self.through("~printed", None), lineno=node.lineno)

    def visit_FilterBlock(self, node: nodes.FilterBlock) -> nodes.FilterBlock:
        self.generic_visit(node)
        node.filter = self.through("~printed", node.filter)
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.AssignBlock:
        self.generic_visit(node)
        node.filter = self.through("~measured", node.filter)
        return node

    def visit_Name(self, node: nodes.Name) -> nodes.Expr:
        made = node.ctx == "load" and node.name in ("varargs", "kwargs")  # a macro's, put together by its caller
        return self.through("~measured", node) if made else node

    def display(self, node: Any) -> Any:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") == "store" else self.through("~measured", node)

    visit_List = visit_Tuple = visit_Dict = display

    def visit_Neg(self, node: nodes.Neg) -> nodes.Expr:
        if isinstance(node.node, nodes.Const) and isinstance(node.node.value, (int, float)):
            return nodes.Const(-node.node.value, lineno=node.lineno)
        return self.display(node)

    def visit_Add(self, node: nodes.Add) -> nodes.Filter:
        terms: list[nodes.Expr] = []
        left: nodes.Expr = node
        while isinstance(left, nodes.Add):
            terms.insert(0, self.visit(left.right))
            left = left.left
        return self.through("~added", self.visit(left), *terms)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return self.through("~concatenated", *node.nodes)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Const):
            return node
        if isinstance(node.node, (nodes.Const, nodes.Not)):
            node.node = self.through("~timed", node.node)  # else Python warns of literals that cannot be sliced
        return self.through("~sliced" if isinstance(node.arg, nodes.Slice) else "~timed", node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Expr:
        self.generic_visit(node)
        quick = all(isinstance(operand.expr, nodes.Const) for operand in node.ops)
        return node if quick else self.through("~timed", node)

    def call(self, node: Any) -> Any:
        self.generic_visit(node)
        if node.dyn_args is not None:
            node.dyn_args = self.through("~spread", node.dyn_args)
        if node.dyn_kwargs is not None:
            node.dyn_kwargs = self.through("~spread_keywords", node.dyn_kwargs)
        return node

    visit_Call = visit_Filter = visit_Test = call

    def absent(self, node: nodes.Stmt) -> nodes.Stmt:
        """Tags that need other files, or are for HTML; the code made for some grows with the template's square."""
        if isinstance(node, nodes.Block) and not node.scoped:
            return self.body(node)
        tag = "autoescape" if isinstance(node, nodes.ScopedEvalContextModifier) else type(node).__name__.lower()
        return nodes.ExprStmt(self.through("~absent", nodes.Const(tag, lineno=node.lineno)), lineno=node.lineno)

    visit_Block = visit_Extends = visit_Include = visit_Import = visit_FromImport = absent
    visit_ScopedEvalContextModifier = absent


# --- What can make much more than it is given

def _check_product(meter: _Meter, operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        power = operator == "**"
        bits = left.bit_length() * max(right, 0) if power else left.bit_length() + right.bit_length()
        meter.allow(100 * bits)  # the time for a product grows faster than its digits
    else:
        value, times = (right, left) if isinstance(left, int) else (left, right)
        meter.allow(_size(value, meter.max_size) * times if isinstance(times, int) else 0)


def _check_fields(meter: _Meter, text: str, field: re.Pattern[str], *values: Any) -> None:
    """Formatting by % or format: only plain fields, with widths below 1,000."""
    rest, n_fields = field.subn("", text)
    if "%" in rest if field is PERCENT_FIELD else "{" in rest or "}" in rest:
        raise _refused("formats with other than simple fields")
    meter.allow(len(text) + n_fields * (10_000 + _size(values, meter.max_size)))


def _check_replace(meter: _Meter, text: str, old: str, new: str, count: int | None = None) -> None:
    times = text.count(old)
    meter.allow(len(text) + len(new) * (times if count is None or count < 0 else min(times, count)))


def _check_pieces(meter: _Meter, text: str, separator: str | None) -> None:
    n_pieces = text.count(separator) + 1 if separator else len(text) // 2 + 1
    meter.allow(len(text) + ELEMENT * n_pieces)
    meter.spend(sys.getsizeof(text) + 64 * n_pieces)


def _check_effort(meter: _Meter, text: Any, argument: Any) -> None:
    """Stripping, searching from the end, and reading a number, take as long as the product of the two lengths."""
    if isinstance(text, str) and isinstance(argument, str) and len(text) * len(argument) > 100 * meter.max_size:
        raise _refused("strips or searches too long a text")


def _check_method(meter: _Meter, text: str, name: str, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Raises if a method of str would make or take too much. The items for a join are made here, into `args`."""
    if name == "join":
        args[:] = [meter.spread(*args)]
        meter.allow(_size(args, meter.max_size) + len(text) * len(args[0]))
    elif name == "replace":
        _check_replace(meter, text, *args, **kwargs)
    elif name in ("format", "format_map"):
        _check_fields(meter, text, BRACE_FIELD, args, kwargs)
    elif name in ("split", "rsplit", "splitlines", "partition", "rpartition"):
        separator = args[0] if args else kwargs.get("sep")
        _check_pieces(meter, text, separator if isinstance(separator, str) else None)
    if name in ("lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"):
        for argument in (*args, *kwargs.values()):
            _check_effort(meter, text, argument)


FILTER_CHECKS: dict[str, Any] = {  # with the parameters of the filter
    "indent": lambda meter, s, width=4, first=False, blank=False:
        meter.allow(len(s) + len(s.splitlines()) * (len(width) if isinstance(width, str) else width)),
    "int": lambda meter, value, default=0, base=10: _check_effort(meter, value, value),
    "round": lambda meter, value, precision=0, method="common": meter.allow(MAX_DEPTH * abs(precision)),
    "sum": lambda meter, iterable, attribute=None, start=0: start + 0,  # numbers only: a sum of lists is quadratic
    "title": lambda meter, s: meter.allow(4 * len(str(s))),  # takes the text apart, word by word
    "trim": lambda meter, value, chars=None: _check_effort(meter, str(value), chars),
}


def _limited(name: str) -> Any:
    """jinja2's filter of that name, with its result measured."""
    check, text_filter = FILTER_CHECKS.get(name), JINJA_FILTERS.filters[name] if name in TEXT_FILTERS else None

    @jinja2.pass_context
    def limited(context: jinja2.runtime.Context, /, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = context.parent[METER]
        if name not in TEXT_FILTERS and hasattr(value, "__len__"):
            # The items of a list exist, those of a string or range do not; groupby makes a list and a tuple for each.
            meter.spend((8 if isinstance(value, (list, tuple)) and name != "groupby" else 200) * len(value))
        if check:
            check(meter, value, *args, **kwargs)
        if text_filter:  # they want nothing but their arguments, and this is quicker
            return meter.measured(text_filter(value, *args, **kwargs))
        if name == "unique":
            value = map(meter.timed, value)  # numbers can be chosen so that a set takes quadratic time for them
        result = JINJA_FILTERS.call_filter(name, value, args, kwargs, context=context)
        return meter.lazy(result, meter.timed) if name in CHOOSING_FILTERS else meter.measured(result)
    return limited


@jinja2.pass_context
def _replace(context: jinja2.runtime.Context, /, s: Any, old: Any, new: Any, count: int | None = None) -> str:
    meter = context.parent[METER]
    _check_replace(meter, str(s), str(old), str(new), count)
    return meter.measured(str(s).replace(str(old), str(new), -1 if count is None else count))


@jinja2.pass_context
def _join(context: jinja2.runtime.Context, /, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = context.environment.call_filter("map", value, kwargs={"attribute": attribute}, context=context)
    meter = context.parent[METER]
    if isinstance(value, str):
        meter.spend(200 * len(value))
    return meter.joined(value, str(d))


def _limited_test(name: str, test: Any) -> Any:
    @jinja2.pass_context
    def limited(context: jinja2.runtime.Context, /, value: Any, *args: Any) -> bool:
        context.parent[METER].spend(0)
        if name in ("divisibleby", "even", "odd") and isinstance(value, str):
            raise TypeError(f"{name} is for numbers")  # it uses %, which formats texts
        return test(value, *args)
    return limited


# ----------------------------------------------------------------------------------------------------------------------
# Chat templates

class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text for training; here it only renders it."""

    tags = {"generation"}

    def parse(self, parser: Any) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """jinja2's sandbox, with the meter in operators and calls."""

    intercepted_binops = frozenset({"-", "*", "/", "//", "%", "**"})  # call_binop does these; for + see visit_Add

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        # jinja2 would hand out an undefined value, which prints as nothing: refuse at once instead.
        raise jinja2.exceptions.SecurityError(f"access to {attribute!r} of a {type(obj).__name__} is unsafe")

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        methods = METHODS.get(type(obj))
        if methods is not None:
            return attr in methods
        return not attr.startswith("_") and (type(obj) is _Namespace or super().is_safe_attribute(obj, attr, value))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        meter = context.parent[METER]
        if operator == "%" and isinstance(left, str):
            _check_fields(meter, left, PERCENT_FIELD, right)
        elif operator in ("*", "**"):
            _check_product(meter, operator, left, right)
        return meter.measured(self.binop_table[operator](left, right))

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        meter = context.parent[METER]
        for variables in ("_loop_vars", "_block_vars"):  # jinja2 passes them for functions that take the context,
            kwargs.pop(variables, None)                  # and a template could pass a context with another meter
        method = getattr(obj, "__wrapped__", obj)  # jinja2 wraps str.format
        owner = getattr(method, "__self__", None)
        arguments = [*args]
        if isinstance(owner, str):
            _check_method(meter, owner, method.__name__, arguments, kwargs)
        result = super().call(context, obj, *arguments, **kwargs)
        old = isinstance(owner, (list, tuple, dict))  # they have only methods that look something up
        return meter.sliced(result) if old else meter.measured(result)


class _Namespace(jinja2.utils.Namespace):
    def __repr__(self) -> str:
        return "<Namespace>"  # jinja2's prints what is in it, which can be anything by then


@jinja2.pass_context
def _dict(context: jinja2.runtime.Context, /, *args: Any, **kwargs: Any) -> dict[Any, Any]:
    meter = context.parent[METER]
    pairs = [arg if isinstance(arg, dict) else meter.spread(arg) for arg in args]
    meter.allow(sum(1000 * len(arg) for arg in pairs if isinstance(arg, list)))  # hashes can be made to collide
    return meter.measured(dict(*pairs, **kwargs))


@jinja2.pass_context
def _namespace(context: jinja2.runtime.Context, /, *args: Any, **kwargs: Any) -> _Namespace:
    context.parent[METER].spend(500)
    return _Namespace(_dict(context, *args, **kwargs))


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(fmt: str) -> str:
    if len(fmt) > 1000 or re.search("%[^A-Za-z%]*[0-9]{3}", fmt):  # a field is padded to its width
        raise _refused("formats the date by more than a thousand characters, or with a field of more than 99")
    return datetime.now().strftime(fmt)


@jinja2.pass_context
def _tojson(context: jinja2.runtime.Context, /, value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """JSON as models saw it in training: non-ASCII kept, and no HTML escapes (jinja2's own filter has them)."""
    meter = context.parent[METER]
    options = {"ensure_ascii": ensure_ascii, "indent": indent, "separators": separators, "sort_keys": sort_keys}
    if indent is None and separators is None:
        return meter.measured(json.dumps(value, **options))
    meter.allow(MAX_DEPTH * (len(indent) if isinstance(indent, str) else indent or 0))
    return meter.joined(json.JSONEncoder(**options).iterencode(value))


JINJA_FILTERS = _Sandbox()  # has all of jinja2's filters; templates get them through _limited only


def _environment() -> _Sandbox:
    """What transformers renders templates in (all settings change the output), less what has no limit."""
    env = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols],
                   optimized=False)  # nothing is computed while it compiles
    env.filters = {**{name: env.filters[name] for name in FREE_FILTERS},
                   **{name: _limited(name) for name in TEXT_FILTERS + ITEM_FILTERS + CHOOSING_FILTERS},
                   **METER_FILTERS, "join": _join, "replace": _replace, "tojson": _tojson}
    env.tests.update({name: _limited_test(name, env.tests[name]) for name in COSTLY_TESTS})
    env.globals = {"range": env.globals["range"], "dict": _dict, "namespace": _namespace,
                   "raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return env


def compile_template(source: str) -> jinja2.Template:
    """A chat template, compiled so that rendering it has limits. Raises what a template can: anything, see render."""
    if len(source) > MAX_TEMPLATE:
        raise jinja2.TemplateError(f"it has {len(source)} characters, and at most {MAX_TEMPLATE} are read")
    env = _environment()
    tree = _AddMeter().visit(env.parse(source))
    return env.template_class.from_code(env, env.compile(tree), env.make_globals(None))


def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """The text of a compiled template. It is a foreign program, so it can fail with any exception."""
    return template.render({**variables, METER: _Meter(variables)})
