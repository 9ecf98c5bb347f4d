"""qwen3_app/chat.py: commands, settings, the KV cache over turns and after Ctrl-C, and random lines."""
import contextlib
import dataclasses
import io
import itertools
import json
import multiprocessing
import os
import random
import re
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

import qwen3
from qwen3_app import chat as qwen3_chat
from qwen3_app import cli as qwen3_cli
from qwen3_app import files as qwen3_files
from qwen3_app import terminal
from configs import BASE, VOCABULARY
from make_random_model import make_random_model
from qwen3 import InputError

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "demo"
PERU, LIMA = "What is the capital of Peru?", "The capital of Peru is Lima."
SPAIN, MADRID = "What is the capital of Spain?", "The capital of Spain is Madrid."
TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]
TINY = BASE | {"vocab_size": VOCABULARY, "max_position_embeddings": 2**20, "num_hidden_layers": 1,
              "tie_word_embeddings": False}
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Get the weather in a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}}


@pytest.fixture(scope="module")
def demo():
    return qwen3.load_model(DEMO)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The folder of a model with one layer of random weights."""
    return make_random_model(TINY, tmp_path_factory.mktemp("tiny"), "float32")


# ---- helpers --------------------------------------------------------------------------------------------------------

def roles(messages: list[dict]) -> str:
    """The initials of who has said something: s, u, a, t."""
    return "".join(message["role"][0] for message in messages)


OPTIONS = qwen3_cli.checked_options(qwen3_cli.parse_arguments(qwen3_cli.make_parser(), ["--chat", "--top-k", "7"]))


def new_chat(model: qwen3.Model, messages: list[dict] | None = None, **more) -> qwen3_chat.Chat:
    return qwen3_chat.Chat(model, list(messages or []), options=OPTIONS, **more)


def handled(chat: qwen3_chat.Chat, line: str) -> str:
    """Handles a line -> what was written to stdout and stderr, without the newline at its end."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        chat.handle(line)
    return out.getvalue().removesuffix("\n")


def refused(chat: qwen3_chat.Chat, line: str) -> str:
    """What a line is refused with; the conversation is then as before."""
    before = list(chat.messages)
    with pytest.raises(InputError) as caught:
        handled(chat, line)
    assert chat.messages == before
    return str(caught.value)


def type_in(monkeypatch, text: str) -> None:
    """Lets the program find a text on its stdin, as from a pipe."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode(errors="surrogatepass"))))


def assert_valid(messages: list[dict]) -> None:
    for i, message in enumerate(messages):
        qwen3_files.check_message(message, f"message {i}")


@pytest.fixture
def playground(tmp_path, monkeypatch):
    """An empty home and working directory with files of others, which the test must leave as they are."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("folder").mkdir()
    Path("theirs.txt").write_text("not ours")
    Path("unloadable.json").write_text('[{"role": "user"}]')
    Path("link").symlink_to("theirs.txt")
    Path("dangling").symlink_to("nowhere")
    yield
    assert (Path("theirs.txt").read_text(), Path("unloadable.json").read_text()) == ("not ours", '[{"role": "user"}]')
    assert os.readlink("link") == "theirs.txt" and not Path("nowhere").exists() and Path("folder").is_dir()


# ---- lines and commands ---------------------------------------------------------------------------------------------

def test_commands(demo):
    chat = new_chat(demo, enable_thinking=False)
    assert set(re.findall(r"(?m)(?:^|, )(/[a-z_]+)", handled(chat, "/help"))) == {*chat.commands, "/quit", "/bye"}
    assert handled(chat, "/system") == "(no system prompt)"
    assert handled(chat, "/system  You are a helpful assistant. ") == "(system prompt set)"
    assert handled(chat, "/system") == "You are a helpful assistant."
    assert handled(chat, "//etc/passwd") and chat.messages[1] == {"role": "user", "content": "/etc/passwd"}
    assert handled(chat, "/clear").startswith("(a new conversation") and roles(chat.messages) == "s"
    assert "no answer yet" in refused(chat, "/stats")
    assert handled(chat, "/system -") == "(no system prompt from now on)" and chat.messages == []
    assert handled(chat, PERU) == LIMA
    assert re.fullmatch(r"prompt: \d+ tokens \(\d+ from the cache\), [\d.]+ tokens/s, first token after [\d.]+ s \| "
                        r"answer: 10 tokens, [\d.]+ tokens/s, .*\| .*context: \d+ of 4096 tokens",
                        handled(chat, "/stats"))
    cut = "\n(The answer was cut off after 9 tokens: raise max_tokens (/set) for more.)"
    assert handled(chat, "/set max_tokens 9") and handled(chat, PERU) == LIMA[:-1] + cut
    assert handled(chat, "/set max_tokens 6")
    for line, shown in {"/think": True, "/set hide_thinking on": False, "/set hide_thinking default": True}.items():
        handled(chat, line)
        cut = r"\n?\(The thought took 6 tokens, .*\)"
        assert re.fullmatch(r"<think>\n.+\n(?=\()" * shown + cut, handled(chat, PERU))
        assert chat.messages[-1]["content"] == "" and chat.messages[-1]["reasoning_content"]
    assert handled(chat, "/no_think") and "<think>" not in handled(chat, PERU)
    for line in ("/exit", "/quit", "/bye", "exit", " quit ", "bye"):
        with pytest.raises(EOFError):
            chat.handle(line)
    for line in ("/no-think", "/nothink", "/no_think"):
        assert handled(chat, "/think") and handled(chat, line) == "(answers without thinking)"
        assert chat.enable_thinking is False


def test_set(demo):
    chat = new_chat(demo)
    names = re.findall(r"\w+", re.search(r"show or set: (.*?) \(VALUE", handled(chat, "/help"), re.DOTALL)[1])
    shown = handled(chat, "/set")
    assert names == re.findall(r"(\w+) = ", shown) and "temperature = 0.0  top_k = 7 " in shown
    for setting, shown in {
            "temperature 0.5": "0.5", "temperature default": "0.0", "top_k ٣": "3", "top_k default": "7",
            "hide_thinking on": "on", "hide_thinking off": "off", "seed  1 ": "1", "temperature 5": "5",
            "max_tokens 40": "40", "top-k=4": "4", "seed = 2": "2", "stats=on": "on", "stats default": "off"}.items():
        key = re.match("[a-z_-]+", setting)[0].replace("-", "_")
        assert handled(chat, f"/set {setting}") == handled(chat, f"/set {key}") == f"{key} = {shown}"
    first = handled(chat, PERU)
    assert handled(chat, "/regenerate") != first
    chat.n_answers = 0
    assert handled(chat, "/regenerate") == first  # the seed repeats it


def test_what_is_misspelt(demo):
    chat = new_chat(demo)
    for line, similar in {"/regenrate": "/regenerate", "/exti": "/exit", "/set temprature 1": "temperature",
                          "/set tempreature=1": "temperature", "/nothnk": "/nothink"}.items():
        assert f"did you mean {similar}?" in refused(chat, line)
    assert "/help lists them" in refused(chat, "/xyzzy") and "/help lists them" in refused(chat, "/set xyzzy 1")


def test_words_behind_a_command_that_takes_none(demo):
    chat = new_chat(demo, TALK)
    for line in ("/undo 5", "/clear x", "/think foo", "/nothink foo", "/history 3", "/exit now", "/stats all"):
        assert "takes nothing behind it" in refused(chat, line)
    assert chat.messages == TALK and chat.enable_thinking is None


def test_undo_and_history(demo):
    chat = new_chat(demo, [{"role": "system", "content": "Be brief."}], enable_thinking=False)
    assert "no message to take back" in refused(chat, "/undo")
    assert handled(chat, "My name is Mia.") and handled(chat, PERU) == LIMA
    assert handled(chat, "/history") == "\n".join(
        ["system> Be brief.", "> My name is Mia.", "Nice to meet you, Mia!", "> " + PERU, LIMA])
    assert handled(chat, "/undo") == f"(took back: {PERU})" and roles(chat.messages) == "sua"
    assert handled(chat, "/clear") and roles(chat.messages) == "s"
    assert "back in the conversation" in handled(chat, "/undo") and roles(chat.messages) == "sua"
    assert handled(chat, "What is my name?") == "Your name is Mia."


def test_undo_knows_what_was_saved(demo, playground):
    handled(new_chat(demo, TALK), "/save other.json")
    chat = new_chat(demo, enable_thinking=False, tools=[WEATHER])
    assert "no message to answer yet" in refused(chat, "/regenerate")
    assert handled(chat, PERU) and handled(chat, "/load other.json")
    assert chat.tools == [WEATHER]  # the file has none
    assert handled(chat, "/undo") and chat.messages[0]["content"] == PERU and chat.saved == []
    assert handled(chat, "/clear") and handled(chat, "/clear") and handled(chat, "/undo")
    assert chat.messages[0]["content"] == PERU


def test_undo_after_load(demo, playground):
    chat = new_chat(demo, TALK)
    handled(chat, "/save mine.json")
    other = new_chat(demo, enable_thinking=False)
    assert handled(other, PERU) and handled(other, "/load mine.json") and handled(other, SPAIN)
    assert handled(other, "/undo") == f"(took back: {SPAIN})" and other.messages == TALK
    assert handled(other, "/undo") and other.messages[0]["content"] == PERU
    assert handled(other, "/undo") and other.messages == [] and "no message" in refused(other, "/undo")


def test_regenerate_says_why_the_answer_is_the_same(demo):
    chat = new_chat(demo, enable_thinking=False)
    assert handled(chat, PERU) == LIMA
    assert re.fullmatch(re.escape(LIMA) + r"\n\(the same answer: temperature 0 .*\)", handled(chat, "/regenerate"))
    handled(chat, "/set temperature 5")
    assert "the same answer" not in handled(chat, "/regenerate")
    handled(chat, "/set temperature default")
    handled(chat, "/think")
    assert "the same answer" not in handled(chat, "/regenerate")


def test_statistics_after_each_answer(demo):
    chat = new_chat(demo, enable_thinking=False)
    handled(chat, "/set stats on")
    assert re.fullmatch(LIMA + r"\n.*answer: 10 tokens, [\d.]+ tokens/s, reading [\d.]+ GB/s of weights.*context: .*",
                        handled(chat, PERU))
    handled(chat, "/set stats off")
    assert handled(chat, SPAIN) == MADRID


def test_set_shows_what_answers_are_drawn_with(demo):
    """Without thinking that is not what generation_config.json says."""
    chat = new_chat(dataclasses.replace(demo, sampling=qwen3.Sampling(0.6, 20, 0.95)), [])
    assert {"temperature = 0.6", "top_p = 0.95", "top_k = 7"} <= set(handled(chat, "/set").split("  "))
    handled(chat, "/no_think")
    assert {"temperature = 0.7", "top_p = 0.8", "top_k = 7"} <= set(handled(chat, "/set").split("  "))


def test_regenerate_while_results_are_missing(demo):
    """The answer with the calls is made anew, and no call is left without a result."""
    call = {"name": "get_weather", "arguments": {"city": "Paris"}}
    asked = [{"role": "user", "content": PERU}, {"role": "assistant", "content": "", "tool_calls": [call, call]}]
    chat = new_chat(demo, [*asked, {"role": "tool", "content": "sunny"}])
    assert chat.missing_results() == 1
    handled(chat, "/regenerate")
    assert roles(chat.messages) == "ua" and not chat.missing_results()


@pytest.mark.parametrize("line", [
    "/hepl", "/load none.json", "/load -", "/load unloadable.json", "/save", "/save -", "/save .", "/save \0",
    "/save \udcff", "/regenerate", "/stats", "/system caf\udcff", "a " * 5000, *("/set " + setting for setting in [
        "temperature hot", "temperature nan", "temperature 1e999", "top_k -1", "top_k ½", "top_p 0",
        "top_p 1.5", "top_p inf", "min_p -0.1", "seed -1", "seed 1.5", "seed +-5", f"seed {'9' * 5000}", "max_tokens 0",
        "max_new_tokens 0", "think_budget -1", "hide_thinking 1", "stop x", "nothing 1"])])
def test_a_refused_line_changes_nothing(demo, playground, line):
    chat = new_chat(demo, TALK[1:])
    assert refused(chat, line) and chat.options == OPTIONS and not chat.hide_thinking


def test_a_model_cannot_command_the_terminal():
    """Nothing gets there but newlines, tabs and our own dimming."""
    text, screen, pipe = "".join(map(chr, [*range(0x300), *range(0x2000, 0x2070)])), io.StringIO(), io.StringIO()
    screen.isatty = lambda: True
    for out in (screen, pipe):
        with contextlib.redirect_stdout(out):
            qwen3_cli.write(text)
    assert pipe.getvalue() == text
    commanding = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u202a-\u202e\u2066-\u2069]"
    assert screen.getvalue() == re.sub(commanding, "\ufffd", text)


def test_save_writes_only_over_its_own_files(demo, playground):
    chat, other = new_chat(demo, TALK), new_chat(demo, TALK)
    Path("loadable.json").write_text(json.dumps(TALK))
    os.link("theirs.txt", "hardlink")
    handled(other, "/save others.json")
    for name in ("own.json", "./folder/../own.json"):
        assert handled(chat, f"/save {name}") == "(saved 2 messages)"
    refused(chat, "/load unloadable.json")
    for name in ("theirs.txt", "others.json", "loadable.json", "link", "dangling", "hardlink", "folder",
                 "folder/../theirs.txt", "/dev/null", "unloadable.json"):
        assert "exists already" in refused(chat, f"/save {name}")
    assert handled(chat, "/load loadable.json") == "(loaded 2 messages)"
    chat.messages.append({"role": "user", "content": "\u2028 \x00 界"})
    Path("own link").symlink_to("own.json")
    handled(chat, "/save 'own link'")
    assert handled(other, "/load own.json") == "(loaded 3 messages; /regenerate answers the last one)"
    assert other.messages == chat.messages and json.loads(Path("others.json").read_text()) == TALK


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # no thread is used after the fork
def test_a_save_that_is_killed_leaves_a_whole_file_or_none(demo, playground):
    """The process is killed at random moments, while it saves again and again."""
    rng = random.Random(0)
    chat = new_chat(demo, [{"role": "user", "content": "界" * 500}] * 200)

    def save_again_and_again(name: str) -> None:
        while True:
            handled(chat, f"/save {name}")
            chat.messages.append({"role": "assistant", "content": "!" * 2000})

    for i in range(40):
        child = multiprocessing.get_context("fork").Process(target=save_again_and_again, args=[f"{i}.json"])
        child.start()
        time.sleep(rng.uniform(0, 0.002 * i))  # none gets far at first, all do in the end
        child.kill()
        child.join()
    files = [json.loads(file.read_text()) for file in Path().glob("[0-9]*.json")]
    assert files and all(len(messages) >= 200 for messages in files)


# ---- the KV cache over turns, and after Ctrl-C -----------------------------------------------------------------------

def handle_and_check(chat: qwen3_chat.Chat, line: str, stop_at: int | None = None) -> None:
    """Handles a line, with Ctrl-C at the n-th piece. Checks what the answer cost, and that it is as without a cache."""
    before, last = chat.cache.token_ids[0, :chat.cache.length].tolist(), chat.last
    forward = mock.Mock(side_effect=qwen3.forward)
    chat.model = dataclasses.replace(chat.model, engine=dataclasses.replace(chat.model.engine, forward=forward))
    stop = [] if stop_at is None else [None] * stop_at + [KeyboardInterrupt]
    with (mock.patch.object(terminal, "write", side_effect=itertools.chain(stop, itertools.repeat(None))),
          contextlib.suppress(KeyboardInterrupt, InputError)):
        handled(chat, line)
    assert_valid(chat.messages)
    passes = [len(call.args[1]) for call in forward.call_args_list]  # how many tokens each of them computed
    if chat.last is last or chat.last is None:
        assert not passes
        return
    prompt, answer, cached = chat.last.prompt_ids.tolist(), list(chat.last.token_ids), chat.last.cached_tokens
    assert cached == min(len(os.path.commonprefix([before, prompt])), len(prompt) - 1)
    assert not passes or passes[0] == len(prompt) - cached and len(answer) - sum(passes[1:]) in (0, 1)
    held = chat.cache.token_ids[0, :chat.cache.length].tolist()
    assert held == (prompt + answer)[:len(held)]
    n = len(answer) + (chat.last.finish_reason == "stop")
    fresh = qwen3.Completion(chat.model, prompt, max_new_tokens=n + 1, think_budget=chat.options["think_budget"])
    assert fresh.finish().token_ids[:n] == answer


LINES = ["My name is Mia.", "What is my name?", PERU, "What is 12 + 30?", "", "//slash", "/clear",
         "What is the weather in Paris?", "<|im_end|>\n<think>", "/stats", "/regenerate", "/think", "/no_think", "//x",
         "/system Be brief.", "/system -", "/set max_tokens 30", "/set think_budget 3", "/save x", "/load x"]


@pytest.mark.parametrize("seed", range(4))
def test_the_cache_kept_over_turns_changes_no_answer(demo, playground, seed):
    rng = random.Random(seed)
    chat = new_chat(demo, tools=[WEATHER] if seed % 2 else None)
    handled(chat, "/set max_tokens 12")
    for _ in range(9):
        handle_and_check(chat, rng.choice(LINES), rng.choice([None, rng.randrange(12)]))


def test_only_what_differs_is_computed_again(demo):
    chat, empty_thought = new_chat(demo), len(demo.tokenizer.encode("<think>\n\n</think>\n\n"))
    handle_and_check(chat, "My name is Mia.")
    for line in ("What is my name?", "/no_think", PERU, SPAIN):
        earlier = chat.last
        handle_and_check(chat, line)
        if line != "/no_think":  # of the answer before, the thought is gone, and so what follows is new
            assert chat.last.cached_tokens == len(earlier.prompt_ids) - empty_thought * (line == SPAIN)
    assert chat.messages[3]["content"] == "Your name is Mia." and roles(chat.messages) == "uauauaua"


def test_a_second_ctrl_c_may_come_at_once(demo, monkeypatch):
    type_in(monkeypatch, "")
    for name in ("read_line", "note"):
        monkeypatch.setattr(qwen3_chat, name, mock.Mock(side_effect=KeyboardInterrupt))
    statuses = []
    with contextlib.suppress(KeyboardInterrupt):
        statuses.append(qwen3_chat.run_chat(new_chat(demo)))
    assert statuses == [0]


@pytest.mark.parametrize("error", [KeyboardInterrupt, InputError("the logits are not finite")])
def test_an_answer_that_does_not_begin(demo, error):
    """The old answer is there, the cache is as if nothing had happened, and the question is taken back."""
    engine = dataclasses.replace(demo.engine, forward=mock.Mock(side_effect=error))
    chat = new_chat(dataclasses.replace(demo, engine=engine), TALK)
    for line in ("/regenerate", PERU):
        with pytest.raises((KeyboardInterrupt, InputError)):
            handled(chat, line)
        assert chat.messages == TALK
    handle_and_check(chat, "/regenerate")
    assert roles(chat.messages) in ("ua", "uaua")


@contextlib.contextmanager
def interrupted_at(step: int):
    """Ctrl-C before the n-th line of our own code."""
    steps = itertools.count(1)

    def trace(frame, event, _):
        if event == "line" and next(steps) == step:
            raise KeyboardInterrupt
        return trace if Path(frame.f_code.co_filename).parent in (ROOT, ROOT / "qwen3_app") else None

    sys.settrace(trace)
    with contextlib.suppress(KeyboardInterrupt):
        yield
    sys.settrace(None)


@pytest.mark.parametrize("seed", range(30))
def test_ctrl_c_at_any_line_of_the_program(tiny, seed):
    """Wherever Ctrl-C comes: the messages stay valid, and the cache gives the answers that a fresh one gives."""
    rng = random.Random(seed)
    chat = new_chat(qwen3.load_model(tiny))
    handled(chat, "/set max_tokens 5")
    handle_and_check(chat, "My name is Mia.")
    for line in ("What is my name?", "/regenerate", PERU * rng.randint(1, 12)):
        kept = list(chat.messages)
        with interrupted_at(int(2 ** rng.uniform(0, 13))):
            handled(chat, line)
        assert_valid(chat.messages)
        assert chat.messages[:len(kept) - 1] == kept[:-1] and re.fullmatch("(ua)+", roles(chat.messages))
    handle_and_check(chat, "What is my name?")
    assert len(chat.last.token_ids) == 5 and chat.messages[-1]["role"] == "assistant"


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_ctrl_c_while_the_cache_grows(tiny, monkeypatch, n):
    """k and v, and when there is more to hold, again k and v, are copied into larger arrays: four moments."""
    chat, resized, calls = new_chat(qwen3.load_model(tiny)), qwen3.KVCache._resized, itertools.count(1)

    def interrupted(*arguments):
        if next(calls) == n:
            raise KeyboardInterrupt
        return resized(*arguments)

    monkeypatch.setattr(qwen3.KVCache, "_resized", interrupted)
    handled(chat, "/set max_tokens 5")
    for line in ("My name is Mia.", "Hi", PERU * 20):
        with contextlib.suppress(KeyboardInterrupt):
            handled(chat, line)
    assert next(calls) > n
    for line in ("/regenerate", PERU * 10, "/regenerate"):
        handle_and_check(chat, line)


# ---- random lines ---------------------------------------------------------------------------------------------------

SPOKEN = ["<think>", "\n", "a thought", "</think>", "text", "\x1b[31m", "\ufffd", "界", "<tool_call>", "</tool_call>",
          '<tool_call>\n{"name": "f", "arguments": {"x": [1, 2.5, null, "\\u00e9"]}}\n</tool_call>', '{"name": "f"',
          '<tool_call>{"name": "f", "arguments": null}</tool_call>', '{"name": 1, "arguments": {}}', "<|im_end|>"]
NAMES = ["own.json", "two words", "'quoted name.json'", '"a', "it's", "", ".", "..", "/", "~", "--", "-", "*", "link",
         "theirs.txt", "dangling", "unloadable.json", "theirs.txt/x", "none/x", "none/..", "/dev/null", "folder",
         "$HOME", "x\0y", "a\\ b", "~nosuchuser/x", "n" * 255, "n" * 256, "\x1b[31m", "\udcff", "界" * 84]
VALUES = ["0", "1", "-1", "0.5", "1e4", "nan", "1e-999", "1e", "", "٣.٥", "½", "1_000", "1 2", " 3 ", "+-5", "on",
          "off", "ON", "''", "default", str(10**400), "9" * 5000, "\ud800", "\x00"]
WORDS = ["Hi", PERU, "法国的首都是哪里？", "👋🏽", "\x00", "\x1b[2J", "\u2028", "\ud800", "'", "\\", "/", "a" * 3000,
         '"""', '"""one\ntwo"""', "<think>", "</think>", "<tool_call>", "<|im_end|>", "{{", "\t", "\r", "\ufeff", "%s"]


def random_line(rng: random.Random, commands: list[str]) -> str:
    """A line as a person, a script, or a cat on the keyboard might type it. It saves nothing outside the folder."""
    words = "".join(rng.choice(WORDS) + rng.choice(["", " "]) for _ in range(rng.choice([0, 1, 1, 2, 3, 8])))
    letters = "".join(chr(rng.randrange(rng.choice([0x300, 0x110000]))) for _ in range(rng.randrange(30)))
    key, value = rng.choice([*qwen3_chat.SETTINGS, "", "nothing"]), rng.choice(VALUES)
    return rng.choice([
        f"/set {key} {value}", f"/set{rng.choice(['', '  '])}{key} {value}", f"/save {rng.choice(NAMES)}",
        f"/load {rng.choice(NAMES)}", words, words, letters, "/" * rng.randint(1, 3) + words,
        rng.choice(commands) + rng.choice(["", " ", "x"]) + rng.choice(["", words, "-", value])])


def spoken_by(rng: random.Random):
    """A function like `chat`, with its checks; but the answers are made up, not computed. Some are interrupted."""
    def chat(*arguments, **options) -> qwen3.Completion:
        completion = qwen3.chat(*arguments, **options)
        pieces = rng.choices(SPOKEN, k=rng.choice([0, 1, 3, 6, 12]))
        completion.token_ids, completion.times = [0] * len(pieces), [0.0, 1.0, 2.0]
        end = KeyboardInterrupt if rng.random() < 0.1 else None
        completion._pieces = iter(mock.Mock(side_effect=[*pieces, end]), None)
        return completion

    return chat


@pytest.mark.parametrize("seed", range(6))
def test_random_lines(demo, playground, monkeypatch, seed):
    """From a pipe: whatever comes, the conversation stays valid, and it comes back as it was saved."""
    rng, n_lines = random.Random(seed), itertools.count(1)
    chat, other = new_chat(demo, tools=[WEATHER] if seed % 2 else None), new_chat(demo)
    commands = [name for name in chat.commands if name not in ("/save", "/load", "/exit")]

    def handle(line: str) -> None:
        try:
            qwen3_chat.Chat.handle(chat, line)
        finally:
            assert_valid(chat.messages)
            if (n := next(n_lines)) % 20 == 0 and chat.messages:
                chat.save(f"{n}.json")
                other.load(f"{n}.json")
                assert (other.messages, other.tools) == (chat.messages, chat.tools)
            if len(str(chat.messages)) > 4000:
                chat.clear("")

    type_in(monkeypatch, "\n".join(["long line " * 50_000, *(random_line(rng, commands) for _ in range(1000))]))
    monkeypatch.setattr(qwen3_chat, "chat", spoken_by(rng))
    monkeypatch.setattr(chat, "handle", handle)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()):
        assert qwen3_chat.run_chat(chat) == 1
    assert sys.stdin.read() == "" and next(n_lines) > 700 and len(out.getvalue()) > 3000  # they are worth their while
