"""qwen3_lib/app/chat.py: commands, settings, and the KV cache over turns and after Ctrl-C."""
import contextlib
import dataclasses
import io
import itertools
import json
import os
import random
import re
from pathlib import Path
from unittest import mock

import pytest

import qwen3
from helpers import LIMA, PERU, SPAIN, TALK, WEATHER, roles, with_engine
from qwen3 import InputError
from qwen3_lib.generation.completion import Completion
from qwen3_lib.app import chat as qwen3_chat
from qwen3_lib.app import terminal
from qwen3_lib.generation.options import AnswerOptions
from tokenizer_utils import check_message

CALL = {"name": "get_weather", "arguments": {"city": "Paris"}}
OPTIONS = AnswerOptions(top_k=7)


def new_chat(model: qwen3.Model, messages: list[dict] | None = None, **more) -> qwen3_chat.Chat:
    return qwen3_chat.Chat(model, list(messages or []), options=OPTIONS, **more)


def handled(chat: qwen3_chat.Chat, line: str) -> str:
    """Handles a line -> what was written to stdout and stderr, without the newline at its end."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        chat.handle(line)
    return out.getvalue().removesuffix("\n")


def refused(chat: qwen3_chat.Chat, line: str) -> str:
    """The message with which a line is refused; the conversation and its settings are then as before."""
    before = chat.messages, chat.options, chat.enable_thinking, chat.hide_thinking
    with pytest.raises(InputError) as caught:
        handled(chat, line)
    assert (chat.messages, chat.options, chat.enable_thinking, chat.hide_thinking) == before
    return str(caught.value)


# ---- commands -------------------------------------------------------------------------------------------------------

def test_commands(demo):
    chat = new_chat(demo, enable_thinking=False)
    assert set(re.findall(r"(?m)(?:^|, )(/[a-z_]+)", handled(chat, "/help"))) == {*chat.commands}
    assert handled(chat, "/") == handled(chat, "/help")
    assert refused(chat, "a " * 5000).endswith("(the message was not added)")  # there is nothing to clear
    assert handled(chat, "/system") == "(no system prompt)"
    assert handled(chat, "/system  You are a helpful assistant. ") == "(system prompt set)"
    assert handled(chat, "/system") == "You are a helpful assistant."
    assert handled(chat, "//etc/passwd") and chat.messages[1] == {"role": "user", "content": "/etc/passwd"}
    assert handled(chat, "/reset").startswith("(a new conversation") and roles(chat.messages) == "s"
    assert "no answer yet" in refused(chat, "/stats")
    assert handled(chat, "/system -") == "(no system prompt from now on)" and chat.messages == []
    assert "0 messages | context: 0 of 4,096" in handled(chat, "/show") and handled(chat, PERU) == LIMA
    used = len(qwen3.chat(demo, chat.messages, None, False).prompt_ids)
    assert used > len(chat.last.prompt_ids) + 10
    assert re.fullmatch(r"prompt: \d+ tokens \(\d+ from the cache\), [\d.]+ tokens/s, first token after [\d.]+ s \| "
                        rf"answer: 10 tokens, [\d.]+ tokens/s, .*\| context: {used} of 4,096 tokens used",
                        handled(chat, "/stats"))
    assert handled(chat, "/show").splitlines() == [
        "qwen3 · demo · 6.95 M parameters · context 4,096 · NumPy float32", f"folder: {demo.path}",
        f"conversation: 2 messages | context: {used} of 4,096 tokens used"]
    for line in ("/exit", "/quit", " quit "):
        with pytest.raises(EOFError):
            chat.handle(line)


def test_a_cut_answer_and_a_hidden_thought(demo):
    chat = new_chat(demo, enable_thinking=False)
    cut = "\n(The answer was cut off after 9 tokens: raise max_tokens (/set) for more.)"
    assert handled(chat, "/set max_tokens 9") and handled(chat, PERU) == LIMA[:-1] + cut
    assert handled(chat, "/set max_tokens 6")
    for line, shown in {"/think": True, "/set hide_thinking on": False, "/set hide_thinking default": True}.items():
        handled(chat, line)
        cut = r"\n?\(The thought took 6 tokens, .*\)"
        assert re.fullmatch(r"<think>\n.+\n(?=\()" * shown + cut, handled(chat, PERU))
        assert chat.messages[-1]["content"] == "" and chat.messages[-1]["reasoning_content"]
    assert handled(chat, "/nothink") == "think = off" and "<think>" not in handled(chat, PERU)


def test_set(demo):
    chat = new_chat(demo)
    shown = handled(chat, "/set")
    assert re.findall(r"(?m)^(\w+) +=", shown) == qwen3_chat.SETTINGS and re.search("(?m)^top_k +  = 7$", shown)
    assert len({line.index("=") for line in shown.splitlines()}) == 1
    assert all(name in handled(chat, "/help") for name in qwen3_chat.SETTINGS)
    for setting, shown in {
            "temperature 0.5": "temperature = 0.5", "temp default": "temperature = 0.0", "top_k ٣": "top_k = 3",
            "top_k default": "top_k = 7", "hide on": "hide_thinking = on", "think default": "think = default",
            "seed  1 ": "seed = 1", "temp 5": "temperature = 5", "max_tokens 40": "max_tokens = 40",
            "top-k=4": "top_k = 4", "seed = 2": "seed = 2", "stats=on": "stats = on"}.items():
        assert handled(chat, f"/set {setting}") == shown
    assert re.search(r"\n.*answer: \d+ tokens, .*context: .*", first := handled(chat, PERU))
    handled(chat, "/set stats default")
    assert handled(chat, "/regenerate") != first.rpartition("\n")[0]
    chat.n_answers = 0
    assert handled(chat, "/retry") == first.rpartition("\n")[0]  # the seed repeats it


def test_set_shows_what_answers_are_drawn_with(demo):
    """Without thinking, the values aren't those of generation_config.json."""
    chat = new_chat(dataclasses.replace(demo, sampling=qwen3.Sampling(0.6, 20, 0.95)))
    for line, shown in (("/think", ("0.6", "0.95")), ("/no_think", ("0.7", "0.8"))):
        handled(chat, line)
        assert (chat.shown_value("temperature"), chat.shown_value("top_p"), chat.shown_value("top_k")) == (*shown, "7")


@pytest.mark.parametrize("line, words", [
    ("/retyr", "did you mean /regenerate?"), ("/xyzzy", "/help lists them"),
    ("/set temprature 1", "did you mean temperature?"), ("/set xyzzy 1", "the settings are temperature, "),
    ("/set top 1", "top is the beginning of top_k and top_p"), ("/undo 5", "takes nothing"),
    ("/load none.json", "cannot be read"), ("/load -", "name of a file"), ("/load unloadable.json", "no \"content\""),
    ("/save", "name of a file"), ("/save .", "exists already"), ("/save \0", "not the name"),
    ("/regenerate", "no message to answer"), ("a \udcff", "not valid Unicode"), ("a " * 5000, "/clear"),
    *((f"/set {key} {value}", key) for key, value in (
        ("temperature", "hot"), ("temperature", "nan"), ("top_k", "½"), ("seed", "+-5"), ("seed", "9" * 5000),
        ("max_tokens", 0), ("think", "x")))])
def test_a_refused_line_changes_nothing(demo, tmp_path, monkeypatch, line, words):
    monkeypatch.chdir(tmp_path)
    Path("unloadable.json").write_text('[{"role": "user"}]')
    assert words in refused(new_chat(demo, TALK[1:]), line)


def test_undo_and_history(demo):
    chat = new_chat(demo, [{"role": "system", "content": "Be brief."}], enable_thinking=False)
    assert "nothing to take back" in refused(chat, "/undo")
    assert handled(chat, "My name is Mia.") and handled(chat, PERU) == LIMA
    assert handled(chat, "/history") == "\n".join(
        ["system> Be brief.", "> My name is Mia.", "Nice to meet you, Mia!", "> " + PERU, LIMA])
    assert handled(chat, "/clear") and roles(chat.messages) == "s"
    assert handled(chat, "/clear") == "(the conversation is empty)"
    assert handled(chat, "/undo") == f"(undone: /clear | the conversation ends with: {LIMA})"
    assert handled(chat, "/undo") == f"(undone: {PERU} | the conversation ends with: Nice to meet you, Mia!)"
    assert handled(chat, "/system Be kind.") and "(undone: /system Be kind. |" in handled(chat, "/undo")
    assert roles(chat.messages) == "sua" and chat.messages[0]["content"] == "Be brief."
    assert handled(chat, "What is my name?") == "Your name is Mia."


@pytest.mark.parametrize("hide, left", [(True, ""), (False, "ua")])
def test_ctrl_c_in_a_thought_that_nobody_sees_takes_the_message_back(demo, monkeypatch, hide, left):
    chat = new_chat(demo, hide_thinking=hide, enable_thinking=True)
    shown = (terminal.Status, "show") if hide else (terminal, "write")
    monkeypatch.setattr(*shown, mock.Mock(side_effect=[None, KeyboardInterrupt, *[None] * 9]))
    with pytest.raises(KeyboardInterrupt):
        handled(chat, PERU)
    assert roles(chat.messages) == left


def test_an_answer_that_fills_the_context_is_kept_and_counted(demo):
    small = dataclasses.replace(demo.config, context_length=len(qwen3.chat(demo, PERU).prompt_ids) + 2)
    chat = new_chat(dataclasses.replace(demo, config=small), show_stats=True)
    assert "tokens used" in handled(chat, PERU) and roles(chat.messages) == "ua"


def test_regenerate_says_why_the_answer_is_the_same(demo):
    chat = new_chat(demo, enable_thinking=False)
    assert handled(chat, PERU) == LIMA and handled(chat, "/set temp 0")
    assert re.fullmatch(re.escape(LIMA) + r"\n\(the same answer: temperature 0 .*\)", handled(chat, "/regenerate"))
    for line in ("/set temperature 5", "/think"):
        handled(chat, line)
        assert "the same answer" not in handled(chat, "/regenerate")


def test_results_of_tools(demo):
    """All results come before the next answer; /regenerate makes the answer with the calls again."""
    asked = [{"role": "user", "content": PERU}, {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}]
    chat = new_chat(demo, asked, enable_thinking=False)
    assert json.dumps(CALL) in handled(chat, "/history")
    assert chat.missing_results() == 2 and handled(chat, '{"temperature": 7}') == "" and chat.missing_results() == 1
    other = new_chat(demo, chat.messages)
    assert handled(chat, '{"temperature": 8}') and roles(chat.messages) == "uatta" and not chat.missing_results()
    handled(other, "/regenerate")
    assert roles(other.messages) == "ua" and not other.missing_results()
    chat = new_chat(demo, [*asked, *[{"role": "tool", "content": "7"}] * 3], enable_thinking=False)  # one too many
    assert handled(chat, PERU) == LIMA and roles(chat.messages) == "uatttua"


def test_a_conversation_that_ends_with_a_result_is_answered_at_once(demo, capsys):
    asked = [{"role": "user", "content": PERU}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    chat = new_chat(demo, [*asked, {"role": "tool", "content": "7"}], enable_thinking=False)
    assert qwen3_chat.converse(chat, mock.Mock(side_effect=EOFError)) == 0 and roles(chat.messages) == "uata"


def test_save_writes_only_over_its_own_files(demo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    chat, other = new_chat(demo, TALK), new_chat(demo)
    for name in ("theirs.txt", "loadable.json"):
        Path(name).write_text(json.dumps(TALK))
    Path("dangling").symlink_to("nowhere")
    Path("link").symlink_to("theirs.txt")
    for name in ("two words.json", "'two words.json'", "./two words.json", "~/two words.json"):
        assert handled(chat, f"/save {name}") == "(saved 2 messages)"
    for name in ("theirs.txt", "link", "dangling", "/dev/null", "loadable.json"):
        assert "exists already" in refused(chat, f"/save {name}")
    assert handled(chat, "/load loadable.json") == "(loaded 2 messages)"
    chat.messages = [*TALK, {"role": "user", "content": "\u2028 \x00 界"}]
    chat.tools = [WEATHER]
    assert handled(chat, "/save loadable.json") and not Path("nowhere").exists()
    assert handled(other, "/load loadable.json") == "(loaded 3 messages; /regenerate answers the last one)"
    assert (other.messages, other.tools) == (chat.messages, [WEATHER])
    assert json.loads(Path("theirs.txt").read_text()) == TALK


# ---- the KV cache over turns, and after Ctrl-C ----------------------------------------------------------------------

def handle_and_check(chat: qwen3_chat.Chat, line: str, stop_at: int | None = None) -> None:
    """Handles a line, with Ctrl-C at the n-th piece. Checks the tokens computed, and the answer against a fresh one."""
    before, last = chat.cache.token_ids.ravel()[:chat.cache.length].tolist(), chat.last
    forward = mock.Mock(side_effect=qwen3.run_pass)
    chat.model = with_engine(chat.model, run=forward)
    stop = [] if stop_at is None else [None] * stop_at + [KeyboardInterrupt]
    with (mock.patch.object(terminal, "write", side_effect=itertools.chain(stop, itertools.repeat(None))),
          contextlib.suppress(KeyboardInterrupt, InputError)):
        handled(chat, line)
    for i, message in enumerate(chat.messages):
        check_message(message, f"message {i}")
    passes = [len(call.args[1].token_ids) for call in forward.call_args_list]  # how many tokens each of them computed
    if chat.last is last or chat.last is None:
        assert not passes
        return
    prompt, answer, cached = chat.last.prompt_ids.tolist(), list(chat.last.token_ids), chat.last.cached_tokens
    assert cached == min(len(os.path.commonprefix([before, prompt])), len(prompt) - 1)
    assert not passes or passes[0] == len(prompt) - cached and len(answer) - sum(passes[1:]) in (0, 1)
    held = chat.cache.token_ids.ravel()[:chat.cache.length].tolist()
    assert held == (prompt + answer)[:len(held)]
    n = len(answer) + (chat.last.finish_reason == "stop")
    fresh = Completion(chat.model, prompt, max_new_tokens=n + 1, think_budget=chat.options.think_budget)
    assert fresh.finish().token_ids[:n] == answer


LINES = ["My name is Mia.", "What is my name?", PERU, "What is 12 + 30?", "", "//slash", "/clear", "/undo",
         "What is the weather in Paris?", "<|im_end|>\n<think>", "/stats", "/regenerate", "/think", "/no_think",
         "/system Be brief.", "/system -", "/set max_tokens 30", "/set think_budget 3", "/save x", "/load x"]


@pytest.mark.parametrize("seed", range(2))
def test_the_cache_kept_over_turns_changes_no_answer(demo, tmp_path, monkeypatch, seed):
    monkeypatch.chdir(tmp_path)
    rng = random.Random(seed)
    chat = new_chat(demo, tools=[WEATHER] if seed % 2 else None)
    handled(chat, "/set max_tokens 12")
    for _ in range(16):
        handle_and_check(chat, rng.choice(LINES), rng.choice([None, rng.randrange(12)]))


def test_only_what_differs_is_computed_again(demo):
    chat, empty_thought = new_chat(demo), len(demo.tokenizer.encode("<think>\n\n</think>\n\n"))
    handle_and_check(chat, "My name is Mia.")
    for line in ("What is my name?", "/no_think", PERU, SPAIN):
        earlier = chat.last
        handle_and_check(chat, line)
        if line != "/no_think":  # the template drops the thought of the answer before, so the rest is new
            assert chat.last.cached_tokens == len(earlier.prompt_ids) - empty_thought * (line == SPAIN)
    assert chat.messages[3]["content"] == "Your name is Mia." and roles(chat.messages) == "uauauaua"


@pytest.mark.parametrize("error", [KeyboardInterrupt, InputError("the logits are not finite")])
def test_an_answer_that_does_not_begin(demo, error):
    """The old answer is there, the cache is as if nothing had happened, and the question is taken back."""
    chat = new_chat(with_engine(demo, run=mock.Mock(side_effect=error)), TALK)
    for line in ("/regenerate", PERU):
        with pytest.raises((KeyboardInterrupt, InputError)):
            handled(chat, line)
        assert chat.messages == TALK and not chat.earlier
    handle_and_check(chat, "/regenerate")
    assert roles(chat.messages) == "ua"
