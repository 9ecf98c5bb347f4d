"""Tests of qwen3_io/template.py: renders as transformers does, refuses bombs, and Ctrl-C stops an endless template."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import jinja2.ext
import jinja2.sandbox
import pytest
import tokenizers

from qwen3_io.template import MAX_SIZE, MAX_TEMPLATE, compile_template, render
from tokenizer_utils import Tokenizer, InputError

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared/data/qwen3"
BUNDLED = json.loads((ROOT / "demo/tokenizer_config.json").read_text("utf-8"))["chat_template"]
NS = "{% set ns = namespace(x='a', y=[1], l=[]) %}"
BIG = f"{{% set x = 'a' * {MAX_SIZE - 10} %}}"

CHILD = """
import json, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from qwen3_io.template import compile_template, render
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (3 * 2**29, 3 * 2**29))
except ImportError:  # not a Unix
    pass
for template in json.load(sys.stdin):
    start = time.monotonic()
    try:
        outcome = len(render(compile_template(template), {"messages": [{"role": "user", "content": "Hi"}]}))
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    print(json.dumps([outcome, time.monotonic() - start]), flush=True)
"""


def user(content="Hi"):
    return [{"role": "user", "content": content}]


def rendered(template, **variables):
    return render(compile_template(template), {"messages": user(), **variables})


def outcomes(templates):
    """For each template the length of its text or its error, from a child process with 1.5 GiB that must survive."""
    child = subprocess.run([sys.executable, "-c", CHILD], cwd=ROOT, input=json.dumps(templates), text=True,
                           capture_output=True, timeout=300)
    results = [json.loads(line) for line in child.stdout.splitlines()]
    assert len(results) == len(templates), (child.returncode, child.stderr[-500:], templates[len(results)][:500])
    for template, (outcome, seconds) in zip(templates, results, strict=True):
        assert seconds < 30, (template[:300], outcome, seconds)
    return [outcome for outcome, _ in results]


def error_line(template):
    """The message of the InputError of a tokenizer with this template."""
    with pytest.raises(InputError) as caught:
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        Tokenizer(backend, template, None, "the.jinja").apply_chat_template(user())
    message = str(caught.value)
    assert "the.jinja" in message and "\n" not in message and len(message) < 900
    return message


# ----------------------------------------------------------------------------------------------------------------------
# The same text as transformers

@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no golden files at {SHARED}")
@pytest.mark.parametrize("file", ["chat.jsonl", "chat_2507.jsonl", "chat_base_april2025.jsonl"])
def test_golden(file):
    for line in (SHARED / "golden" / file).read_text("utf-8").splitlines():
        case = json.loads(line)
        if "error" in case or any("thinking" in m or "reasoning" in m or None in m.values() for m in case["messages"]):
            continue  # the tokenizer renames and drops keys before it renders; its tests have these cases
        variables = {key: case[key] for key in ("messages", "add_generation_prompt")} | {"tools": case["tools"] or None}
        if case["enable_thinking"] is not None:
            variables["enable_thinking"] = case["enable_thinking"]
        template = compile_template((SHARED / "templates" / case["template"]).read_text("utf-8"))
        assert render(template, variables) == case["rendered"], (file, case["i"])


def test_environment():
    assert rendered("  {% if true %}\nx\n  {% endif %}\ny\n") == "x\ny"  # trim_blocks, lstrip_blocks
    assert rendered("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert rendered("{% generation %}{{ messages[0].content }}{% set x = 1 %}{% endgeneration %}{{ x }}") == "Hi"
    assert rendered("{{ {'k': '<é>\\'&'} | tojson }}") == '{"k": "<é>\'&"}'
    assert rendered("{{ {'b': 1, 'a': [1]} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": [\n  1\n ],\n "b": 1\n}'
    assert rendered("{{ '<b>' ~ missing ~ '%s' % 'x' }}") == "<b>x"  # no autoescape, undefined prints nothing
    assert rendered("{{ strftime_now('%Y-%-d %B') }}").startswith("20")


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
    "{{ 'a' | center(5) }}|{{ 'a'.ljust(3) }}|{{ '7'.zfill(3) }} {{ 'a b c' | wordwrap(3) }} {{ '%05d' | format(7) }}",
    "{{ [1, 2, 3] | batch(2, 0) | list }} {{ [1, 2, 3] | slice(2) | list }} {{ a.l | join(', ') }} {{ a.s | tojson }}",
    "{{ [a] | join(',', attribute='s') }}",
    "{{ {'a': [1, 'é']} | tojson(indent=4) }} {{ a | tojson(separators=(',', ':')) }}",
    "{% for k, v in a.items() %}{{ k }}={{ v }}{% endfor %}",
    "{% set x, y = 1, 2 %}{{ x }}{{ y }} {{ 7 % 4 }} {{ 2.5 * 2 }}",
    "{% autoescape true %}{{ '<' ~ ('<' | safe) ~ a.s }}{% endautoescape %} {{ 'long text here' | truncate(8) }}",
])
def test_renders_as_transformers(template):
    expected = plain_environment().from_string(START + template).render(messages=user([VALUE]))
    assert rendered(START + template, messages=user([VALUE])) == expected


START = "{% set a = messages[0].content[0] %}"
VALUE = {"n": 5, "s": "te<x>t", "l": [1, 2, 3]}


def plain_environment():
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                       extensions=[jinja2.ext.loopcontrols])
    env.filters["tojson"] = lambda x, ensure_ascii=False, **options: json.dumps(x, ensure_ascii=ensure_ascii, **options)
    return env


@pytest.mark.parametrize("template", [
    BUNDLED,
    "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x ~ m.role ~ m.content %}{% endfor %}"
    "{{ ns.x }}",
    "{% set ns = namespace(x=[]) %}{% for m in messages %}{% set ns.x = ns.x + [m] %}{% endfor %}{{ ns.x[0].content }}",
    "{% macro m(x) %}{{ x | string }}{% endmacro %}{% macro n(x, all) %}{{ m(x) }}{% endmacro %}"
    "{% for x in messages %}{{ n(x.content.strip(), messages) }}{% endfor %}",
    "{% for m in messages %}{{ m | tojson }}{% endfor %}{{ tools | tojson(indent=4) }}",
], ids=["bundled", "text grows", "list grows", "macros", "json"])
def test_long_conversations(template):
    many = [message for i in range(1000) for message in (
        {"role": "user", "content": f"Question {i}? " * 20}, {"role": "assistant", "content": f"Answer {i}. " * 40})]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}
    start = time.monotonic()
    text = rendered(template, messages=many, tools=[tool] * 200, add_generation_prompt=True)
    assert "Question 0?" in text and time.monotonic() - start < 10
    expected = plain_environment().from_string(template).render(messages=many, tools=[tool] * 200,
                                                                add_generation_prompt=True)
    assert text == expected


@pytest.mark.parametrize("text", ["Some words.\n", "\u4f60\u597d \U0001f600\n"])
def test_one_message_of_five_million_characters(text):
    content = text * (5_000_000 // len(text))
    assert content in rendered(BUNDLED, messages=user(content))
    assert rendered("{{ messages[0].content.split('\n') | join('\n') }}", messages=user(content)) == content
    assert json.loads(rendered("{{ messages[0] | tojson }}", messages=user(content)))["content"] == content
    assert rendered("{{ messages[0].content | trim | replace('zz', 'z') }}", messages=user(content)) == content.strip()


# ----------------------------------------------------------------------------------------------------------------------
# Attacks on Python through the template

@pytest.mark.parametrize("template", [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''.__class__ }}",
    "{{ ''['__class__'] }}",
    "{{ ('' | attr('__class__')) }}",
    "{{ messages | map(attribute='__class__') | list }}",
    "{{ '{0.__class__.__init__}'.format(1) }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{{ ('{0.__class__}' | attr('format'))(1) }}",
    "{{ (['{0.__class__}'] | map('attr', 'format') | first)(1) }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ lipsum.__globals__['os'].popen('true').read() }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ dict.mro() }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ raise_exception('no\nway') }}",
    "{{ missing.field }}",
    "{{ 1 + 'a' }}",
    "{{ 1 / 0 }}",
    "{{ messages | tojson(indent=raise_exception) }}",
    "{{ 'a' | int(base=99) + none }}",
    "{{ strftime_now(1) }}",
    "{{ dict.update(messages[0], {'role': 'x'}) }}",
    "{{ 'a'.encode('punycode') }}",
    "{{ (1).to_bytes(5, 'big') }}",
    "{{ cycler.__init__ }}",
    "{{ joiner.__init__ }}",
    "{% extends 'x' %}",
    "{% if %}",
    "{{ 1 | nosuchfilter }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "x" * (MAX_TEMPLATE + 1),
])
def test_refused_with_one_line(template):
    error_line(template)


# ----------------------------------------------------------------------------------------------------------------------
# Bombs

def repeated(expression, start="'a'", times=60):
    """`x = expression of x`, many times over."""
    return (f"{{% set ns = namespace(x={start}) %}}{{% for i in range({times}) %}}{{% set ns.x = {expression} %}}"
            "{% endfor %}{{ ns.x }}")


DOUBLING = [repeated(expression) for expression in (
    "ns.x ~ ns.x", "ns.x + ns.x", "ns.x * 2", "[ns.x, ns.x] | join", "'%s%s' % (ns.x, ns.x)", "'{0}{0}'.format(ns.x)",
    "ns.x.replace('a', 'aa')", "ns.x | replace('a', 'aa')", "'a'.join([ns.x, ns.x])", "ns.x.upper() ~ ns.x.lower()",
    "(ns.x | tojson) ~ ns.x", "('<' ~ ns.x) | e ~ ns.x", "(ns.x ~ '\\n' ~ ns.x) | indent", "[ns.x, ns.x]",
    "(ns.x, ns.x)", "{'a': ns.x, 'b': ns.x}", "dict(a=ns.x, b=ns.x)", "[ns.x, ns.x] | map('default') | list",
    "[{'a': ns.x}.items(), {'a': ns.x}.items()]", "[ns.x, ns.x] | list + [ns.x]")] + [
    repeated("ns.x + ns.x", "[1]"), repeated("ns.x * ns.x", "2"), repeated("ns.x ** ns.x", "2"),
    NS + "{% for i in range(99) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}{% endfor %}",
    NS + "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% for i in range(99) %}{% set ns.x = m(ns.x) %}{% endfor %}",
    NS + "{% for i in range(99) %}{% set ns.x %}{% filter upper %}{{ ns.x }}{{ ns.x }}{% endfilter %}{% endset %}"
         "{% endfor %}",
    "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}"
    "{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    BIG + "{% for i in range(99) %}{{ x }}{% endfor %}",
]

AT_ONCE = ["{{ " + expression + " }}" for expression in (
    "'a' * 10**9", "10**10 * 'a'", "[0] * 10**9", "(0,) * 10**9", "10**(10**8)", "2**(2**9)**(2**9)",
    "messages * 10**9", "range(10**9)", "'%999999999d' % 1", "'%*d' % (10**9, 1)", "'%.999999999f' % 1",
    "'%(a)999999999d' % {'a': 1}",
    "'%%%999999999d' % 1", "'%((a))999999999d' % {'(a)': 1}", "'%-#999999999x' % 1", "'%99999999d' is odd",
    "'%99999999d' is divisibleby(1)", "('%99999999d' | safe) % 1", "'%999999999d' | format(1)",
    "'{:999999999}'.format(1)", "'{0:{1}}'.format(1, 10**9)", "'{:{}}'.format(1, 10**9)",
    "'{:9<999999999}'.format(1)", "'{:.999999999f}'.format(1.0)", "('{:99999999}' | safe).format(1)",
    "'{a[b]:999999999}'.format(a={'b': 1})", "'{x:999999999}'.format_map({'x': 1})",
    "('{:99999999}' | attr('format'))(1)", "'a'.center(10**9)", "'a'.ljust(10**9)", "'a'.rjust(10**9)",
    "'a'.zfill(10**9)", "'\\t'.expandtabs(10**9)", "'a'.translate({97: 'b' * 9999999})| length + none",
    "('a' * 9999).translate({97: 'b' * 9999})", "'a' | center(10**9)", "'a' | center(width=10**9)",
    "('a b ' * 9999) | wordwrap(1, wrapstring='a' * 99999)", "lipsum(n=10**9)", "[1] | batch(10**9, 0) | list",
    "[1] | slice(10**9) | list", "'a' | indent(10**9, first=true)", "('\\n' * 1000000) | indent(10**6)",
    "[1, [1]] | tojson(indent=10**9)", "([1] * 450000) | tojson(separators=('a' * 99999, 'b'))",
    "5 | round(-10**9)", "5 | round(10**9)", "5 | round(10**9, 'ceil')", "('a' * 999).replace('', 'a' * 999999)",
    "('a' * 999) | replace('', 'a' * 999999)", "('a' * 3900000) | list | join('a' * 999)",
    "('a' * 999999).join(['b'] * 9999)", "'x'.join(range(10**9))", "('x' * 99999).join(range(99999) | map('string'))",
    "range(99999) | join('x' * 99999)", "('a' * 3900000).strip('b' * 3900000 ~ 'a')",
    "('a' * 3900000) | trim('b' * 3900000)", "('a' * 3900000).rfind('a' * 1500000 ~ 'b' ~ 'a' * 400000)",
    "('%s' * 450000) % (('a' * 999,) * 450000)", "('%(a)s' * 99999) % {'a': 'a' * 99999}",
    "('{0}' * 99999).format('a' * 99999)", "('http://a.b ' * 99999) | urlize(rel='a' * 99999)",
    "strftime_now('%999999999Y')", "strftime_now('%-099999999d')", "strftime_now('%_99999999A')",
    "strftime_now('%c' * 99999)", "raise_exception('a' * 3900000)", "[[1] | map('abs')] | tojson",
    "dict.fromkeys([1])")] + [
    BIG + "{{ ([1] * 450000) | join(x) }}",
    BIG + "{% set ns = namespace(x=x) %}{{ ([ns] * 450000) | join(attribute='x') }}",
    BIG + "{% set ns = namespace(x=x) %}{{ ('{0.x}' * 1000).format(ns) }}",
    "{% filter replace('a', 'a' * 9900000) %}aa{% endfilter %}",
]

HARMLESS = ["{{ 'a' | round }}"] + [repeated(expression, "[1]", 60000) for expression in (
    "[ns.x]", "(ns.x,)", "{'a': ns.x}", "{'a': ns.x}.items()", "[ns.x] | reverse", "[ns.x].missing")] + [
    NS + "{% set ns.x = [ns, ns] %}{{ ns }}{{ ns.x }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"] + [
    "{{ " + text + " }}" for text in (
        "(" * 32000 + "1" + ")" * 32000, "[" * 32000 + "]" * 32000, "a" + ".b" * 30000, "a" + "()" * 30000,
        "not " * 16000 + "1", "-" * 60000 + "1", "1" + " | d" * 16000, "1" + "+1" * 30000, "1" + "~1" * 30000,
        "1" + " or 1" * 12000, "1 if 0 else " * 5000 + "1", "0x" + "f" * 60000, "9" * 60000)] + [
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000, "{% for x in y %}" * 21 + "{% endfor %}" * 21, "{#" * 30000]


@pytest.mark.parametrize("bombs", [DOUBLING, AT_ONCE], ids=["doubling", "at once"])
def test_bombs_are_refused(bombs):
    for template, outcome in zip(bombs, outcomes(bombs), strict=True):
        assert isinstance(outcome, str) and "MemoryError" not in outcome, (template[:300], outcome)


def test_nothing_crashes():
    outcomes(HARMLESS)


def test_the_message_says_why():
    assert f"larger than {MAX_SIZE}" in error_line("{{ 'a' * 10**9 }}")
    assert f"larger than {MAX_TEMPLATE}" in error_line("x" * (MAX_TEMPLATE + 1))
    assert "plain fields" in error_line("{{ '%9999d' % 1 }}")
    assert "'lipsum' is undefined" in error_line("{{ lipsum() }}")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGINT for one process")
@pytest.mark.parametrize("template", [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = 'a' * 999999 %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
], ids=["loops", "texts", "macros"])
def test_ctrl_c_stops_an_endless_template(template):
    program = CHILD.replace("import json,", "print('ready', flush=True)\nimport json,", 1)
    child = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True)
    try:
        child.stdin.write(json.dumps([template]))
        child.stdin.close()
        child.stdout.readline()
        time.sleep(1.5)
        assert child.poll() is None
        start = time.monotonic()
        child.send_signal(signal.SIGINT)
        child.wait(timeout=10)
        assert time.monotonic() - start < 2 and "KeyboardInterrupt" in child.stderr.read()
    finally:
        child.kill()
        child.wait()
