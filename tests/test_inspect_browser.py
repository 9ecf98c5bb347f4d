"""The page in a browser: it shows the numbers it holds, every slider works, it is accessible, and safe to open.

test_inspect.py compares these numbers with an oracle.
"""
import re
from dataclasses import replace

import numpy as np
import pytest

import qwen3
import qwen3_inspect
from configs import BASE, HYBRID, HYBRID_MOE, VOCABULARY
from helpers import assert_looks, complaints_of
from make_random_model import make_random_model
from oracle import oracle
from qwen3_lib.generation.options import AnswerOptions
from qwen3_lib.page.contents import PageOptions, contents
from qwen3_lib.page.page import html, pack
from test_inspect import EVIL, unpacked
from test_qwen3_moe import MOE

SETTINGS = {"temperature": 1.2, "top_k": 40, "top_p": 0.95}
WISH = PageOptions("The capital of France is", answer=AnswerOptions(max_new_tokens=10, seed=2, **SETTINGS),
                   quantized=False, compare="What is 2 + 3?")
PIXEL = """([canvas, i, j]) => {
  const copy = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
  copy.drawImage(document.querySelector(canvas), -j, -i);
  return [...copy.getImageData(0, 0, 1, 1).data]; }"""  # of a picture: row i, column j
DRAWN = """([id, name]) => {
  const {data: [edges], bbox, ctx, valToPos} = charts[id], wanted = color(name).split(' ').map(Number);
  const copy = new OffscreenCanvas(ctx.canvas.width, ctx.canvas.height).getContext('2d', {willReadFrequently: true});
  copy.drawImage(ctx.canvas, 0, 0);
  return edges.slice(1).map((edge, i) => {
    const pixels = copy.getImageData(Math.round(valToPos((edge + edges[i]) / 2, 'x', true)), bbox.top, 1, bbox.height);
    return range(bbox.height).filter(y => wanted.every((c, k) => pixels.data[4 * y + k] === c)).length / bbox.height;
  }); }"""  # of a chart: how high each place is filled with a colour of page.css, as a share of the height
SIZES = [(390, "dark"), (1440, "light")]


@pytest.fixture(scope="module")
def held(demo):
    """Contents of a page, with a panel on quantization that no numba is needed for."""
    found, rng = contents(demo, WISH), np.random.default_rng(0)
    n = len(found["tokens"]["ids"])
    kl = {form: pack(rng.uniform(1e-5, 1e-2, n), "f4") for form in ("int8", "int4")}
    answers = {"float32": ["a", "b", "c"], "int8": ["a", "b", "c"], "int4": ["a", "x"]}
    return found | {"quantized": {"kl": kl, "answers": answers, "parts": {"int8": None, "int4": 1}}}


@pytest.fixture(scope="module")
def truth(demo, held):
    return oracle(demo, np.array(held["tokens"]["ids"]))


@pytest.fixture(scope="module")
def file(held, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(html(held), "utf-8")
    return path


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """(contents, file) of the page of a Qwen3.5; a pixel of a state's picture is the largest of 2 x 2 numbers."""
    folder, config = tmp_path_factory.mktemp("hybrid"), HYBRID | {"linear_value_head_dim": 40, "num_hidden_layers": 8}
    make_random_model(config | {"vocab_size": VOCABULARY}, folder, "float32")
    found = contents(qwen3.load_model(folder), WISH)
    (folder / "page.html").write_text(html(found), "utf-8")
    return found, folder / "page.html"


class Tab:
    """A page that was opened; it fails the test if the browser complained or asked for anything but the file."""

    def __init__(self, browser, file, width=1440, scheme="light", **options):
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **options)
        self.page, self.requests = self.context.new_page(), []
        self.complaints = complaints_of(self.page)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())

    def close(self, file):
        self.context.close()
        assert self.complaints == [] and self.requests == [file.as_uri()]

    def text(self, place):
        return self.page.locator(place).text_content()

    def slide(self, name, value):
        """Moves a slider as a user's hand does."""
        self.page.locator(f"#{name}").evaluate(
            "(input, value) => { input.value = value; input.dispatchEvent(new Event('input')); }", str(value))

    def charted(self, chart):
        """The numbers given to a chart: its edges, then each series without the last value, which is there twice."""
        edges, *series = self.page.evaluate("id => charts[id].data", chart)
        assert all(values[-1] == values[-2] for values in series)
        return np.array(edges), *(np.array(values[:-1], float) for values in series)

    def until(self, script, argument=None):
        """Waits until a script gives true (the page's policy forbids the eval of wait_for_function)."""
        for _ in range(200):
            if self.page.evaluate(script, argument):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(script)


@pytest.fixture
def tab(browser, file):
    tab = Tab(browser, file)
    yield tab
    tab.close(file)


def percents(text):
    """The numbers before "%" in a text, as shares."""
    return [float(number) / 100 for number in re.findall(r"([\d.]+) %", text)]


def test_tokens(tab, held):
    pieces = tab.page.locator("#pieces button")
    assert pieces.count() == len(held["tokens"]["ids"])
    for i, (token, data) in enumerate(zip(held["tokens"]["ids"], held["tokens"]["bytes"])):
        pieces.nth(i).click()
        assert f"id {token}, bytes {data}; written by " in tab.text("#piece")
        assert pieces.nth(i).get_attribute("aria-pressed") == "true"
        drawn = i - held["about"]["n_prompt"]  # a token of the answer moves the panels on choosing and the cache, too
        assert drawn < 0 or tab.page.evaluate("[state.drawn, state.pass]") == [drawn, drawn]
        box, cell = (tab.page.locator(f"#lens {name}").bounding_box() for name in (".scroll", "[aria-selected]"))
        assert box["x"] + 80 < cell["x"] and cell["x"] + cell["width"] < box["x"] + box["width"] + 1  # in view
    cut = f"cut off after {len(held['tokens']['ids']) - held['about']['n_prompt']} tokens"
    assert (cut in tab.text("#about")) == (not held["about"]["ended"])
    assert tab.text("#wrapped") == held["tokens"]["text"] and tab.text("#prompt") == WISH.prompt


def test_the_way(tab, held):
    """The words, the costs and the length of the vector at steps of each kind; both charts, as given and drawn."""
    streams, norms, steps = unpacked(held["way"]["streams"]), unpacked(held["way"]["norms"]), held["way"]["steps"]
    chosen = [i for i in range(len(steps)) if i < 2 or i % 5 == 0 or i >= len(steps) - 2]  # 5: another kind each time
    assert {(steps[i]["function"], steps[i]["weight"]) for i in chosen} == {(s["function"], s["weight"]) for s in steps}
    for i in chosen:
        step = steps[i]
        token = i % len(held["tokens"]["ids"])
        tab.slide("way-step", i)
        tab.slide("way-token", token)
        words = held["words"].get(step["weight"], held["words"].get(step["function"]))
        assert f"{words}. Formula: {held['formulas'][step['function']]} " in tab.text("#step-is")
        shown = re.search(r"Length at token (\d+): (\S+)", tab.text("#length"))
        assert (shown is None) == (step["function"] == "rope_tables")
        if shown is not None:
            assert int(shown[1]) == token and float(shown[2]) == pytest.approx(norms[i, token], rel=1e-3)
        _, along = tab.charted("along")
        np.testing.assert_allclose(along, norms[i], rtol=1e-6)
        _, stream = tab.charted("stream")
        np.testing.assert_allclose(stream, streams[:, token], rtol=1e-6)
        reached = min(step["layer"] + 1, len(streams) - 1)
        assert float(tab.text("#stream-is").split(": ")[1]) == pytest.approx(streams[reached, token], rel=6e-3)
        cells = tab.page.locator("#step td").all_text_contents()[1:]  # rows of (prefill, decode)
        for column, costs in enumerate((step["prefill"], step["decode"])):
            shape, read, operations, seconds, rate, share = cells[column::2]
            assert shape == " × ".join(map(str, costs["shape"]))
            assert number(read) == pytest.approx(costs["read"], rel=0.006)
            assert number(operations) == pytest.approx(costs["operations"], rel=0.006)
            assert number(seconds) == pytest.approx(costs["seconds"], rel=0.006)
            assert number(rate) == pytest.approx(costs["read"] / costs["seconds"], rel=0.006)
            assert percents(share)[0] == pytest.approx(costs["read"] / costs["seconds"] / held["way"]["bandwidth"],
                                                       abs=6e-4)
    np.testing.assert_allclose(tab.page.evaluate(DRAWN, ["stream", "map"]), stream / stream.max(), atol=0.03)
    np.testing.assert_allclose(tab.page.evaluate(DRAWN, ["along", "map"]), along / along.max(), atol=0.03)


def number(text):
    """1.23 MB -> 1230000."""
    value, unit = text.split(" ")
    return float(value) * {"G": 1e9, "M": 1e6, "k": 1e3, "m": 1e-3, "µ": 1e-6}.get(unit[0], 1)


def test_attention(tab, held, truth, demo):
    n = len(held["tokens"]["ids"])
    group = demo.config.num_attention_heads // demo.config.num_key_value_heads
    frames = tab.page.locator("#heads fieldset")
    assert frames.count() == demo.config.num_key_value_heads and frames.nth(0).locator("button").count() == group
    for layer in range(demo.config.num_hidden_layers):
        i = (layer * 5 + 3) % demo.config.num_attention_heads
        token = (7 * layer + 2) % n
        tab.slide("layer", layer)
        tab.slide("asks", token)
        tab.page.locator("#heads button").nth(i).click()
        expected = truth.attention[layer][i][token]
        said = tab.text("#looks-at").split(" looks at: ")[1]
        shown = {int(at): float(share) / 100 for at, share in re.findall(r"(\d+) “.*?” ([\d.]+) %", said)}
        assert len(shown) == min(5, token + 1)
        for at, share in shown.items():
            assert share == pytest.approx(expected[at], abs=2e-3)
        assert sum(shown.values()) >= np.sort(expected)[-5:].sum() - 5e-3
        shade = tab.page.evaluate(PIXEL, ["#map", token, int(expected.argmax())])
        assert shade[3] == 255 and shade[2] == pytest.approx(255 + np.sqrt(expected.max()) * (20 - 255), abs=3)  # --map
        score = float(re.search(r"previous-token score (\d\.\d+)", tab.text("#head-says"))[1])
        assert score == pytest.approx(np.mean([truth.attention[layer][i][t, t - 1] for t in range(1, n)]), abs=2e-3)


def test_delta_nets(browser, hybrid):
    """Each layer's charts and pictures; beside them what a Qwen3.5 adds to the other panels."""
    (found, file), tab = hybrid, Tab(browser, hybrid[1])
    rates, states, gates = map(unpacked,
                               (found["delta"]["rates"], found["delta"]["states"], found["attention"]["gates"]))
    assert states.shape == (6, 2, 8, 20) and "2 × 2" in tab.text("#blocks")
    assert tab.text("#delta h2") == "4 · Delta nets"
    for net, layer in enumerate([0, 1, 2, 4, 5, 6]):
        head, token = net % 2, 3 * net + 1
        tab.slide("net", net)
        tab.slide("changes", token)
        tab.page.locator("#states button").nth(head).click()
        np.testing.assert_allclose([*tab.charted("rates")[1:], *tab.charted("memory")[1:]], rates[net, :, head],
                                   rtol=1e-6)
        said = re.search(r"^Head (\d), token (\d+) .*: exp\(g\) (\S+), β (\S+)$", tab.text("#rates-is"), re.DOTALL)
        length = tab.text("#memory-is").split(": ")[-1]
        assert (tab.text("#net-is"), said[1], said[2]) == (str(layer), str(head), str(token))
        assert [float(said[3]), float(said[4]), float(length)] == pytest.approx(rates[net, :, head, token], rel=6e-3)
        i, j = np.unravel_index(states[net, head].argmax(), (8, 20))
        for row, column in ((int(i), int(j)), (net, 2 * net)):
            shade = tab.page.evaluate(PIXEL, [f"#states button:nth-child({head + 1}) canvas", row, column])
            share = states[net, head, row, column] / states[net].max()
            assert shade[3] == 255 and shade[2] == pytest.approx(255 + np.sqrt(share) * (20 - 255), abs=3)  # --map
    tab.slide("layer", 1)
    tab.page.locator("#heads button").nth(2).click()
    assert tab.text("#head-says").startswith("Layer 7, head 2: ")
    assert percents(tab.text("#looks-at"))[-1] == pytest.approx(gates[1, 2, token], abs=6e-4)
    size, bytes_ = 2 * 2 * 32 * 4, 6 * 4 * (3 * (2 * 2 * 16 + 2 * 40) + 2 * 16 * 40)  # of a position; of the states
    assert found["cache"]["per_position"] == size and found["cache"]["states"] == bytes_
    assert tab.charted("timeline")[1] == pytest.approx(
        [each["length"] * size + bytes_ for each in found["cache"]["passes"]])
    tab.slide("way-step", [step["function"] for step in found["way"]["steps"]].index("delta_rule_in_chunks"))
    tab.page.locator("#step-is button").click()
    assert "first, state = rule(" in tab.text("#lines .marked")
    tab.close(file)


def test_hands(tab, held, truth, demo):
    """The share of a pair of dimensions in q·k, before and after RoPE, and the angle."""
    pairs, half = held["attention"]["pairs"], demo.config.head_dim // 2
    group = demo.config.num_attention_heads // demo.config.num_key_value_heads
    tab.slide("layer", 1)
    tab.slide("asks", 9)
    tab.slide("key", 4)
    for i, pair in enumerate(pairs * 2):
        head = group if i < len(pairs) else group + 1  # two of the heads on the second key head
        tab.page.locator("#heads button").nth(head).click()
        tab.slide("pair", i % len(pairs))
        q, k = (complex(x[pair], x[pair + half]) for x in (truth.q[1][head][9], truth.k[1][1][4]))
        frequency = demo.config.rope_theta ** (-2 * pair / demo.config.head_dim)
        shown = [float(re.search(r"-?[\d.]+(e-\d+)?$", text)[0]) for text in
                 tab.page.locator("#hands figcaption").all_text_contents()]
        turned = q * np.exp(9j * frequency) * np.conj(k * np.exp(4j * frequency))
        assert shown == pytest.approx([(q * np.conj(k)).real, turned.real], abs=1e-2 * abs(q) * abs(k) + 1e-6)
        angles = [float(angle) for angle in re.findall(r"(-?[\d.]+)° from key to query", tab.text("#hands"))]
        assert np.exp(1j * np.radians(angles)) == pytest.approx(
            [q * np.conj(k) / abs(q * k), turned / abs(q * k)], abs=1e-2)
        degrees = float(re.search(r"changes by (-?[\d.]+)°", tab.text("#hands-say"))[1])
        assert degrees == pytest.approx(np.degrees(5 * frequency), abs=0.06)
    tab.slide("key", 12)
    assert "in the future" in tab.text("#hands-say")


def test_the_page_opens_on_the_first_word_of_the_answer(tab, held):
    told = [held["labels"][str(i)] for i in held["tokens"]["ids"][held["about"]["n_prompt"]:]]
    assert told[:3] == ["<think>", "⏎", "France"]
    assert "“France”" in tab.text("#piece") and "written by the model" in tab.text("#piece")


def test_logit_lens(tab, held, demo):
    n, layers = len(held["tokens"]["ids"]), demo.config.num_hidden_layers
    ids = np.reshape(held["lens"]["ids"]["values"], held["lens"]["ids"]["shape"])
    cells = tab.page.locator("#lens-table [role=gridcell][tabindex]")
    assert cells.count() == n * (layers + 1)
    cells.nth(0).click()
    for layer in range(layers + 1):
        for _ in range(2):
            tab.page.keyboard.press("ArrowRight")
        token = min(2 * (layer + 1), n - 1)
        said = tab.text("#lens-says")
        assert percents(said.split(". The final")[0]) == pytest.approx(
            unpacked(held["lens"]["probabilities"])[layer, token], abs=6e-4)
        label = held["labels"][str(ids[layer, token, 0])]
        assert tab.page.locator(":focus").text_content() == label and f": “{label}”" in said
        tab.page.keyboard.press("ArrowDown")
    assert tab.page.locator("#lens-table .leads").count() == n
    corner, below = (tab.page.locator(f"#lens-table tr:nth-child({row}) > :first-child").bounding_box()
                     for row in (1, 2))
    assert corner["x"] == below["x"] > 0  # the first column stays, its head, too


def test_choosing_computes_as_qwen3_does(tab, held, truth):
    """Many settings at many steps; at the borders of top-p and min-p, rounding may keep one candidate more or fewer."""
    rng, n, tokens = np.random.default_rng(0), held["about"]["n_prompt"], held["tokens"]["ids"]
    for _ in range(60):
        step = int(rng.integers(len(held["choosing"]["steps"])))
        settings = {"temperature": float(rng.choice([0, 0.3, 0.8, 1.5, 4])),
                    "top_k": int(rng.choice([0, 1, 5, 40, 100])),
                    "top_p": float(rng.choice([0.3, 0.5, 0.8, 0.95, 1])), "min_p": float(rng.choice([0, 0.02, 0.2])),
                    "repetition_penalty": float(rng.choice([0.7, 1, 1.3])),
                    "presence_penalty": float(rng.choice([-1, 0, 1.5])), "frequency_penalty": float(rng.choice([0, 1]))}
        sampling = qwen3.Sampling(**settings)
        penalized = qwen3.penalize(truth.logits[n - 1 + step].astype(np.float32), sampling, tokens[:n],
                                   tokens[n:n + step])
        ids, p = qwen3.candidates(penalized, sampling) if sampling.temperature else ([penalized.argmax()], [1.0])
        expected = dict(zip(map(int, ids), p))
        found = tab.page.evaluate("([i, s]) => candidates(i, s).filter(each => !each.cut)", [step, settings])
        probabilities = {each["id"]: each["p"] for each in found if each["id"] is not None}
        unlikely = sum(each["n"] * each["p"] for each in found if each["id"] is None)
        assert sum(probabilities.values()) + unlikely == pytest.approx(1, abs=1e-6)
        differing = {*expected} ^ {*probabilities}
        assert sum(expected.get(i, probabilities.get(i)) for i in differing) < 0.03 + unlikely * 1.2, settings
        for i in {*expected} & {*probabilities}:
            assert probabilities[i] == pytest.approx(expected[i], abs=0.03)


def test_penalties_with_tokens_that_repeat(browser, file):
    """The page's penalized() against penalize(), on a text in which tokens occur several times."""
    tab, rng = Tab(browser, file), np.random.default_rng(1)
    ids, n = rng.integers(0, 8, 24).tolist(), 9
    logits = rng.normal(size=10).astype(np.float32) * 5
    for settings in ({"repetition_penalty": 1.3}, {"presence_penalty": 0.7}, {"frequency_penalty": 0.4},
                     {"repetition_penalty": 0.8, "presence_penalty": -1.0, "frequency_penalty": 1.1}):
        sampling = qwen3.Sampling(**settings)
        for i in (0, 5, 15):
            shown = tab.page.evaluate("""([ids, n, logits, i, s]) => {
              tokens.ids = ids;
              about.n_prompt = n;
              return logits.map((logit, id) => penalized(logit, id, i, s)); }""",
                                      [ids, n, logits.tolist(), i, sampling.__dict__])
            np.testing.assert_allclose(shown, qwen3.penalize(logits, sampling, ids[:n], ids[n:n + i]), rtol=1e-5,
                                       atol=1e-6)
    tab.close(file)


def test_every_slider_of_choosing(tab, held):
    """What the table shows is what was computed, and moving a slider changes the setting it names."""
    tab.slide("drawn", 1)
    for name, value in {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.2,
                        "presence_penalty": 0.5, "frequency_penalty": -0.5}.items():
        tab.slide(f"set-{name}", value)
        assert tab.page.evaluate(f"state.{name}") == value
        assert float(tab.text(f"#set-{name}-is")) == value
        kept = tab.page.evaluate("candidates(state.drawn, state).filter(each => !each.cut)")
        n_kept = sum(each["n"] for each in kept)
        assert tab.text("#choice").startswith(f"{n_kept} of {held['about']['vocab_size']} tokens")
        rows = tab.page.locator("#candidates tr:not(.cut) td:nth-child(4)").all_text_contents()
        shown = [percents(row)[0] for row in rows]
        assert shown[:12] == pytest.approx([each["n"] * each["p"] for each in kept][:len(shown)][:12], abs=6e-4)
    tab.page.locator("#reset").click()
    settings = tab.page.evaluate("Object.fromEntries(Object.keys(choosing.settings).map(name => [name, state[name]]))")
    assert settings == held["choosing"]["settings"]


def test_the_luck_of_the_run_draws_its_tokens(tab, held):
    """Also after other settings and other luck, by the button that leads back."""
    for name in ("new-luck", "reset"):
        tab.page.locator(f"#{name}").click()
    for i, step in enumerate(held["choosing"]["steps"]):
        tab.slide("drawn", i)
        assert tab.page.evaluate("([i]) => first(candidates(i, choosing.settings)).id", [i]) == step["token"]
        assert tab.text("#choice").endswith("is drawn, as in the run.")
        assert tab.text("#candidates tr.lucky th").endswith(" ✓")


def test_the_source_is_a_click_away(tab, held):
    """Each panel names its functions; each step its line, which is marked and in view."""
    lines = held["sources"]["qwen3.py"].split("\n")
    for button in tab.page.locator("main section > .sources button").all():
        button.click()
        assert lines[held["lines"][button.text_content()][1] - 1] + "\n" == tab.text("#lines .marked")
        assert tab.page.locator("#lines .marked").is_visible()
        tab.page.keyboard.press("Escape")
    for i in range(0, len(held["way"]["steps"]), 5):
        tab.slide("way-step", i)
        tab.page.locator("#step-is button").click()
        assert lines[held["way"]["steps"][i]["line"] - 1] + "\n" == tab.text("#lines .marked")
        tab.page.locator("#source form button").click()
    assert not tab.page.locator("#source").is_visible()


def test_keyboard_alone(tab):
    """Tab reaches every slider, and arrow keys move it."""
    reached = set()
    for _ in range(400):
        tab.page.keyboard.press("Tab")
        name = tab.page.evaluate("document.activeElement.id")
        if name and tab.page.evaluate("document.activeElement.type") == "range":
            before = tab.page.evaluate("document.activeElement.value")
            tab.page.keyboard.press("ArrowRight")
            tab.page.keyboard.press("ArrowLeft")
            tab.page.keyboard.press("ArrowLeft")
            after = tab.page.evaluate("document.activeElement.value")
            last = tab.page.evaluate("+document.activeElement.max")
            assert before != after or last == 0 or float(after) == 0, name
            reached.add(name)
        if tab.page.evaluate("document.activeElement === document.body") and reached:
            break
    assert reached == {*tab.page.locator("input[type=range]").evaluate_all("all => all.map(each => each.id)")}


@pytest.mark.parametrize("kind", ["inspect", "inspect-hybrid"])
@pytest.mark.parametrize("width, scheme", SIZES)
def test_looks_and_accessibility(browser, file, hybrid, width, scheme, kind, screenshots):
    """Nothing is wider than the window; axe-core finds no violation, in an open source neither."""
    file = file if kind == "inspect" else hybrid[1]
    tab = Tab(browser, file, width, scheme)
    assert_looks(tab.page, width, screenshots / f"{kind}-{width}-{scheme}.png", full_page=True)
    if (width, scheme, kind) == (1440, "light", "inspect"):  # README's picture: the head that looks back most
        tab.page.locator("#copying button").first.click()
        top = tab.page.evaluate("document.querySelector('#attention h2').getBoundingClientRect().top + scrollY")
        place = {"x": 100, "y": top - 10, "width": 1240, "height": 840}
        tab.page.screenshot(path=screenshots / "inspect.png", full_page=True, clip=place)
    paper = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(map(int, re.findall(r"\d+", paper))) < 60 if scheme == "dark" else paper == "rgb(255, 255, 255)"
    tab.page.locator(".source").first.click()
    assert_looks(tab.page, width, screenshots / f"{kind}-source-{width}-{scheme}.png")
    tab.close(file)


@pytest.mark.parametrize("evil", [EVIL, "&lt;b&gt; &amp; \u202e\u200b\x07 @@CONTENTS@@", "Donaudampfschiff" * 12,
                                  "法国的首都是哪里" * 5])
def test_any_prompt_is_text(browser, tmp_path, demo, evil):
    file = tmp_path / "evil.html"
    file.write_text(qwen3_inspect.inspect(demo, PageOptions(evil, answer=AnswerOptions(max_new_tokens=3),
                                                            quantized=False)), "utf-8")
    tab = Tab(browser, file, 390)
    assert tab.text("#prompt") == evil and evil in tab.text("#wrapped")
    assert tab.page.locator("script").count() == 4 and tab.page.locator("img, main b").count() == 0
    assert "".join(tab.page.locator("#pieces .prompt").all_text_contents()).isprintable()
    assert tab.page.evaluate("document.documentElement.scrollWidth") == 390
    tab.close(file)


def test_other_models(browser, tmp_path, demo):
    """Random weights in another shape, without a template; an answer that ends at once; one layer, one head, one token;
    mixtures of experts."""
    shape = BASE | {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1, "eos_token_id": [1],
                    "vocab_size": demo.config.vocab_size}
    model = qwen3.load_model(make_random_model(shape, tmp_path / "model", "float32"))
    experts, both = (qwen3.load_model(make_random_model(config | {"vocab_size": demo.config.vocab_size},
                                                        tmp_path / name, "float32"))
                     for name, config in (("moe", MOE), ("both", HYBRID_MOE)))
    silent = replace(demo, eos_token_ids=tuple(range(demo.config.vocab_size)))
    short = PageOptions("ab", raw=True, answer=AnswerOptions(max_new_tokens=2), quantized=False)
    for i, (which, wish) in enumerate([(model, replace(short, prompt="a")), (silent, WISH), (experts, short),
                                       (both, short)]):
        file = tmp_path / f"{i}.html"
        file.write_text(qwen3_inspect.inspect(which, wish), "utf-8")
        tab = Tab(browser, file)
        for name in tab.page.locator("input[type=range]").evaluate_all("all => all.map(each => each.id)"):
            for end in ("max", "min"):
                tab.slide(name, tab.page.locator(f"#{name}").get_attribute(end))
        assert tab.text("#choice") and tab.text("#lens-says")
        assert not re.search("NaN|undefined", tab.page.locator("main").inner_text())
        tab.close(file)
