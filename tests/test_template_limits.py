"""Tests of the limits on chat templates: any template renders or gives one error line, in bounded time and memory.

The hostile templates are rendered in a child process with limited memory, which reports on each of them, so that a
crash of the interpreter, a hang and a full memory are failures like any other.
"""

import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import jinja2.ext
import jinja2.sandbox
import pytest

from qwen3_io import template as qwen3_template
import tokenizer_utils
from test_tokenizer_utils import error_of, tiny, user
from qwen3_io.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
BUNDLED = json.loads((ROOT / "demo/tokenizer_config.json").read_text("utf-8"))["chat_template"]
GIB = 2**30

CHILD = """
import json, os, sys, time
import tokenizers, tokenizer_utils
from qwen3_io import template as qwen3_template
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (3 * 2**29, 3 * 2**29))
except ImportError:  # not a Unix
    pass

def peak():  # ru_maxrss would count what the parent had before this program was started in its place
    if not os.path.exists("/proc/self/status"):
        return 0
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))

qwen3_template.MAX_SECONDS = float(sys.argv[1])
backend, messages = tokenizers.Tokenizer(tokenizers.models.BPE()), [{"role": "user", "content": "Hi"}]
for template in json.load(sys.stdin):
    start = time.monotonic()
    try:
        outcome = len(tokenizer_utils.Tokenizer(backend, template).apply_chat_template(messages))
    except tokenizer_utils.InputError as error:
        outcome = str(error)
    print(json.dumps([outcome, time.monotonic() - start, peak()]), flush=True)
"""


def outcomes(templates, seconds=0.1):
    """For each template the length of what it rendered or the error, of a child process that survives all of them."""
    child = subprocess.run([sys.executable, "-c", CHILD, str(seconds)], cwd=ROOT, input=json.dumps(templates),
                           text=True, capture_output=True, timeout=300)
    results = [json.loads(line) for line in child.stdout.splitlines()]
    assert len(results) == len(templates), (child.returncode, child.stderr[-500:], templates[len(results)][:500])
    for template, (outcome, seconds, peak) in zip(templates, results, strict=True):
        assert seconds < 12 and peak < GIB, (template[:500], outcome, seconds, peak)
        assert isinstance(outcome, int) or (outcome and "\n" not in outcome and len(outcome) < 900), template[:500]
    return [outcome for outcome, _, _ in results]


# ----------------------------------------------------------------------------------------------------------------------
# Bombs

BIG = "{% set x = 'a' * 3900000 %}"
LIST = "{% set x = [0] * 450000 %}"
NS = "{% set ns = namespace(x='a', y=[1], l=[]) %}"


def repeated(expression, start="'a'", times=100):
    """`x = expression of x`, many times over."""
    return (f"{{% set ns = namespace(x={start}) %}}{{% for i in range({times}) %}}{{% set ns.x = {expression} %}}"
            "{% endfor %}{{ ns.x }}")


DOUBLING = [repeated(expression) for expression in (
    "ns.x ~ ns.x", "ns.x + ns.x", "ns.x * 2", "[ns.x, ns.x] | join", "'%s%s' % (ns.x, ns.x)", "'{0}{0}'.format(ns.x)",
    "ns.x.replace('a', 'aa')", "ns.x | replace('a', 'aa')", "'a'.join([ns.x, ns.x])", "ns.x.upper() ~ ns.x.lower()",
    "(ns.x | tojson) ~ ns.x", "('<' ~ ns.x) | e ~ ns.x", "(ns.x ~ '\\n' ~ ns.x) | indent", "[ns.x, ns.x]",
    "(ns.x, ns.x)", "{'a': ns.x, 'b': ns.x}", "dict(a=ns.x, b=ns.x)", "[ns.x, ns.x] | map('default') | list",
    "[ns.x] + [ns.x]", "[{'a': ns.x}.items(), {'a': ns.x}.items()]", "[{'a': ns.x}.values(), {'a': ns.x}.values()]",
    "{'a': ns.x, 'b': ns.x} | dictsort", "[{'a': 1, 'b': ns.x}, {'a': 1, 'b': ns.x}] | groupby('a')",
    "[[ns.x, ns.x]] | first", "[ns.x, ns.x] | list + [ns.x]", "[ns.x, ns.x] | reverse | list + [ns.x]")] + [
    NS + "{% for i in range(99) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    NS + "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% for i in range(99) %}{% set ns.x = m(ns.x) %}{% endfor %}",
    NS + "{% macro m() %}{% set ns.x = varargs %}{% endmacro %}{% for i in range(99) %}{{ m(ns.x, ns.x) }}{% endfor %}"
         "{{ ns.x }}",
    NS + "{% macro m() %}{% set ns.x = kwargs %}{% endmacro %}{% for i in range(99) %}{{ m(a=ns.x, b=ns.x) }}"
         "{% endfor %}{{ ns.x }}",
    NS + "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}{% for i in range(99) %}{% set ns.x %}"
         "{% call m() %}{{ ns.x }}{% endcall %}{% endset %}{% endfor %}",
    NS + "{% for i in range(99) %}{% set ns.x %}{% filter upper %}{{ ns.x }}{{ ns.x }}{% endfilter %}{% endset %}"
         "{% endfor %}",
    "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
]

ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}"
    "{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}some text{% endfor %}{% endfor %}",
    "{% for a in messages * 9999 %}{% for b in messages * 9999 %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in [0] * 450000 if false %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for x in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 60 }}{% endfor %}",
    "{% block a %}x{{ self.a() }}{{ self.a() }}{% endblock %}",
    "{% block a %}x{% endblock %}{% for i in range(99999) %}{% for j in range(99999) %}{{ self.a() }}{% endfor %}"
    "{% endfor %}",
    BIG + "{% for i in range(99999) %}{% if x in x ~ 'b' %}{% endif %}{% endfor %}",
    BIG + "{% set y = 'a' * 3899999 ~ 'a' %}" + "{% if x == y %}{% endif %}" * 2400,
    LIST + "{% set y = [0] * 450000 %}" + "{% if x == y %}{% endif %}" * 2000,
    LIST + "{% set y = [0] * 450000 %}" + "{% if x is eq(y) %}{% endif %}" * 2000,
    LIST + "{% if x is lower %}{% endif %}" * 2000,
    "{% set x = (0,) * 450000 %}{% set d = {} %}" + "{% if d[x] %}{% endif %}" * 2400,
    LIST + "{% for i in range(999) %}{% if x | sort %}{% endif %}{% endfor %}",
    LIST + "{{ x | min }}" * 2000, LIST + "{{ x | select('eq', x) | list }}" * 1000, LIST + "{{ x | tojson }}" * 2000,
    "{% set x = [{'a': 1}] * 90000 %}" + "{{ x | groupby('a') | length }}" * 1000,
    "{% for a in range(99999) %}{% for b in range(99999) %}" + "x" * 30000 + "{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{{ '" + "x" * 30000 + "' }}{% endfor %}{% endfor %}",
    "{% macro m() %}" + "x" * 30000 + "{% endmacro %}{% for a in range(99999) %}{{ m() }}{{ m() }}{% endfor %}",
    "{% macro m(n) %}{% set x = 'a' * 3900000 ~ n %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "{% macro m() %}{{ m(*varargs) }}{% endmacro %}{{ m(*([1] * 450000)) }}",
    "{% for i in range(99999) %}{{ 'a' * 3900000 }}{% endfor %}\U0001f600",
    NS + "{% for i in range(99999) %}{% for j in range(99999) %}{% set ns.l = ns.l + [i] %}{% endfor %}{% endfor %}",
    NS + "{% for i in range(99999) %}{% set ns.l = [ns.l, range(90000) | list] %}{% endfor %}",
    NS + "{% for i in range(99999) %}{% set ns.l = [ns.l, range(90000) | map('map', 'upper') | list] %}{% endfor %}",
    NS + "{% for i in range(999) %}{% set ns.l = [ns.l, ('ab,' * 250000).split(',')] %}{% endfor %}",
    "".join(f"{{% set a{i} = 'a' * 3900000 %}}" for i in range(1000)),
    # Integers with equal hashes make sets and dicts quadratic.
    "{% set s %}{% for i in range(50000) %}{{ i * 2305843009213693951 }},{% endfor %}{% endset %}"
    "{% set x = s[:-1].split(',') | map('int') | list %}{{ x | unique | list | length }}",
    "{% set s %}{% for i in range(50000) %}{{ i * 2305843009213693951 }},{% endfor %}{% endset %}"
    "{{ dict(s[:-1].split(',') | map('int') | groupby(none)) | length }}",
]

AT_ONCE = ["{{ " + expression + " }}" for expression in (
    "'a' * 10**10", "10**10 * 'a'", "[0] * 10**10", "(0,) * 10**9", "10**(10**10)", "messages * 10**9",
    "range(10**10)", "'%9999999999d' % 1", "'%*d' % (10**9, 1)", "'%.999999999f' % 1", "'%(a)999999999d' % {'a': 1}",
    "'%%%999999999d' % 1", "'%((a))999999999d' % {'(a)': 1}", "'%-#999999999x' % 1", "'%99999999d' is odd",
    "'%99999999d' is divisibleby(1)", "('%99999999d' | safe) % 1", "'{:999999999}'.format(1)",
    "'{0:{1}}'.format(1, 10**9)", "'{:9<999999999}'.format(1)", "'{:.999999999f}'.format(1.0)",
    "('{:99999999}' | safe).format(1)", "'{a[b]:999999999}'.format(a={'b': 1})",
    "'{x:999999999}'.format_map({'x': 1})", "'a'.center(10**9)", "'a'.ljust(10**9)", "'a'.zfill(10**9)",
    "'\\t'.expandtabs(10**9)", "'a'.encode('punycode')", "'a'.translate({97: 'b' * 99})",
    "(1).to_bytes(10**9, 'big')", "'a' | center(10**9)", "'a' | wordwrap(1, wrapstring='a' * 99999)", "lipsum(10**6)",
    "[1] | batch(10**9, 0) | list", "'a' | indent(10**10, first=true)", "('\\n' * 1000000) | indent(10**6)",
    "[1, [1]] | tojson(indent=10**10)", "([1] * 450000) | tojson(separators=('a' * 99999, 'b'))",
    "('\\u0001' * 3900000) | tojson", "('9' * 10**6) | int + none", "('f' * 3400000) | int(base=16)",
    "5 | round(-10**9)", "5 | round(10**9, 'ceil')", "([[1]] * 300000) | sum(start=[])",
    "('a' * 999).replace('', 'a' * 999999)", "('a' * 3900000) | list | join('a' * 999)",
    "('a' * 3900000).join(['b'] * 9999)", "('ab ' * 1300000).split()", "('a' * 3900000).strip('b' * 3900000 ~ 'a')",
    "('a' * 3900000) | trim('b' * 3900000)", "('a' * 3900000).rfind('a' * 1500000 ~ 'b' ~ 'a' * 400000)",
    "('%s' * 450000) % (('a' * 999999,) * 450000)", "('%(a)s' * 99999) % {'a': 'a' * 99999}",
    "('{0}' * 99999).format('a' * 99999)", "('\u4f60' * 3900000) | list",
    "[('\\U000e0001' * 3900000) ~ '\U0001f600'] ~ ''", "('a ' * 1900000) | title", "strftime_now('%99999999d')",
    "strftime_now('%-099999999d')", "strftime_now('%_99999999A')", "strftime_now('%c' * 99999)",
    "raise_exception('a' * 3900000)", "{}['a' * 3900000].x", "[[1] | map('abs')] | tojson", "self.a.b.c",
    # the meter and what it trusts cannot be had
    "([1] | map('abs')).meter.memory", "([1] | map('abs'))._counted", "{'a': 1}.items().mapping", "dict.fromkeys([1])",
    "namespace(_loop_vars={'the meter': 1}) ~ 'a' * 10**10", "dict(**{'_block_vars': {'the meter': 1}}) ~ 'a' * 10**10",
)] + [
    BIG + "{{ ([1] * 450000) | join(x) }}",
    BIG + "{% set ns = namespace(x=x) %}{{ ([ns] * 450000) | join(attribute='x') }}",
    BIG + "{% set ns = namespace(x=x) %}{{ ('{0.x}' * 1000).format(ns) }}",
    BIG + "{% set ns = namespace(x=x) %}{% set y = ([ns] * 450000) | map(attribute='x') | list %}{{ y == y }}",
    "{% filter replace('a', 'a' * 3900000) %}aa{% endfilter %}",
    "{% autoescape true %}x{% endautoescape %}", "{% include 'x' %}", "{% extends 'x' %}", "{% import 'x' as y %}",
    "x" * 10**6,
]

# Values in values in values. Freed one by one, such chains have crashed Python (3.12: generators).
CHAINS = [repeated(expression, "[1]", 60000) for expression in (
    "[ns.x]", "(ns.x,)", "{'a': ns.x}", "{'a': ns.x}.items()", "ns.x | map('upper')", "ns.x | select", "ns.x | unique",
    "[1] | map('default', ns.x)", "[ns.x] | reverse", "[ns.x].index", "[ns.x].missing", "namespace(x=ns.x)")] + [
    "{% set ns = namespace(x=1) %}{% for i in range(60000) %}{% set ns.x = (ns.x,) %}{% endfor %}{{ {ns.x: 1} }}",
    NS + "{% macro m() %}{% set ns.x = caller %}{% endmacro %}{% macro k(x) %}{% call m() %}{{ x }}{% endcall %}"
         "{% endmacro %}{% for i in range(60000) %}{{ k(ns.x) }}{% endfor %}{% set ns.x = 1 %}",
    NS + "{% set ns.x = [ns, ns] %}{{ ns }}{{ ns.x }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
]

SOURCES = ["{{ " + text + " }}" for text in (
    "(" * 32000 + "1" + ")" * 32000, "[" * 32000 + "]" * 32000, "{1:" * 16000 + "1" + "}" * 16000, "a" + ".b" * 30000,
    "a" + "[0]" * 20000, "a" + "()" * 30000, "a[" * 20000 + "0" + "]" * 20000, "not " * 16000 + "1", "-" * 60000 + "1",
    "1" + " | d" * 16000, "1" + "+1" * 30000, "1" + "~1" * 30000, "1" + "*1" * 30000, "1" + " or 1" * 12000,
    "1" + "<1" * 30000, "1 if 0 else " * 5000 + "1", "'a'" * 20000, "0x" + "f" * 60000, "9" * 60000,
    "1_" * 30000 + "1")] + [
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000, "{% if 1 %}" * 60 + "{% endif %}" * 60,
    "{% for x in y %}" * 21 + "{% endfor %}" * 21, "{% set x %}" * 3000 + "{% endset %}" * 3000,
    "{% macro m() %}" * 2000 + "{% endmacro %}" * 2000, "{% if 0 %}" + "{% elif 0 %}" * 5000 + "{% endif %}",
    "{{ x }}\n" * 8000, "{#" * 30000, "{%-" * 20000, "{% raw %}" * 7000,
    "".join(f"{{{{ a{i} }}}}" for i in range(5000)),
    "".join(f"{{% set a{i} = 1 %}}{{% if a{i} %}}{{% endif %}}" for i in range(1500)),
    "{% for x in y %}" + "".join(f"{{% set a{i} = 1 %}}{{% block b{i} scoped %}}{{% endblock %}}" for i in range(1000))
    + "{% endfor %}",
    "".join(f"{{% set a{i} = 1 %}}" for i in range(1600)) + "{% include x %}" * 1700,
    "{% macro m(" + ", ".join(f"a{i}" for i in range(7000)) + ") %}{% endmacro %}",
]


@pytest.mark.parametrize("bombs", [DOUBLING, ENDLESS, AT_ONCE], ids=["doubling", "endless", "at once"])
def test_bombs_are_refused(bombs):
    for template, outcome in zip(bombs, outcomes(bombs), strict=True):
        assert isinstance(outcome, str) and "MemoryError" not in outcome, (template[:300], outcome)


@pytest.mark.parametrize("templates", [CHAINS, SOURCES], ids=["chains", "sources"])
def test_nothing_crashes(templates):
    outcomes(templates)


def test_the_message_says_what_was_too_much(monkeypatch):
    assert qwen3_template.MAX_SECONDS == 10
    monkeypatch.setattr(qwen3_template, "MAX_SECONDS", 0.1)
    start = time.monotonic()
    assert "takes longer than 0.1 seconds" in error_of(tiny(ENDLESS[0]).apply_chat_template, user())
    assert time.monotonic() - start < 5
    assert "a value of more than 4000" in error_of(tiny("{{ 'a' * 10**10 }}").apply_chat_template, user())
    monkeypatch.setattr(qwen3_template, "MAX_SECONDS", 10)
    assert "too much text" in error_of(tiny(BIG + "{{ x }}" * 99).apply_chat_template, user())
    assert "at most 65536" in error_of(tiny.__wrapped__, "x" * 65537)


# ----------------------------------------------------------------------------------------------------------------------
# Random programs

ATOMS = ("a", "b", "ns.x", "ns.y", "messages", "missing", "loop", "loop.index", "m", "1", "2.5", "-3", "'text'",
         "'%s {}'", "''", "none", "true", "[]", "{}", "[1, 'b']", "{'k': 1}", "10**9", "99999", "'a' * 999999",
         "[0] * 99999")
BINARY = ("+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", "in", "not in", "and", "or")
FILTERS = ("list", "join", "length", "upper", "tojson", "string", "int", "first", "last", "sort", "reverse", "unique",
           "sum", "map('string')", "map('list')", "select", "replace('a', 'bb')", "indent(9)", "trim", "default('d')",
           "items", "dictsort", "round", "title", "e", "safe", "max", "groupby(0)", "map(attribute='k')",
           "tojson(indent=9)", "float", "join(b)", "replace(a, b)", "abs", "attr('x')", "selectattr('k')",
           "reject('none')", "capitalize", "indent(b)")
METHODS = ("upper()", "split()", "split('a')", "join(b)", "replace('t', a)", "items()", "get('k')", "format(b)",
           "strip(a)", "count(b)", "values()", "startswith('t')", "index(1)", "cycle(a, b)", "splitlines()", "x", "y.z",
           "rsplit(b)")
TESTS = ("defined", "none", "string", "mapping", "iterable", "odd", "eq(b)", "in(b)", "number", "sequence", "lower")


def expression(rng, depth):
    if depth <= 0 or rng.random() < 0.2:
        return rng.choice(ATOMS)
    one, two = expression(rng, depth - 1), expression(rng, depth - 1)
    return rng.choice((
        f"({one} {rng.choice(BINARY)} {two})", f"({one} {rng.choice(BINARY)} {two})",
        f"({one}) | {rng.choice(FILTERS)}", f"({one}) | {rng.choice(FILTERS)} | {rng.choice(FILTERS)}",
        f"({one}).{rng.choice(METHODS)}", f"[{one}, {two}]",
        f"({one}, {two})", f"{{{one}: {two}}}", f"({one})[{two}]", f"({one})[{two}:]", f"({one} if {two} else b)",
        f"({one} is {rng.choice(TESTS)})", f"m({one}, {two})", f"range({one})", f"dict(k={one})", f"namespace(x={one})",
        f"m(*{one})", f"m(**{one})", f"-{one}", f"(not {one})"))


def program(rng, depth):
    def value():
        return expression(rng, 3)

    statements = []
    for _ in range(rng.randint(1, 2)):
        body = program(rng, depth - 1) if depth else "text"
        statements.append(rng.choice((
            f"{{{{ {value()} }}}}", f"{{{{ {value()} }}}}", f"{{% set a = {value()} %}}", f"{{% set b = {value()} %}}",
            f"{{% set ns.x = {value()} %}}", f"{{% set ns.y = {value()} %}}", f"{{% set a %}}{body}{{% endset %}}",
            f"{{% for a in {value()} %}}{body}{{% endfor %}}", f"{{% for b in range(99999) %}}{body}{{% endfor %}}",
            f"{{% for a in {value()} if {value()} %}}{body}{{% else %}}text{{% endfor %}}",
            f"{{% for a in {value()} recursive %}}{{{{ loop({value()}) }}}}{body}{{% endfor %}}",
            f"{{% if {value()} %}}{body}{{% else %}}{body}{{% endif %}}",
            f"{{% filter {rng.choice(FILTERS)} %}}{body}{{% endfilter %}}",
            f"{{% macro m(p, q) %}}{body}{{{{ varargs }}}}{{% endmacro %}}",
            f"{{% call m({value()}) %}}{body}{{% endcall %}}",
            f"{{% macro m(p, q) %}}{body}{{{{ caller() }}}}{{{{ m(p) }}}}{{% endmacro %}}",
            f"{{% with a = {value()} %}}{body}{{% endwith %}}", f"{{% set ns = namespace(x={value()}, y=ns) %}}")))
    return "".join(statements)


def mutated(rng, text):
    """The text with slices of it deleted, doubled, swapped or moved."""
    for _ in range(rng.randint(1, 5)):
        a, b, c = sorted(rng.randint(0, len(text)) for _ in range(3))
        b = rng.choice((b, min(b, a + 9)))
        text = rng.choice((text[:a] + text[b:], text[:b] + text[a:], text[:a] + text[b:c] + text[a:b] + text[c:],
                           text[:a] + rng.choice(("{%", "%}", "{{", "}}", "(", "|", "~", "[", "'", " + ",
                           "loop")) + text[a:]))
    return text


@pytest.mark.parametrize("seed", range(2))
def test_random_programs(seed):
    rng = random.Random(seed)
    start = ("{% set a = 'text' %}{% set b = [1, 'b'] %}{% set ns = namespace(x='x', y=[1]) %}"
             "{% macro m(p, q) %}{{ p }}{{ q }}{% endmacro %}")
    results = outcomes([start + program(rng, 2) for _ in range(750)], seconds=0.05)
    assert sum(isinstance(outcome, int) for outcome in results) > 100


@pytest.mark.parametrize("seed", range(2))
def test_mutations_of_a_real_template(seed):
    rng = random.Random(seed)
    results = outcomes([mutated(rng, BUNDLED) for _ in range(750)])
    assert sum(isinstance(outcome, int) for outcome in results) > 30


# ----------------------------------------------------------------------------------------------------------------------
# What is allowed

TOOL = {"type": "function", "function": {"name": "f", "description": "does f", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}}


@pytest.mark.parametrize("template", [
    BUNDLED,
    "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x ~ m.role ~ m.content %}{% endfor %}"
    "{{ ns.x }}",
    "{% set ns = namespace(x=[]) %}{% for m in messages %}{% set ns.x = ns.x + [m] %}{% endfor %}{{ ns.x[0].content }}",
    "{% for m in messages %}{% for n in messages[loop.index:] %}{% break %}{% endfor %}{{ m.content | trim }}"
    "{% endfor %}",
    "{% for m in messages %}{{ (messages | selectattr('role', 'eq', 'user') | list)[-1].content }}{% endfor %}",
    "{% macro m(x) %}{{ x | string }}{% endmacro %}{% macro n(x) %}{{ m(x) }}{% endmacro %}"
    "{% for x in messages %}{{ n(x.content.strip()) }}{% endfor %}",
], ids=["bundled", "text grows", "list grows", "slices", "selected each time", "macros"])
def test_long_conversations(template):
    turns = 300 if "selectattr" in template else 1000  # which is quadratic in any jinja2
    many = [message for i in range(turns) for message in (
        {"role": "user", "content": f"Question {i}? " * 20}, {"role": "assistant", "content": f"Answer {i}. " * 40})]
    rendered = tiny(template).apply_chat_template(many, [TOOL] * 200)
    assert "Question " in rendered and len(rendered) > 200
    if template is BUNDLED:
        assert rendered.count("Answer 999.") == 40 and rendered.count('"name": "f"') == 200


@pytest.mark.parametrize("text", ["Some words.\n", "\u4f60\u597d \U0001f600\n"])
def test_one_message_of_20_megabytes(text):
    content = text * (20_000_000 // len(text))
    for template in (BUNDLED, "{{ messages[0].content.split('\n') | join('\n') }}", "{{ messages[0] | tojson }}"):
        rendered = tiny(template).apply_chat_template(user(content))
        assert len(rendered) > 20_000_000 * 0.9
    assert content in tiny(BUNDLED).apply_chat_template(user(content))


@pytest.mark.parametrize("template", [
    "{{ 1 + 2 - 3 * 4 / 5 // 6 % 7 }} {{ 2 ** 3 }} {{ -2 ** 2 }} {{ - -1 }} {{ -a.n }} {{ 7 - -2 }} "
    "{{ [1, 2, 3][-1] }}",
    "{{ 'a' + 'b' ~ 1 }} {{ [1] + [2] + a.l }} {{ 'x' * 3 }} {{ 3 * [1] }} {{ '%s-%03d' % ('a', 5) }} "
    "{{ '100%%' % () }}",
    "{{ a }} {{ a.l }} {{ a['s'] }} {{ a.missing }} {{ a.l[1:] }} {{ a.s[::-1] }} {{ (1,) }} "
    "{{ {'a': [1, {'b': none}]} }}",
    "{{ a.items() }} {{ a.keys() | list }} {{ a.values() | list }} {{ a.get('n') }} {{ a.get('x', 5) }}",
    "{{ '<{}> {x} {:>4} {:.2f} {{}}'.format('a', 1, 2.345, x='y') }} {{ '{0}{0}'.format('a') }}",
    "{% for x in a.l if x != 2 %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% else %}none"
    "{% endfor %}",
    "{% for x in a.l %}{{ loop.cycle('o', 'e') }}{{ loop.changed(x) }}{{ loop.previtem }}{{ loop.nextitem }}"
    "{% endfor %}",
    "{% for x in [[1, [2]], [3]] recursive %}({{ loop(x) if x is iterable else x }}){% endfor %}",
    "{% macro m(x, y='d') %}{{ x }}{{ y }}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1) }}{{ m(1, 2, 3, z=4) }}"
    "{{ m(*[7, 8]) }}",
    "{% macro m() %}<{{ caller('c') }}>{% endmacro %}{% for i in a.l %}{% call(x) m() %}{{ x }}{{ i }}{% endcall %}"
    "{% endfor %}",
    "{% set x %}{{ a.s }} text{% endset %}{{ x | upper }}{% set y | trim %}  z  {% endset %}{{ y }}",
    "{% filter upper %}text {{ a.s }}{% endfilter %}{% with x = 1, y = a.n %}{{ x + y }}{% endwith %}",
    "{% block b %}{{ a.s }}{% endblock %}{{ self.b() }}{% set x = namespace(n=1) %}{% set x.n = x.n + 1 %}{{ x.n }}",
    "{{ [3, 1, 2] | sort }} {{ [1, 1] | unique | list }} {{ [1, 2] | sum }} {{ [1, 2] | max }} "
    "{{ a.l | reverse | list }}",
    "{{ a.l | map('string') | join('-') }} {{ [a] | map(attribute='n') | list }} "
    "{{ [a] | selectattr('n', 'eq', 5) | list }}",
    "{{ a.l | select('odd') | list }} {{ a.l | reject('odd') | join }} {{ [a, a] | groupby('n') | length }} "
    "{{ a | dictsort }}",
    "{{ 'x\ny\n\nz' | indent(2) }} {{ 'x\ny' | indent('> ', first=true) }} {{ 'a b' | title }} {{ ' x ' | trim }} "
    "{{ 'axa' | trim('a') }}",
    "{{ '4' | int }} {{ 'x' | int(7) }} {{ '1.5' | float }} {{ 2.567 | round(1) }} {{ -3 | abs }} {{ '<&>' | e }} "
    "{{ '<' | e + '>' }}",
    "{{ 'aXbX' | replace('X', 'y') }} {{ 'aXbX' | replace('X', 'y', 1) }} {{ 'aXbX'.replace('X', '') }} "
    "{{ none | default(1) }}",
    "{{ ' a b '.strip().split() }} {{ 'a,b'.split(',', 1) }} {{ 'a\nb'.splitlines() }} {{ 'a-b'.partition('-') }} "
    "{{ 'ab'.find('b') }}",
    "{{ '-'.join(['a', 'b']) }} {{ 'A'.lower() }} {{ 'abc'.startswith('a') }} {{ 'a' in 'abc' }} {{ 2 not in a.l }}",
    "{{ a is mapping }} {{ a.s is string }} {{ zz is defined }} {{ 3 is odd }} {{ 4 is divisibleby 2 }} "
    "{{ 1 is in [1] }}",
    "{% if a.l | map('string') %}a generator is true{% endif %}{{ (a.l | map('string')) is sequence }} "
    "{{ range(3) | list }} {{ range(5)[1:] }}",
    "{{ dict(a=1, b=2) }} {{ dict([('a', 1)]) }} {{ dict({'a': 1}, b=2) }} {{ 1 if false }} "
    "{{ 'y' if true else 'n' }} {{ 1 < 2 < 3 }}",
])
def test_renders_as_plain_jinja2(template):
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                         extensions=[jinja2.ext.loopcontrols])
    value = {"n": 5, "s": "te<x>t", "l": [1, 2, 3]}
    start = "{% set a = messages[0].content[0] %}"
    expected = plain.from_string(start + template).render(messages=user([value]))
    assert tiny(start + template).apply_chat_template(user([value])) == expected


def test_each_thread_has_its_own_limits(monkeypatch):
    monkeypatch.setattr(qwen3_template, "MAX_SECONDS", 0.3)
    tokenizer = tiny("{% for i in range(messages[0].content | int) %}{% for j in range(99999) %}{% endfor %}"
                     "{% endfor %}done")
    results = {}

    def render(n):
        try:
            results[n] = tokenizer.apply_chat_template(user(str(n)))
        except InputError as error:
            results[n] = str(error)

    threads = [threading.Thread(target=render, args=[n]) for n in (0, 99999, 99998)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] == "done" and "takes longer" in results[99999] and "takes longer" in results[99998]
