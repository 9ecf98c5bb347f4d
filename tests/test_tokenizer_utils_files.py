"""tokenizer_utils.py, its files: broken by hand and at random, they work, or one line says why not."""
import copy
import json

import pytest

from configs import BASE, VOCABULARY, CLI_CONFIG
from fuzzing import any_json, any_text, change, copy_files, damaged, deep_text, fuzz, in_child, write_new
from helpers import REMOVED, assert_cli_refuses, assert_one_line, edit_json, refuse_folder, run_main, works_or_refused
from make_random_model import make_random_model
from qwen3_app import cli
from tokenizer_utils import StreamDecoder, load_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # no thread is used after the fork


def test_no_tokenizer(folder, capfd):
    (folder / "tokenizer.json").unlink()
    refuse_folder(capfd, folder, "tokenizer.json")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 100_000],
                         ids=lambda content: repr(content[:10]))
def test_broken_tokenizer(folder, capfd, name, content):
    (folder / name).write_bytes(content)
    refuse_folder(capfd, folder, name)


def test_cut_tokenizer(folder, capfd):
    content = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(content[:len(content) // 2])
    refuse_folder(capfd, folder, "tokenizer.json")


def test_panic_in_the_tokenizer(folder, capfd):
    """The Rust library prints its panic on stderr by itself; the line that the user needs follows."""
    edit_json(folder / "tokenizer.json", {"post_processor": {
        "type": "TemplateProcessing", "pair": [], "special_tokens": {},
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<none>", "type_id": 0}}]}})
    assert cli.main(["--model", str(folder), "Hello"]) == 1
    assert "tokenizer.json" in capfd.readouterr().err.splitlines()[-1]


def test_tokenizer_of_a_larger_model(tmp_path, capfd):
    """Ids beyond the embedding are refused, not wrapped around."""
    path = make_random_model(CLI_CONFIG | {"vocab_size": 10}, tmp_path / "model", "float32")
    assert_cli_refuses(capfd, ["--model", path, "Hello"], "10", "token")


@pytest.mark.parametrize("template", [
    "{{ raise_exception('no\nway') }}", "{{ messages[0].nothing.at.all }}", "{{ 1 / 0 }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{% if %}", "{{", "{% nosuchtag %}", "{% include 'other' %}",
    "{% for i in range(10**9) %}x{% endfor %}", "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ lipsum.__globals__['os'].popen('echo escaped').read() }}",
    "{{ cycler.__init__.__globals__.os.system('echo escaped') }}", "{{ '{0.__class__}'.format(1) }}",
    "{{ messages.append(1) }}", "{{ '\ud83d'.encode() }}",
], ids=lambda template: ascii(template)[:40])
def test_template_that_fails_or_tries_to_escape(folder, capfd, template):
    (folder / "chat_template.jinja").write_bytes(template.encode("utf-8", "surrogatepass"))
    status, out, err = run_main(capfd, "--model", folder, "Hello")
    assert status == 1 and not out.strip() and "escaped" not in out
    assert_one_line(err, "chat_template.jinja")


@pytest.mark.parametrize("template", ["", "{# nothing #}", "{{ '\\ud800' }}"])
def test_template_whose_text_is_no_prompt(folder, capfd, template):
    (folder / "chat_template.jinja").write_text(template)
    assert_cli_refuses(capfd, ["--model", folder, "Hello"])


def test_no_template(folder, capfd):
    edit_json(folder / "tokenizer_config.json", {"chat_template": REMOVED})
    assert_cli_refuses(capfd, ["--model", folder, "Hello"], "template", "--raw")
    assert run_main(capfd, "--model", folder, "--raw", "--max-tokens", 2, "Hello")[0] == 0


# ----------------------------------------------------------------------------------------------------------------------
# At random
# ----------------------------------------------------------------------------------------------------------------------

COMPONENTS = [  # what else the library knows, sound or nearly so
    {"type": "NFD"}, {"type": "NFKC"}, {"type": "Lowercase"},
    {"type": "Strip", "strip_left": True, "strip_right": True}, {"type": "StripAccents"}, {"type": "Nmt"},
    {"type": "Prepend", "prepend": "▁"}, {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    {"type": "Replace", "pattern": {"Regex": "("}, "content": ""},
    {"type": "Replace", "pattern": {"Regex": ".*"}, "content": "x" * 50}, {"type": "Sequence", "normalizers": []},
    {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None,
     "lowercase": True},
    {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}, {"type": "ByteLevel"},
    {"type": "Whitespace"}, {"type": "WhitespaceSplit"}, {"type": "Digits", "individual_digits": True},
    {"type": "UnicodeScripts"}, {"type": "BertPreTokenizer"}, {"type": "Punctuation", "behavior": "Isolated"},
    {"type": "Sequence", "pretokenizers": []},
    {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    {"type": "FixedLength", "length": 0}, {"type": "CharDelimiterSplit", "delimiter": "e"},
    {"type": "Split", "pattern": {"Regex": "(?=a)"}, "behavior": "Removed", "invert": True},
    {"type": "Split", "pattern": {"String": ""}, "behavior": "MergedWithNext", "invert": False},
    {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
     "special_tokens": {}},
    {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}], "pair": [],
     "special_tokens": {}},
    {"type": "BertProcessing", "sep": ["<|im_end|>", 298], "cls": ["<|im_start|>", 10**6]}, {"type": "Fuse"},
    {"type": "ByteFallback"},
    {"type": "RobertaProcessing", "sep": ["a", 1], "cls": ["b", 2], "trim_offsets": True, "add_prefix_space": True},
    {"type": "WordPiece", "prefix": "##", "cleanup": True}, {"type": "BPEDecoder", "suffix": "</w>"}, {"type": "CTC"},
    {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    {"type": "Unigram", "unk_id": 0, "vocab": [["a", -1.0]]}, {"type": "BPE", "vocab": {}, "merges": []},
    {"type": "BPE", "vocab": {"a": 0, "b": 0}, "merges": ["a b"]},
    {"type": "BPE", "vocab": {"a": 2**32 - 1}, "merges": []},
    {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 5},
    {"strategy": {"Fixed": 10**12}, "direction": "Left", "pad_to_multiple_of": 0, "pad_id": 0, "pad_type_id": 0,
     "pad_token": "x"},
    {"id": 0, "content": "a", "single_word": True, "lstrip": True, "rstrip": True, "normalized": True, "special": True},
    {"id": 2**32 - 1, "content": "", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
     "special": False},
]
PARTS = ["normalizer", "pre_tokenizer", "post_processor", "decoder", "model", "truncation", "padding", "added_tokens"]


def any_part(rng):
    return copy.deepcopy(rng.choice(COMPONENTS)) if rng.random() < 0.5 else any_json(rng)


def use_tokenizer(tokenizer, rng):
    """Encoding, decoding and streaming with a tokenizer that could be loaded: consistent, or refused in one line."""
    ids = works_or_refused(tokenizer.encode, any_text(rng, surrogates=False) + "Hello <|im_start|> 123 é日本")
    ids = [0, 1, 299, 2**32, -1] if ids is None else ids
    assert all(type(token) is int for token in ids)
    text = tokenizer.decode(ids)
    decoder = StreamDecoder(tokenizer)
    assert "".join(map(decoder.push, ids)) + decoder.flush() == text
    works_or_refused(tokenizer.apply_chat_template, [{"role": "user", "content": "Hi"}], enable_thinking=True)


@fuzz(3000)
def test_tokenizer_json(rng, tiny, scratch):
    copy_files(tiny, scratch)
    raw = json.loads((tiny / "tokenizer.json").read_bytes())
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        what = rng.random()
        if what < 0.35:
            part = rng.choice(PARTS)
            raw[part] = any_part(rng) if part != "added_tokens" else [any_part(rng) for _ in range(rng.randint(0, 3))]
        elif what < 0.45 and isinstance(raw.get("added_tokens"), list):
            raw["added_tokens"] += [rng.choice(COMPONENTS[-2:]) | {"id": rng.choice([300, 322, 400, 2**31]),
                                                                   "content": any_text(rng)}]
        elif what < 0.55 and isinstance(raw.get("model"), dict):
            raw["model"][rng.choice(["dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
                                     "fuse_unk",
                                     "byte_fallback", "ignore_merges", "vocab", "merges", "type"])] = any_json(rng)
        else:
            change(rng, raw, any_part)
    text = deep_text(rng, json.dumps(raw, ensure_ascii=rng.random() < 0.5)).encode("utf-8", "surrogatepass")
    write_new(scratch / "tokenizer.json", damaged(rng, text) if rng.random() < 0.2 else text)
    tokenizer = works_or_refused(load_tokenizer, scratch)
    if tokenizer is not None:
        use_tokenizer(tokenizer, rng)
    return tokenizer is not None


def test_normalizer_that_multiplies_the_text(tiny, scratch):
    """Twelve times ten for one: a kilobyte of tokenizer.json must not make a terabyte of a letter."""
    copy_files(tiny, scratch)
    raw = json.loads((tiny / "tokenizer.json").read_bytes())
    tenfold = {"type": "Replace", "pattern": {"String": "x"}, "content": "x" * 10}
    raw["normalizer"] = {"type": "Sequence", "normalizers": [tenfold] * 12}
    write_new(scratch / "tokenizer.json", json.dumps(raw))
    assert in_child(lambda: works_or_refused(lambda: load_tokenizer(scratch).encode("x"))) is None


@fuzz(3000)
def test_tokenizer_config(rng, tiny, scratch):
    copy_files(tiny, scratch)
    raw = json.loads((tiny / "tokenizer_config.json").read_bytes())
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        what = rng.random()
        if what < 0.3:
            raw[rng.choice(["eos_token", "bos_token", "pad_token", "unk_token", "x_token", "messages_token", "_token",
                            "chat_template", "added_tokens_decoder", any_text(rng)])] = any_json(rng)
        elif what < 0.6 and isinstance(raw.get("added_tokens_decoder"), dict):
            key = rng.choice([*raw["added_tokens_decoder"], "0", "322", "323", "4294967296", "-1", "٣", "1e3",
                              any_text(rng)])
            raw["added_tokens_decoder"][key] = rng.choice([
                any_json(rng), {"content": any_text(rng)}, {"content": any_json(rng), "special": any_json(rng)}, {},
                {"special": True}, {"content": "<new>", "lstrip": rng.choice([1, None, True])}, {"content": "a"}])
        else:
            change(rng, raw)
    text = deep_text(rng, json.dumps(raw, ensure_ascii=rng.random() < 0.5)).encode("utf-8", "surrogatepass")
    write_new(scratch / "tokenizer_config.json", damaged(rng, text) if rng.random() < 0.1 else text)
    tokenizer = works_or_refused(load_tokenizer, scratch)
    if tokenizer is not None:
        use_tokenizer(tokenizer, rng)
    return tokenizer is not None


@pytest.mark.parametrize("normalized", [False, True])
def test_added_tokens_keep_their_field_normalized(tmp_path, normalized):
    """A token that isn't normalised stands for its own spelling only: e + accent, but not é."""
    folder = make_random_model(BASE | {"vocab_size": VOCABULARY}, tmp_path)
    file = folder / "tokenizer_config.json"
    config, token_id = json.loads(file.read_text()), load_tokenizer(folder).vocab_size
    token = {"content": "<e\u0301>", "lstrip": False, "normalized": normalized, "rstrip": False, "single_word": False,
             "special": False}
    file.write_text(json.dumps(config | {"added_tokens_decoder":
                                         config["added_tokens_decoder"] | {str(token_id): token}}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("<e\u0301>") == [token_id]
    assert (tokenizer.encode("<\u00e9>") == [token_id]) == normalized
