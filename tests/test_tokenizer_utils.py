"""Tests of tokenizer_utils: against transformers' own results (golden files), and on a tiny tokenizer made here."""

import copy
import functools
import json
import threading
import unicodedata

import jinja2.ext
import jinja2.sandbox
import numpy as np
import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import tokenizer_utils
from configs import ROOT, SHARED, needs_official_files
from fuzzing import any_conversation, fuzz
from helpers import message_of as error_of
from qwen3_lib.generation.answer import inside_thought, last_turn
from tokenizer_utils import PICTURES, StreamDecoder, Tokenizer, brief, checked_messages, load_tokenizer

pytestmark = [pytest.mark.core, pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")]


# ---- Helpers ---------------------------------------------------------------------------------------------------------

def golden(name):
    return [json.loads(line) for line in (SHARED / "golden" / name).read_text("utf-8").splitlines() if line]


@functools.cache
def real(name="tokenizer"):
    return load_tokenizer(SHARED / name)


@functools.cache
def with_template(name):
    return Tokenizer(real().backend, (SHARED / "templates" / name).read_text("utf-8"), real().named_tokens)


def stream(tokenizer, ids, skip_special_tokens=False):
    decoder = StreamDecoder(tokenizer, skip_special_tokens)
    return [decoder.push(token_id) for token_id in ids], decoder.flush()


def tiny_backend():
    """Byte-level BPE with all 256 bytes (ids 0..255), some merges, and the special tokens <s> and </s>."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    # "ð" "Ł" "ĺ" "Ģ" are the four bytes of U+1F600, "ï" "¿" "½" those of U+FFFD
    merges = [("h", "e"), ("Ġ", "he"), ("ð", "Ł"), ("ðŁ", "ĺ"), ("ĺ", "Ģ"), ("ï", "¿"), ("ï¿", "½"), ("½", "h")]
    vocab = {token: i for i, token in enumerate(alphabet + [a + b for a, b in merges])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    backend.normalizer = tokenizers.normalizers.NFC()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.add_tokens(["<a b>", "你好", "éé"])  # not in the byte alphabet, not in it, in it by accident
    return backend


TEMPLATE = ("{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}"
            "{% if add_generation_prompt %}<s>{% endif %}")


def write_model(folder, config=None, template=None, spec=None):
    """A model's folder; `config`, `template` and `spec` (tokenizer.json) may be str or bytes, or JSON data."""
    files = {"tokenizer.json": tiny_backend().to_str() if spec is None else spec,
             "tokenizer_config.json": config, "chat_template.jinja": template}
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        if content is not None:
            content = content if isinstance(content, (str, bytes)) else json.dumps(content)
            (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return folder


@functools.cache
def tiny(template=TEMPLATE):
    return Tokenizer(tiny_backend(), template, {"eos_token": "</s>"}, "tiny.jinja")


def user(content="Hi", **extra):
    return [{"role": "user", "content": content, **extra}]


# ---- Golden files ----------------------------------------------------------------------------------------------------

@needs_official_files
def test_golden_tokenize():
    for case in golden("tokenize.jsonl"):
        for name in ("tokenizer", "tokenizer_base"):
            assert real(name).encode(case["text"]) == case["ids"], (name, case["i"])
        if "decoded" in case:
            assert real().decode(case["ids"]) == case["decoded"], case["i"]
        if "decoded_skip_special" in case:
            assert real().decode(case["ids"], skip_special_tokens=True) == case["decoded_skip_special"], case["i"]


@needs_official_files
def test_golden_tokenize_embedding():
    for case in golden("tokenize_embedding.jsonl"):
        assert real("tokenizer_embedding").encode(case["text"]) == case["ids"], case


@needs_official_files
def test_golden_stream():
    for n, case in enumerate(golden("stream.jsonl")):
        assert stream(real(), case["ids"]) == (case["pieces"], case["flush"]), n
        assert real().decode(case["ids"]) == case["full_decode"], n


def chat_id(case):
    return f"{case['template']}-{case['i']}-{case['name']}"


@needs_official_files
@pytest.mark.parametrize("file", ["chat.jsonl", "chat_2507.jsonl", "chat_base_april2025.jsonl"])
def test_golden_chat(file):
    for case in golden(file):
        tokenizer, messages = with_template(case["template"]), copy.deepcopy(case["messages"])
        args = (messages, case["tools"], case["add_generation_prompt"], case["enable_thinking"])
        has_parts = any(isinstance(message.get("content"), list) for message in messages)
        if "error" in case:
            error_of(tokenizer.apply_chat_template, *args)
        else:
            rendered = tokenizer.apply_chat_template(*args)
            assert rendered == case["rendered"], chat_id(case)
            assert tokenizer.encode(rendered) == case["ids"], chat_id(case)
            if not has_parts:
                assert tokenizer.apply_chat_template(*args, join_text_parts=True) == rendered, chat_id(case)
        if has_parts:
            joined = [m if isinstance(m["content"], str) else {**m, "content": "".join(p["text"] for p in m["content"])}
                      for m in messages]
            expected = tokenizer.apply_chat_template(joined, *args[1:])
            assert tokenizer.apply_chat_template(*args, join_text_parts=True) == expected
        assert messages == case["messages"]


# ---- Encoding and decoding -------------------------------------------------------------------------------------------

@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(-3, 300), st.integers(250, 272), st.just(2**70)), max_size=40),
       skip=st.booleans())
def test_stream_equals_decode(ids, skip):
    pieces, rest = stream(tiny(), ids, skip)
    named = [i for i in ids if 0 <= i < tiny().backend.get_vocab_size()]
    assert "".join(pieces) + rest == tiny().decode(ids, skip) == tiny().backend.decode(named, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(raw=st.binary(max_size=24))
def test_stream_of_any_bytes(raw):
    id_of_byte = {byte: tiny().token_to_id(char) for char, byte in tokenizer_utils.BYTE_OF_CHAR.items()}
    pieces, rest = stream(tiny(), [id_of_byte[byte] for byte in raw])
    assert "".join(pieces) + rest == raw.decode("utf-8", "replace")


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40))
def test_stream_never_splits_a_character(text):
    # The added token "éé" is written in the byte alphabet: to the tokenizers library, too, it is the bytes E9 E9.
    assume("éé" not in unicodedata.normalize("NFC", text))
    ids = tiny().encode(text)
    pieces, rest = stream(tiny(), ids)
    assert rest == "" and "".join(pieces) == tiny().decode(ids)
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def test_stream_holds_back_only_what_is_unfinished():
    face, replacement = (tiny().encode(text) for text in ("😀", "\ufffd"))
    assert len(face) > 1 and len(replacement) == 1
    assert stream(tiny(), face) == ([""] * (len(face) - 1) + ["😀"], "")
    assert stream(tiny(), face[:-1]) == ([""] * (len(face) - 1), "\ufffd")
    assert stream(tiny(), replacement) == (["\ufffd"], "")
    decoder = StreamDecoder(tiny())
    decoder.push(face[0]), decoder.flush()
    assert [decoder.push(i) for i in tiny().encode("ok")] == ["o", "k"]  # a flushed decoder starts afresh


def test_decode_ids_without_a_name():
    a = tiny().token_to_id("a")
    assert tiny().decode([a, tiny().backend.get_vocab_size(), 2**40, -1, a]) == "aa" == tiny().decode(np.array([a, a]))


def test_special_tokens():
    ids = tiny().encode("<s>he</s>")
    assert ids == [tiny().token_to_id(token) for token in ("<s>", "he", "</s>")]
    assert tiny().special_tokens == {"<s>": ids[0], "</s>": ids[2]}
    assert tiny().decode(ids) == "<s>he</s>" and tiny().decode(ids, skip_special_tokens=True) == "he"
    assert tiny().named_tokens["eos_token"] == "</s>" and Tokenizer(tiny_backend()).named_tokens == {}


@functools.cache
def without_added_tokens():
    """The bundled tokenizer and, by the library alone, the same file without its added tokens."""
    raw = json.loads((ROOT / "demo/tokenizer.json").read_text("utf-8"))
    return load_tokenizer(ROOT / "demo"), tokenizers.Tokenizer.from_str(json.dumps(raw | {"added_tokens": []}))


@given(st.lists(st.one_of(st.sampled_from(
    ["<|im_start|>", "<|im_end|>", "<think>", "<|im_", "end|>", "<", " ", "\n", "e\u0301", "system", "12", "你好"]),
    st.text(max_size=8)), max_size=12).map("".join))
def test_a_text_whose_tokens_stay_text(text):
    ours, theirs = without_added_tokens()
    ids = ours.encode(text, as_text=True)
    assert ids == theirs.encode(text, add_special_tokens=False).ids and not {*ids} & {*ours.special_tokens.values()}
    assert ours.decode(ids) == unicodedata.normalize("NFC", text)


def test_lone_surrogate():
    assert r"'ab\ud800' ends with a lone surrogate" in error_of(tiny().encode, "ab\ud800c")
    assert "surrogate" in error_of(tiny().encode, tiny().apply_chat_template(user("\udfff")))


# ---- Chat templates --------------------------------------------------------------------------------------------------

def plain_environment():
    """As transformers makes it."""
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                       extensions=[jinja2.ext.loopcontrols])
    env.filters["tojson"] = lambda x, ensure_ascii=False, **options: json.dumps(x, ensure_ascii=ensure_ascii, **options)
    return env


@pytest.mark.parametrize("template", [
    "  {% if true %}\nx\n  {% endif %}\ny\n",  # trim_blocks, lstrip_blocks
    "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{{ '<b>' ~ missing ~ '%s-%03d' % ('x', 5) }}",  # no autoescape, undefined prints nothing
    "{{ messages | tojson }}{{ {'b': '<é>', 'a': [1]} | tojson(indent=1, sort_keys=true) }}",
    "{% set ns = namespace(n=1) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ loop.last }}{% endfor %}"
    "{{ ns.n }}",
    "{% macro m(x, y='d') %}{{ x }}{{ y }}{% endmacro %}{{ m(messages[0].role) }}{{ messages[0].content[::-1] }}",
])
def test_renders_as_transformers(template):
    expected = plain_environment().from_string(template).render(messages=user("a<é>"))
    assert tiny(template).apply_chat_template(user("a<é>")) == expected


def test_what_transformers_adds_to_jinja():
    template = ("{% generation %}{{ messages[0].content }}{% set x = 1 %}{% endgeneration %}{{ x }}"
                "{{ strftime_now('%Y') | length }}")
    assert tiny(template).apply_chat_template(user()) == "Hi4"
    assert "no way" in error_of(tiny("{{ raise_exception('no\nway') }}").apply_chat_template, user())


def test_what_may_be_given_to_a_template():
    template = tiny("{{ x }}{{ range(2) }}{{ strftime_now('%Y') }}{{ messages }}{{ tools is none }}")
    for name in ("range", "strftime_now", "messages"):
        assert error_of(template.apply_chat_template, user(), chat_template_kwargs={name: 1}).endswith(" has: x")
    for tools in ([], None):
        assert template.apply_chat_template(user(), tools).endswith("True")


@pytest.mark.parametrize("template", [
    "{% if %}", "{{", "{% nosuchtag %}", "{{ 1 | nosuchfilter }}", "{% generation %}x", "{{ " + "9" * 5000 + " }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{% for a in b %}" * 30 + "{% endfor %}" * 30, "x" * 65537,
], ids=lambda template: template[:20])
def test_template_does_not_compile(template):
    assert "tiny.jinja" in error_of(Tokenizer, tiny_backend(), template, None, "tiny.jinja")


@pytest.mark.parametrize("template", [
    "{{ ''.__class__.__mro__ }}", "{{ ('' | attr('__class__')).x }}",
    "{{ raise_exception.__globals__.x }}", "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ lipsum.__globals__['os'].popen('true').read() }}", "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{{ missing.field }}", "{{ 1 / 0 }}",
    "{% for i in range(10**9) %}x{% endfor %}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
])
def test_a_template_that_fails_or_tries_to_escape(template):
    assert "tiny.jinja" in error_of(tiny(template).apply_chat_template, user())


def test_no_template():
    assert "--raw" in error_of(tiny(None).apply_chat_template, user())


@pytest.mark.parametrize("messages", [
    [], (), None, "Hi", {"role": "user"}, ["Hi"], [None], [[]], [{(1, 2): 3}],
    user({1, 2}), user(b"x"), user(object()), user(["x"]), user([{"type": "text"}]),
    user([{"type": "text", "text": 5}]), user([{"type": "image", "url": "x"}]),
])
def test_unusable_messages(messages):
    error_of(tiny().apply_chat_template, messages, join_text_parts=True)


def test_unusable_nesting_and_tools():
    circular = user()
    circular[0]["content"] = circular
    deep = []
    for _ in range(100_000):
        deep = [deep]
    for messages in (circular, user(deep)):
        error_of(tiny().apply_chat_template, messages)
    for tools in ([print], {"type": "function"}, "abc", [5], [None], ['{"type": "function"}'], 0):
        assert "tools" in error_of(tiny().apply_chat_template, user(), tools=tools)


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert tiny().apply_chat_template(user(parts), join_text_parts=True) == "<s>user:Hello</s><s>"
    assert tiny().apply_chat_template(user([]), join_text_parts=True) == "<s>user:</s><s>"
    assert "Hel" in tiny().apply_chat_template(user(parts)) != "<s>user:Hello</s><s>"
    assert "message 1" in error_of(tiny().apply_chat_template, user() + user([{"type": "image_url"}]),
                                   join_text_parts=True)


@pytest.mark.parametrize("keys, expected", [
    ({"reasoning": "R"}, "R"), ({"thinking": "T"}, "T"), ({"reasoning_content": "C", "thinking": "T"}, "C"),
    ({"thinking": "T", "reasoning": "R"}, "T"), ({"reasoning_content": None, "reasoning": "R"}, "R"),
    ({"reasoning_content": "", "reasoning": "R"}, ""), ({}, "-"), ({"thinking": None}, "-")])
def test_reasoning_keys(keys, expected):
    tokenizer = tiny("{{ messages[0].reasoning_content | default('-') }}")
    assert tokenizer.apply_chat_template(user(**keys)) == expected


def test_caller_data_is_never_changed():
    messages = user([{"type": "text", "text": "x"}], thinking="T", extra=None)
    messages.append({"role": "assistant", "content": None})
    tools = [{"type": "function", "function": {"name": "f"}}]
    before = copy.deepcopy((messages, tools))
    tiny().apply_chat_template(messages, tools)
    assert (messages, tools) == before


# ---- Qwen3.5 and its successors --------------------------------------------------------------------------------------

# Of the kind of Qwen3.8's: an effort, a thought that is kept unless told otherwise, arguments one by one.
LIKE_3_8 = """{%- set effort = reasoning_effort|default('xhigh') %}
{%- if effort not in ('xhigh', 'medium', 'low') %}{{- raise_exception('no effort ' ~ effort) }}{%- endif %}
{%- if effort != 'medium' and enable_thinking is not false %}{{- 'Effort: ' + effort + '\\n' }}{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {{- m.role + ':' }}
    {%- if m.role == 'assistant' and (preserve_thinking is undefined or preserve_thinking or loop.index0 > ns.last) %}
        {{- '<think>' + m.reasoning_content|default('') + '</think>' }}
    {%- endif %}
    {{- m.content or '' }}
    {%- for call in m.tool_calls or [] %}
        {{- '<function=' + (call.function or call).name + '>' }}
        {%- for key, value in (call.function or call).arguments|items %}
            {{- '<parameter=' + key + '>' + (value if value is string else value|tojson) + '</parameter>' }}
        {%- endfor %}
    {%- endfor %}
    {{- '\\n' }}
{%- endfor %}"""


@fuzz(300)
def test_newer_templates_render_as_in_plain_jinja(rng):
    """That of Qwen3.5: see test_reference.py."""
    tokenizer, oracle = tiny(LIKE_3_8), plain_environment().from_string(LIKE_3_8)
    messages, tools = any_conversation(rng)
    wishes = {"reasoning_effort": ["xhigh", "medium", "low", "high"], "preserve_thinking": [True, False]}
    given = {key: rng.choice(values) for key, values in wishes.items() if rng.random() < 0.4}
    think, add = rng.choice([None, True, False]), rng.random() < 0.7
    variables = given | {"messages": copy.deepcopy(messages), "tools": tools, "add_generation_prompt": add}
    variables |= {} if think is None else {"enable_thinking": think}
    try:
        expected = oracle.render(variables)
    except (jinja2.TemplateError, TypeError):
        error_of(tokenizer.apply_chat_template, messages, tools, add, think, chat_template_kwargs=given)
        return False
    as_texts = copy.deepcopy(messages)
    for call in [call.get("function", call) for message in as_texts for call in message.get("tool_calls") or ()]:
        call["arguments"] = json.dumps(call["arguments"]) if call["arguments"] else rng.choice(["", " {} "])
    for same in (messages, as_texts):
        assert tokenizer.apply_chat_template(same, tools, add, think, chat_template_kwargs=given) == expected
    return True


def test_variables_of_a_template():
    assert tiny(LIKE_3_8).template_variables == {"enable_thinking", "preserve_thinking", "reasoning_effort"}
    messages = [*user(), {"role": "assistant", "content": "A", "reasoning_content": "T"}, *user("more")]
    for given, expected in [({}, "Effort: xhigh\nuser:Hi\nassistant:<think>T</think>A\nuser:more\n"),
                            ({"reasoning_effort": "medium"}, "user:Hi\nassistant:<think>T</think>A\nuser:more\n"),
                            ({"reasoning_effort": "low", "preserve_thinking": False},
                             "Effort: low\nuser:Hi\nassistant:A\nuser:more\n")]:
        assert tiny(LIKE_3_8).apply_chat_template(messages, chat_template_kwargs=given) == expected
    assert "no effort max" in error_of(tiny(LIKE_3_8).apply_chat_template, messages,
                                       chat_template_kwargs={"reasoning_effort": "max"})
    for wrong in ({"messages": []}, {"reasoning_efort": "low"}, [], "low", {"tools": None}):
        assert "enable_thinking, preserve_thinking, reasoning_effort" in error_of(
            tiny(LIKE_3_8).apply_chat_template, messages, chat_template_kwargs=wrong)
    assert "it has none" in error_of(tiny().apply_chat_template, messages, chat_template_kwargs={"x": 1})


def test_arguments_that_are_no_object():
    for arguments in ("{", "[1]", "x", 5, None, '"a"'):
        call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": arguments}]}
        error_of(tiny(LIKE_3_8).apply_chat_template, [*user(), call])


@pytest.mark.parametrize("part, name", [
    ({"type": "image_url", "image_url": {"url": "x"}}, "an image"), ({"type": "image"}, "an image"),
    ({"image": "x"}, "an image"), ({"type": "input_image"}, "an image"), ({"type": "video", "video": "x"}, "a video"),
    ({"type": "video_url"}, "a video"), ({"type": "input_audio", "input_audio": {}}, "audio"),
    ({"audio": "x"}, "audio")])
def test_what_isnt_text_is_refused_by_name(part, name):
    messages = [*user(), *user([{"type": "text", "text": "What is this?"}, part])]
    expected = f"message 1 holds {name}, which can't be read here"
    assert error_of(tiny().apply_chat_template, messages, join_text_parts=True) == expected
    if part.get("type") not in PICTURES:  # whether the model sees, the check of a file can't know
        assert error_of(checked_messages, messages, "x.json") == f"x.json: {expected}"


# ---- Loading ---------------------------------------------------------------------------------------------------------

def tiny_spec(**changes):
    return {**json.loads(tiny_backend().to_str()), **changes}


def test_load(tmp_path):
    config = {"eos_token": {"content": "</s>"}, "pad_token": "<s>", "bos_token": None, "add_bos_token": False}
    tokenizer = load_tokenizer(write_model(tmp_path, config))
    assert tokenizer.named_tokens == {"eos_token": "</s>", "pad_token": "<s>"} and tokenizer.chat_template is None
    assert load_tokenizer(str(tmp_path)).encode("he") == tiny().encode("he")
    (tmp_path / "tokenizer_config.json").unlink()
    assert "eos_token" not in load_tokenizer(tmp_path).named_tokens


def test_load_takes_the_right_template(tmp_path):
    config = {"chat_template": [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "listed"}]}
    assert load_tokenizer(write_model(tmp_path, config)).chat_template == "listed"
    assert load_tokenizer(write_model(tmp_path, {"chat_template": "old"})).chat_template == "old"
    assert load_tokenizer(write_model(tmp_path, {"chat_template": "old"}, "new")).chat_template == "new"


def test_load_ignores_truncation_and_padding(tmp_path):
    backend = tiny_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    assert len(load_tokenizer(write_model(tmp_path, spec=backend.to_str())).encode("abcd")) == 4


def added(*entries):
    return {"added_tokens_decoder": {str(token_id): entry if isinstance(entry, dict) else {"content": entry}
                                     for token_id, entry in entries}}


def test_config_tokens_are_added(tmp_path):
    first = tiny().backend.get_vocab_size()
    config = added((first + 1, {"content": "<x>", "special": True, "lstrip": True, "unknown": 1}), (first, "<y>"),
                   (tiny().token_to_id("<s>"), {"content": "<s>", "special": True}))
    tokenizer = load_tokenizer(write_model(tmp_path, config))
    assert [tokenizer.token_to_id(token) for token in ("<y>", "<x>")] == [first, first + 1]
    assert tokenizer.backend.get_vocab_size() == first + 2
    assert tokenizer.encode("a  <x><y>") == [tokenizer.token_to_id("a"), first + 1, first]  # lstrip takes the spaces
    assert tokenizer.decode([first, first + 1]) == "<y><x>"
    assert tokenizer.decode([first, first + 1], skip_special_tokens=True) == "<y>"


NEXT_ID = len(tiny_backend().get_vocab())  # what the next added token gets


@pytest.mark.parametrize("entries", [
    [(5000, "<x>")], [(0, "<x>")], [(NEXT_ID + 1, "<x>")], [(3, "<s>")], [(NEXT_ID, "")],
    [(NEXT_ID, "<x>"), (NEXT_ID + 1, "<x>")],
])
def test_config_tokens_with_conflicting_ids(entries, tmp_path):
    message = error_of(load_tokenizer, write_model(tmp_path, added(*entries)))
    assert "tokenizer_config.json" in message and "same model" in message


BAD_CONFIGS = [
    {"eos_token": 5}, {"eos_token": {"content": 1}}, {"chat_template": 5}, {"chat_template": "{% if %}"},
    {"chat_template": [{"name": "other", "template": "x"}]}, {"chat_template": [{"name": "default", "template": 5}]},
    {"added_tokens_decoder": [1]}, {"added_tokens_decoder": {"x": {"content": "y"}}},
    {"added_tokens_decoder": {"9" * 5000: {"content": "y"}}}, {"added_tokens_decoder": {"-1": {"content": "y"}}},
    {"added_tokens_decoder": {"1": "y"}}, {"added_tokens_decoder": {"1": {"content": "\ud800"}}},
    {"added_tokens_decoder": {"1": {"content": "y", "special": "yes"}}},
    {"added_tokens_decoder": {"1": {"content": "y\n" * 5000}}},
]


@pytest.mark.parametrize("config", BAD_CONFIGS, ids=lambda config: str(config)[:50])
def test_bad_config(config, tmp_path):
    assert "tokenizer_config.json" in error_of(load_tokenizer, write_model(tmp_path, config))


SPLIT = {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}
BAD_SPECS = [
    b"{}", b"\x00" * 10,
    {"model": {}}, {"model": None}, {"added_tokens": 5}, {"decoder": None}, {"decoder": {"type": "Fuse"}},
    {"pre_tokenizer": SPLIT},
    {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},  # a Rust panic
    {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}},
    {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]]}},
    {"model": {"type": "BPE", "vocab": {"a": -1}, "merges": []}},
]


@pytest.mark.parametrize("spec", BAD_SPECS, ids=lambda spec: str(spec)[:50])
def test_bad_tokenizer_json(spec, tmp_path):
    spec = spec if isinstance(spec, bytes) else tiny_spec(**spec)
    assert "tokenizer" in error_of(load_tokenizer, write_model(tmp_path, spec=spec)).removeprefix(str(tmp_path))


PANICS = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}, "single": [
    {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<none>", "type_id": 0}}]}  # at any text


def test_panic_while_encoding(tmp_path):
    """A panic of the Rust library is no Exception."""
    folder = write_model(tmp_path, spec=tiny_spec(post_processor=PANICS))
    assert "tokenizer_config.json" in error_of(load_tokenizer, folder)
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")))
    assert "cannot encode the text" in error_of(tokenizer.encode, "a")


def test_other_threads_go_on_while_a_long_text_is_encoded():
    ticks, ended = [], threading.Event()
    thread = threading.Thread(target=lambda: [ticks.append(1) for _ in iter(lambda: ended.wait(0.005), True)])
    thread.start()
    tokenizer, text = load_tokenizer(ROOT / "demo"), "to be or not to be" * 50_000
    before = len(ticks)
    ids = tokenizer.encode(text)
    ticked = len(ticks) - before
    ended.set()
    thread.join()
    assert ticked > 10 and ids == tokenizer.backend.encode(text).ids


def test_keyboard_interrupt_passes(monkeypatch):
    def interrupt(text, **options):
        raise KeyboardInterrupt
    tokenizer = Tokenizer(tiny_backend())
    monkeypatch.setattr(tokenizer, "backend", type("Backend", (), {"encode_batch_fast": staticmethod(interrupt)}))
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("a")


def test_missing_and_unreadable_files(tmp_path):
    assert "does not exist" in error_of(load_tokenizer, tmp_path / "nowhere\nat all")
    for template in (b"\xff", "{% if %}"):
        assert "chat_template.jinja" in error_of(load_tokenizer, write_model(tmp_path, template=template))


@pytest.mark.parametrize("prompt, expected", [
    ("Hi", False), ("Hi<think>", True), ("<think>\n", True), ("<think>a</think>", False), ("a</think><think>", True),
    ("<|im_start|>user\nWhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
    ("<think>\ncut off<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", False),
    ("<|im_start|>assistant\n<think>\ncut off<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
    ("<|im_start|>assistant\n</think><|im_end|>\n<|im_start|>assistant\n<think>\n", True)])
def test_inside_thought_looks_at_the_last_turn(tiny_model, prompt, expected):
    assert inside_thought(last_turn(tiny_model.tokenizer, tiny_model.tokenizer.encode(prompt))) is expected


@given(st.text() | st.from_regex(r"[\x00-\x1f\u200b\u202ea ]*", fullmatch=True), st.integers(5, 60))
def test_brief_is_one_printable_line(text, longest):
    line = brief(text, longest)
    assert len(line) <= longest and line.isprintable()
    if text.isprintable() and len(words := " ".join(text.split())) <= longest:
        assert line == words
