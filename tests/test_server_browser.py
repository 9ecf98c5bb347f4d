"""The server's page in a browser: conversations, settings, Markdown, failures, storage, keyboard, looks."""
import dataclasses
import json
import re

import pytest

from configs import FORM
from helpers import assert_looks, axe_core, complaints_of
from serving import FRANCE, PARIS, Served, until

sync_api = pytest.importorskip("playwright.sync_api")
pytestmark = pytest.mark.timeout(120)
ASKED = FRANCE[0]["content"]
CHATS = "() => Object.keys(localStorage).filter(k => k.startsWith('qwen3.chat.')).map(k => JSON.parse(localStorage[k]))"


@pytest.fixture(scope="module")
def served(demo):
    with Served(demo, longest=400) as served:
        yield served


@pytest.fixture(scope="module")
def endless(demo):
    """A server whose answers go on until they are stopped, or the context is full."""
    with Served(dataclasses.replace(demo, eos_token_ids=()), longest=2000, slots=2) as served:
        yield served


class Tab:
    """A tab with the page; `close` fails the test if the browser complained, or the page asked anybody else."""

    def __init__(self, context, url):
        self.context, self.page, self.bodies = context, context.new_page(), []
        self.url, self.complaints = url.partition("#")[0], complaints_of(self.page)
        self.page.on("request", self.on_request)
        self.page.goto(url)

    def on_request(self, request):
        if not request.url.startswith((self.url, "data:")):
            self.complaints.append(request.url)
        if request.method == "POST" and request.headers["content-type"] == "application/json":
            self.bodies.append(json.loads(request.post_data))

    def close(self, expected=None):
        self.page.close()
        assert [text for text in self.complaints if not (expected and re.search(expected, text))] == []

    def ask(self, text, wait=True):
        self.page.fill("#box", text)
        self.page.keyboard.press("Enter")
        if wait:
            self.answered()

    def answered(self):
        sync_api.expect(self.page.locator("#send")).to_be_visible(timeout=30_000)

    def see(self, place, words):
        sync_api.expect(self.page.locator(place)).to_contain_text(words)

    def press(self, name):
        self.page.get_by_role("button", name=name, exact=True).first.click()

    def shows(self, place, texts):
        """Waits until the elements have these texts."""
        sync_api.expect(self.page.locator(place)).to_have_text(texts)

    def texts(self, place):
        return [text.rstrip("\n") for text in self.page.locator(place).all_text_contents()]

    def draw(self, text):
        """Shows an answer in the place of the conversation."""
        until(lambda: self.page.evaluate("model"))  # then the page has drawn what an empty conversation shows
        self.page.evaluate("text => { at('log').replaceChildren(); showAnswer(at('log'), text); }", text)

    def answers_with(self, *deltas, finish="stop", end="data: [DONE]\n\n"):
        """The server's next answers have these parts."""
        chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        chunks += [{"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]},
                   {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 20, "total_tokens": 30}}]
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + end
        self.page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body,
                                                                              content_type="text/event-stream"))


@pytest.fixture
def context(browser):
    context = browser.new_context(viewport={"width": 1200, "height": 800})
    yield context
    context.close()


@pytest.fixture
def tab(context, served):
    tab = Tab(context, served.url)
    yield tab
    tab.close()


def test_a_conversation(tab, served):
    """The answer is the API's, its thought is folded, its figures are the API's; a reload shows the same."""
    whole = served.ask("/v1/chat/completions", {"messages": FRANCE})[1]
    tab.page.evaluate("performance.now = (now => () => ++now)(0)")  # on a busy machine all tokens may come at once
    assert tab.page.evaluate("document.activeElement.id") == "box"
    tab.page.keyboard.type("One")
    tab.page.keyboard.press("Shift+Enter")
    tab.page.keyboard.type("Two")
    assert tab.page.input_value("#box") == "One\nTwo"
    tab.ask(ASKED)
    message, usage = whole["choices"][0]["message"], whole["usage"]
    for _ in range(2):
        assert tab.texts(".turn:not(.user) .block") == [message["content"]] == [PARIS]
        assert tab.texts(".thought") == [message["reasoning_content"]]
        sync_api.expect(tab.page.locator(".thought")).to_be_hidden()
        sync_api.expect(tab.page.locator(".tools details span")).to_be_hidden()
        tab.page.click("summary >> text=Tokens and speed")
        sync_api.expect(tab.page.locator(".tools details span")).to_be_visible()
        [figures] = tab.texts(".tools details span")
        assert figures.startswith(f"{usage['completion_tokens']} tokens · ") and " tokens/s · " in figures
        assert figures.endswith(f"· {usage['total_tokens']} of 400 tokens of the context")
        assert tab.page.title() == f"{ASKED} · Qwen3" and tab.texts("#chats a") == [ASKED]
        tab.page.reload()
    tab.ask("What is 2 + 3?")
    assert tab.bodies[-1]["messages"] == [*FRANCE, {"role": "assistant", "content": PARIS},
                                          {"role": "user", "content": "What is 2 + 3?"}]
    tab.page.locator("summary").first.click()
    sync_api.expect(tab.page.locator(".thought").first).to_be_visible()


def test_several_conversations(tab):
    tab.ask(ASKED)
    tab.page.click("#fresh")
    sync_api.expect(tab.page.locator(".turn")).to_have_count(0)
    tab.ask("What is the capital of Italy?")
    assert tab.texts("#chats a") == ["What is the capital of Italy?", ASKED]
    tab.page.click(f"text={ASKED}")
    tab.see("#log", PARIS)
    tab.page.locator("#chats li", has_text=ASKED).locator("button").click()
    tab.page.fill("#name", "Paris <b>")
    tab.page.keyboard.press("Enter")
    tab.see("#title", "Paris <b>")
    assert [chat["title"] for chat in tab.page.evaluate(CHATS)].count("Paris <b>") == 1
    tab.page.locator("#chats li", has_text="Paris").locator("button").click()
    tab.press("Delete")
    sync_api.expect(tab.page.locator(".turn")).to_have_count(0)
    assert [chat["title"] for chat in tab.page.evaluate(CHATS)] == ["What is the capital of Italy?"]
    tab.page.go_back()
    sync_api.expect(tab.page.locator(".turn")).to_have_count(0)


def test_settings(tab):
    """An empty field leaves the choice to the server; the others are sent, and outlive a reload."""
    tab.ask(ASKED)
    assert tab.bodies[-1].keys() == {"messages", "stream", "stream_options", "stop_loops"}
    tab.page.click("#open-settings")
    fields = {"system": "Be brief.", "temperature": "0.5", "top_p": "0.9", "max_tokens": "1"}
    for name, value in fields.items():
        tab.page.fill(f"#{name}", value)
    tab.page.select_option("#scheme", "dark")
    tab.page.keyboard.press("Escape")
    tab.page.uncheck("#think")
    tab.page.reload()
    tab.ask("Hello")
    sent = tab.bodies[-1]
    assert [message["role"] for message in sent.pop("messages")] == ["system", "user", "assistant", "user"]
    assert sent == {"stream": True, "stream_options": {"include_usage": True}, "stop_loops": True, "temperature": 0.5,
                    "top_p": 0.9, "max_tokens": 1, "enable_thinking": False}
    assert tab.texts(".tools .note")[-1] == "cut off" and "1 tokens" in tab.texts(".tools details span")[-1]
    assert tab.page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 21, 23)"
    tab.page.click("#open-settings")
    tab.page.fill("#temperature", "9")
    tab.page.keyboard.press("Escape")
    tab.ask("Hello again", wait=False)
    sync_api.expect(tab.page.locator("#temperature:invalid")).to_be_visible()
    assert tab.page.input_value("#box") == "Hello again"


def test_form(tab):
    tab.page.select_option("#format", "json")
    tab.ask(ASKED)  # with the schema that the page brings: the bundled model comes to its end
    assert json.loads(tab.texts(".turn pre")[0]).keys() == {"capital", "continent"}
    tab.page.fill("#schema", "{")
    tab.ask(ASKED, wait=False)
    tab.see("#schema-says", "The schema is no JSON")
    assert tab.page.input_value("#box") == ASKED and len(tab.bodies) == 1
    tab.page.fill("#schema", json.dumps(FORM))
    tab.page.focus("#box")
    tab.page.keyboard.press("Enter")
    tab.answered()
    [_, shown] = tab.texts(".turn pre")
    answer = json.loads(shown)
    assert answer.keys() == {"capital", "continent"} and answer["capital"] in FORM["properties"]["capital"]["enum"]
    assert shown.strip() == json.dumps(answer, indent=2)
    assert tab.texts("#schema-says") == [""]


BEGUN = ".thought:not(:empty), .block"  # of an answer


def test_stop_and_retry(context, endless):
    """By button, key and reload: question and part of the answer stay, the server is free."""
    tab = Tab(context, endless.url)
    for i, stop in enumerate((lambda: tab.page.click("#stop"), lambda: tab.page.keyboard.press("Escape"),
                              lambda: tab.page.reload())):
        tab.press("Retry") if i else tab.ask("Talk", wait=False)
        tab.page.wait_for_selector(BEGUN, state="attached")
        stop()
        tab.answered()
        endless.idle()
        assert tab.texts(".user .text") == ["Talk"] and tab.texts(".tools .note") == ["stopped"]
        [chat] = tab.page.evaluate(CHATS)
        assert chat["turns"][0]["content"] == "Talk" and chat["turns"][1]["content"] + chat["turns"][1]["thought"]
    tab.close()


def test_an_answer_goes_on_while_another_conversation_is_open(context, endless):
    tab = Tab(context, endless.url)
    for i, text in enumerate(("First", "Second")):
        if i:
            tab.page.click("#fresh")
            sync_api.expect(tab.page.locator("#send")).to_be_visible()
            sync_api.expect(tab.page.locator(".turn")).to_have_count(0)
        tab.ask(text, wait=False)
        tab.page.wait_for_selector(BEGUN, state="attached")
    tab.page.click("#stop")
    tab.page.click("#chats >> text=First")
    sync_api.expect(tab.page.locator("#stop")).to_be_visible()
    tab.page.locator("#chats li", has_text="First").locator("button").click()
    tab.press("Delete")
    endless.idle()
    assert [chat["title"] for chat in tab.page.evaluate(CHATS)] == ["Second"]
    tab.close()


def test_edit(tab):
    for country in ("Italy", "Spain"):
        tab.ask(f"What is the capital of {country}?")
    tab.press("Edit")
    tab.see(".user form", "will be removed")
    tab.press("Cancel")
    sync_api.expect(tab.page.locator(".turn")).to_have_count(4)
    tab.press("Edit")
    tab.page.fill(".user textarea", ASKED)
    tab.press("Ask again")
    tab.answered()
    assert tab.texts(".user .text") == [ASKED] and tab.texts(".block") == [PARIS]
    assert tab.bodies[-1]["messages"] == FRANCE and tab.page.evaluate("document.activeElement.id") == "box"


FOLLOWS = 'data: {"choices": [{"delta": {"content": "Pa"}, "finish_reason": null}]}\n\n'
FAILURES = {  # what the page says -> (the server's answer, the part of it that is shown)
    "No answer: the server can't be reached.": (None, ""),
    "No answer: the server answers 502.": ({"status": 502, "body": "<h1>Bad gateway</h1>"}, ""),
    "No answer: the queue is full.": ({"status": 429, "json": {"error": {"message": "the queue is full"}}}, ""),
    "The answer is incomplete: the connection ended before the answer.": ({"body": FOLLOWS}, "Pa"),
    "The answer is incomplete: out of time.": (
        {"body": FOLLOWS + 'data: {"error": {"message": "out of time"}}\n\n'}, "Pa")}


@pytest.mark.parametrize("says", FAILURES)
def test_a_failed_answer_loses_nothing(context, served, says):
    """The question stays, also after a reload, and Retry asks it again; a failed Retry keeps the answer before it."""
    tab, (answer, part) = Tab(context, served.url), FAILURES[says]
    tab.page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer) if answer else route.abort())
    tab.ask(ASKED)
    tab.page.reload()
    assert tab.texts(".user .text") == [ASKED] and tab.texts(".turn .error") == [says]
    assert "".join(tab.texts(".block")) == part
    tab.page.unroute("**/v1/chat/completions")
    tab.press("Retry")
    tab.answered()
    assert tab.texts(".turn .error") == [""] and tab.texts(".block") == [PARIS]
    if not part:
        tab.page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer) if answer else route.abort())
        tab.press("Retry")
        tab.answered()
        assert tab.texts(".turn .error") == [says] and tab.texts(".block") == [PARIS]
    tab.close("Failed to load resource")


def test_a_message_that_is_too_long_is_not_added(context, served):
    """The page says by how much; its text is back in the box, and the conversation goes on as if it hadn't been."""
    tab, long = Tab(context, served.url), "many words " * 500
    for turns in ([], [ASKED, PARIS]):
        tab.ask(long, wait=False)
        prompt = served.worker.model.tokenizer.apply_chat_template([*(
            {"role": role, "content": text} for role, text in zip(("user", "assistant"), turns)),
            {"role": "user", "content": long}])
        n = len(served.worker.model.tokenizer.encode(prompt, add_special_tokens=False))
        tab.see("#ask-says", f"prompt is too long: {n} tokens > 399 maximum")
        assert tab.page.input_value("#box") == long and tab.texts("#chats a") == turns[:1]
        sync_api.expect(tab.page.locator(".turn")).to_have_count(len(turns))
        tab.ask(ASKED)
        assert tab.texts("#ask-says") == [""] and tab.texts(".block")[-1] == PARIS
        assert tab.bodies[-1]["messages"][-1:] == FRANCE and len(tab.bodies[-1]["messages"]) == len(turns) + 1
    tab.press("Edit")
    tab.page.fill(".user textarea", long)
    tab.press("Ask again")
    tab.see("#ask-says", "too long")
    assert tab.texts(".user .text") == [ASKED, ASKED] and tab.texts(".block") == [PARIS, PARIS]
    assert [len(chat["turns"]) for chat in tab.page.evaluate(CHATS)] == [4]
    tab.close("status of 400")


def test_an_empty_page_invites(tab):
    """It names the model; each of its three examples is a question that the bundled model answers."""
    sync_api.expect(tab.page.locator(".welcome h2")).to_have_text("Chat with demo")
    sync_api.expect(tab.page.locator("#add")).to_be_hidden()  # this model doesn't see
    for i, words in enumerate(("The capital of France is Paris.", "72", "lighthouse")):
        tab.page.locator(".welcome button").nth(i).click()
        tab.answered()
        tab.see(".turn:not(.user) .block >> nth=0", words)
        assert tab.page.evaluate("document.activeElement.id") == "box"
        tab.page.click("#fresh")
    sync_api.expect(tab.page.locator(".welcome button")).to_have_count(3)


def test_api_key(context, demo):
    """The page asks for it; a wrong one again; it stands in this tab's storage only."""
    with Served(demo, key="secret") as served:
        tab = Tab(context, served.url)
        for key in ("wrong", "secret"):
            sync_api.expect(tab.page.locator("#lock")).to_be_visible()
            tab.page.fill("#key", key)
            tab.press("Use")
            if key == "wrong":
                tab.see("#lock-says", "refused")
        tab.see("#model", "demo")
        tab.ask(ASKED)
        tab.page.reload()
        tab.see("#model", "demo")
        assert "secret" not in tab.page.evaluate("JSON.stringify(localStorage)")
        tab.page.evaluate("sessionStorage.clear()")
        tab.page.reload()
        tab.press("Cancel")
        tab.see("#model", "wrong or missing API key")
        tab.close("status of 401")


MARKDOWN = """\
# Title

#### A **bold** and `code` deeper
1. one
2. two

- [x] done

| a | b |
| --- | ---: |
| 1 | 2 |

```python
if 1 < 2:
    print("&amp;")
```
line
break [link](https://example.org) ~~no~~
![picture](https://example.org/x.png)"""
ELEMENTS = [("h3", "Title"), ("h4", "A bold and code deeper"), ("h4 strong", "bold"), ("h4 code", "code"),
            ("ol li", "one"), ("ol li + li", "two"), ("ul li", "☑ done"), ("th", "a"), ("td[align=right]", "2"),
            ("pre code", 'if 1 < 2:\n    print("&amp;")\n'), (".bar span", "python"), ("p del", "no"),
            ("a[href='https://example.org'][target=_blank][rel=noreferrer]", "link"),
            ("a[href='https://example.org/x.png']", "picture")]

GROWN = """([text, size]) => {  // the HTML of a text that grows, that of the whole, how often the first block was drawn
  const place = document.createElement('div'), whole = document.createElement('div'), first = new Set();
  for (let n = size; n < text.length + size; n += size) {
    showMarkdown(place, text.slice(0, n));
    first.add(place.firstChild);
  }
  showMarkdown(whole, text);
  return [place.innerHTML, whole.innerHTML, first.size]; }"""


def test_markdown(tab):
    """The elements of each kind of Markdown; a text that grows ends as the whole does, and keeps the blocks before."""
    tab.answers_with({"content": MARKDOWN})
    tab.ask("?")
    answer = tab.page.locator(".turn").last
    for selector, text in ELEMENTS:
        assert answer.locator(f".block {selector}").first.text_content() == text, selector
    sync_api.expect(answer.locator("br")).to_have_count(2)
    sync_api.expect(answer.locator("img, input")).to_have_count(0)
    assert answer.locator("pre code .token").count() > 2
    text, end = "A [name].\n\n" + MARKDOWN, "\n\n[name]: https://example.org"  # the end changes the first block
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    answer.locator(".bar button").first.click()
    tab.see(".bar >> nth=0", "Copied")
    assert tab.page.evaluate("navigator.clipboard.readText()") == 'if 1 < 2:\n    print("&amp;")\n'
    for size in (1, 7):
        grown, whole, n_first = tab.page.evaluate(GROWN, [text + end, size])
        assert grown == whole and n_first <= (len("A [name].") + len(end)) // size + 2
    for language in ("latex", "constructor", "__proto__"):  # not known, so it has no colours
        tab.draw(f"```{language}\nreturn 1\n```")
        assert tab.page.locator("#log .token").count() == 0


FORMULAS = {  # an answer -> (how many formulas, of these displayed, the texts of code)
    r"The roots \( x_1 * x_2 \) and *so \(a*b\) is*, $5 and $6": (2, 0, []),
    "1. one\n   \\[\n   x\n   + y\n   \\]\n2. two \\(z\\)": (2, 1, []),
    r"It is \[ \boxed{\frac{1}{2}} \] or $$x \\[4pt] y$$.": (2, 2, []),
    "`\\(x\\)` and `$$ y $$` \\\\(z)": (0, 0, [r"\(x\)", "$$ y $$"]),
    "```\n\\[ x \\]\n```\n\n    $$ y $$": (0, 0, [r"\[ x \]" "\n", "$$ y $$\n"]),
    r"\(\unknown{x}\) and \(<script>\)": (1, 0, [r"\(\unknown{x}\)"]),
    "Half:\n\\[ \\frac{1}{*2*": (0, 0, [r"\[ \frac{1}{*2*"]), "The shell's $$ is *its* number": (0, 0, [])}


def test_formulas(tab):
    r"""\( \), \[ \] and $$ $$ are MathML, but in code; what can't be read, or isn't complete, is its source."""
    for text, (n, displayed, codes) in FORMULAS.items():
        tab.draw(text)
        found = [tab.page.locator(f"#log {place}").count() for place in ("math", "math[display=block]", "[style]")]
        assert found == [n, displayed, 0] and tab.page.locator("#log code").all_text_contents() == codes, text
        grown, whole, _ = tab.page.evaluate(GROWN, [text, 1])
        assert grown == whole, text


EVIL = ["<script>alert(1)</script>", "text <script>alert(1)</script> text", "<img src=x onerror=alert(1)>",
        "<svg/onload=alert(1)>", "<!-- <script>alert(1)</script> -->", "<style>* {display: none}</style>",
        "<iframe srcdoc='<script>alert(1)</script>'></iframe>", "<form action=/x><button>Send</button></form>"]
LINKS = ["[a](javascript:alert(1))", "[a](JaVaScRiPt:alert(1))", "[a](data:text/html,<b>)", "[a](//example.org)",
         r"\(\href{javascript:alert(1)}{x}\)", r"\(\includegraphics{https://example.org/x.png}\)",
         r"\[ \text{<img src=x onerror=alert(1)>} \]", "[a](&#106;avascript:alert(1))",
         "![a](https://example.org/x)", "[a](https://example.org/\"onclick=alert(1))",
         "<javascript:alert(1)>", "```\"onclick=alert(1)\nx\n```", "[a]: javascript:alert(1)\n\n[a]"]
ODD = ["> " * 3000 + "deep", "* " * 3000 + "x", "[" * 5000, "*a_" * 3000, "|" * 3000,
       "\\(" * 3000, "$$" * 3001, r"\[" + "{" * 5000, r"\(\def\a{\a\a}\a\)", "\u202e\0\ud7ff\U0001f600" * 50]


@pytest.mark.parametrize("form", ["", "json"])
def test_what_a_model_writes_runs_nothing(tab, form):
    """HTML is shown as the text that it is; links lead to web pages only; strange texts don't stop the page."""
    tab.page.select_option("#format", form)
    for text in [*EVIL, *LINKS, *ODD] if not form else [*EVIL[:2], *ODD[-1:]]:
        tab.page.click("#fresh")
        sync_api.expect(tab.page.locator(".turn")).to_have_count(0)
        tab.answers_with({"reasoning_content": text}, {"content": text})
        tab.ask(text)
        answer = tab.page.locator(".turn").last
        assert text not in EVIL or text in answer.locator(".block, pre code").first.text_content()
        dangerous = answer.locator("script, img, svg, iframe, style, form, [onclick], [onerror], [style]")
        sync_api.expect(dangerous).to_have_count(0)
        assert all(re.match("https?:", link) for link in answer.locator("a[href]").evaluate_all(
            "all => all.map(each => each.getAttribute('href'))")), text
        assert {shown.replace("\ufffd", "\0") for shown in tab.texts(".thought, .user .text")} == {text}


def test_the_policy_holds(context, served):
    """The browser refuses scripts, styles, pictures and requests that aren't the page's own."""
    tab = Tab(context, served.url)
    for script in ("document.head.append(Object.assign(document.createElement('script'), {text: 'window.ran = 1'}))",
                   "document.body.setAttribute('onclick', 'window.ran = 1')", "document.body.innerHTML = '<b>'",
                   "window.setTimeout('window.ran = 1', 0)", "fetch('http://127.0.0.1:1/')"):
        with pytest.raises(sync_api.Error):
            tab.page.evaluate(script)
    tab.page.evaluate("""document.head.append(
        Object.assign(document.createElement('style'), {textContent: '* {opacity: 0}'}))""")
    tab.page.click("h1")
    assert tab.page.evaluate("[window.ran, getComputedStyle(document.body).opacity]") == [None, "1"]
    tab.close("Content Security Policy|document requires|http://127.0.0.1:1/")


def test_two_tabs(context, served):
    """A tab shows what the other has added; when both go on with a conversation at once, both are kept."""
    one = Tab(context, served.url)
    one.ask(ASKED)
    two = Tab(context, one.page.url)
    two.see("#log", PARIS)
    two.ask("What is 2 + 3?")
    sync_api.expect(one.page.locator(".turn")).to_have_count(4)
    held = []
    one.page.route("**/v1/chat/completions", lambda route: held.append(route))
    one.ask("one", wait=False)
    sync_api.expect(two.page.locator(".turn")).to_have_count(6)
    two.ask("two")
    held[0].continue_()
    one.answered()
    kept = sorted([turn["content"] for turn in chat["turns"] if turn["role"] == "user"] for chat in
                  one.page.evaluate(CHATS))
    assert kept == [[ASKED, "What is 2 + 3?", "one"], [ASKED, "What is 2 + 3?", "one", "two"]]
    sync_api.expect(one.page.locator("#chats li")).to_have_count(2)
    sync_api.expect(two.page.locator("#chats li")).to_have_count(2)
    two.page.locator("#chats li:has([aria-current]) button").click()
    two.press("Delete")
    sync_api.expect(one.page.locator("#chats li")).to_have_count(1)
    two.page.uncheck("#think")
    sync_api.expect(one.page.locator("#think")).not_to_be_checked()
    one.close()
    two.close("lock")


CLOSED = "Object.defineProperty(window, '{}', {{get() {{ throw new DOMException('no', 'SecurityError'); }}}});"
FULL = """const free = () => { let n = 2 ** 22; for (let i = 0; n >= 1;) {
  try { localStorage.setItem('filler' + i++, 'x'.repeat(n)); } catch { n = n >> 1; } } }; free();"""
BROKEN = "".join(f"localStorage.setItem({json.dumps(key)}, {json.dumps(value)});" for key, value in [
    ("qwen3.settings", "{"), ("qwen3.chat.a", "{"), ("qwen3.chat.b", "3"),
    ("qwen3.chat.c", '{"title": 3, "turns": []}'), ("qwen3.chat.d", '{"title": "d", "turns": [{"role": "user"}]}'),
    ("qwen3.chat.e", '{"title": "e", "turns": [null]}'),
    ("qwen3.chat.", "null"), ("qwen3.chat.good", json.dumps({"title": "good", "changed": "x", "turns": [
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello", "thought": [1], "note": {}}]}))])


@pytest.mark.parametrize("script, says", [
    (CLOSED.format("localStorage") + CLOSED.format("sessionStorage"), "keeps nothing"), (FULL, "storage is full"),
    (BROKEN, "")])
def test_storage_that_is_closed_full_or_broken(context, served, script, says):
    context.add_init_script(script)
    tab = Tab(context, served.url)
    assert tab.texts("#chats a") == ([] if says else ["good"])
    tab.ask(ASKED)
    tab.page.select_option("#format", "json")
    tab.see("#storage", says)
    assert tab.texts(".block") == [PARIS]
    tab.page.click("#fresh")
    tab.page.click(f"#chats >> text={ASKED}")
    tab.shows(".block", [PARIS])
    if not says:
        tab.page.click("#chats >> text=good")
        tab.shows(".block", ["Hello"])
        assert tab.page.evaluate("localStorage['qwen3.chat.a']") == "{"
    tab.page.locator("#chats li", has_text=ASKED).locator("button").click()
    if script == FULL:  # with room again, what wasn't kept is kept
        tab.page.evaluate("localStorage.removeItem('filler0')")
        tab.press("Rename")
        tab.shows("#storage", "")
        assert [chat["turns"][1]["content"] for chat in tab.page.evaluate(CHATS)] == [PARIS]
    else:
        tab.press("Delete")
        sync_api.expect(tab.page.locator("#chats li")).to_have_count(0 if says else 1)
    tab.close()


COLOURS = "```python\ndef f(x):  # no\n    return 'a' if x else None\n```\n```html\n<b class='x'>a &amp; b</b>\n```\n"
MATHS = "\\(\\frac{1}{2}\\) and \\(%s\\)\n\n\\[%s\\]" % ("x_1 + " * 40 + "y", "x_1 + " * 40 + "y")
LONG = MARKDOWN + "\n\n" + COLOURS + MATHS + (
    "\n\n```js\nconst words = " + " + ".join(["'a long line of code'"] * 12) + ";\n" * 30 +
    "```\nDonaudampfschiff" * 12 + "\n\n" + "| " + " | ".join(["column"] * 20) + " |\n" + "| --- " * 20 + "|\n" +
    "| " + " | ".join(["value"] * 20) + " |\n\n> a quotation\n\n" + "\n\n".join(["A paragraph of text. " * 20] * 4))

MANY = """for (let i = 0; i < 40; i++) localStorage.setItem(`qwen3.chat.${i}`, JSON.stringify(
  {title: `Question ${i} with a name that is rather long, so that it has to be cut`, changed: i, turns: []}));"""


@pytest.mark.parametrize("width, scheme", [(360, "dark"), (1440, "light")])
def test_looks_and_accessibility(browser, served, width, scheme, screenshots):
    """In each state of the page nothing is wider than the window, and axe-core finds no violation."""
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    context.add_init_script(axe_core())
    context.add_init_script(MANY)
    tab = Tab(context, served.url)

    def look(state):
        assert_looks(tab.page, width, screenshots / f"chat-{width}-{scheme}-{state}.png")

    look("empty")
    tab.page.evaluate("at('model').textContent = 'a-long-name-of-a-model-'.repeat(20)")
    assert tab.page.locator("#title").bounding_box()["width"] > width / 4
    tab.answers_with({"reasoning_content": "A thought.\n" * 5}, {"content": LONG})
    tab.ask("A question with a long word: " + "Donaudampfschiff" * 12)
    look("end")
    tab.page.click("summary >> text=Thought")
    tab.page.locator("#log").evaluate("log => log.scrollTop = 0")
    tab.press("Edit")
    look("edit")
    tab.press("Cancel")
    tab.page.select_option("#format", "json")
    look("form")
    tab.page.select_option("#format", "")
    tab.page.click("#open-settings")
    tab.page.click("text=licences")
    look("settings")
    tab.page.keyboard.press("Escape")
    tab.page.route("**/v1/chat/completions", lambda route: route.abort())
    tab.ask("Another question")
    look("error")
    if width < 700:
        tab.page.click("#menu")
    tab.page.locator("#chats button").first.click()
    look("naming")
    tab.press("Cancel")
    tab.page.evaluate("at('lock').showModal()")
    look("key")
    tab.close("ERR_FAILED")
    context.close()
