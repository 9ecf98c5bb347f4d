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
from qwen3_lib.page.page import html
from test_inspect import EVIL, NOISE, about, places, seeing, shapes, unpacked, weights  # noqa: F401 (a fixture)
from test_qwen3_moe import MOE
from test_qwen3_vision import CONFIGS, make_seeing

SETTINGS = {"temperature": 1.2, "top_k": 40, "top_p": 0.95}
WISH = PageOptions("The capital of France is", answer=AnswerOptions(max_new_tokens=10, seed=2, **SETTINGS))
PIXEL = """([canvas, i, j]) => {
  const copy = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
  copy.drawImage(document.querySelector(canvas), -j, -i);
  return [...copy.getImageData(0, 0, 1, 1).data]; }"""  # of a picture: row i, column j


def page_of(found, folder):
    """(the contents of a page, its file)"""
    file = folder / "page.html"
    file.write_text(html(found), "utf-8")
    return found, file


@pytest.fixture(scope="module")
def plain(demo, tmp_path_factory):
    return page_of(contents(demo, WISH), tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """Of a Qwen3.5; a pixel of a state's picture is the largest of 2 x 2 numbers."""
    folder, config = tmp_path_factory.mktemp("hybrid"), HYBRID | {"linear_value_head_dim": 40, "num_hidden_layers": 8}
    make_random_model(config | {"vocab_size": VOCABULARY}, folder, "float32")
    return page_of(contents(qwen3.load_model(folder), WISH), folder)


@pytest.fixture(scope="module")
def pictured(seeing, tmp_path_factory):  # noqa: F811
    """Of a model that was trained to see; the picture has 8 rows and 12 columns of tokens."""
    return page_of(contents(seeing, about(shapes())), tmp_path_factory.mktemp("pictured"))


@pytest.fixture(scope="module")
def truth(demo, plain):
    return oracle(demo, np.array(plain[0]["tokens"]["ids"]))


class Tab:
    """A page that was opened; it fails the test if the browser complained or asked for anything but the file."""

    def __init__(self, browser, file, width=1440, scheme="light"):
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page, self.file, self.requests = self.context.new_page(), file, []
        self.complaints = complaints_of(self.page)
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(file.as_uri())

    def close(self):
        self.context.close()
        assert self.complaints == [] and self.requests == [self.file.as_uri()]

    def text(self, place):
        return self.page.locator(place).text_content()

    def slide(self, name, value):
        """Moves a slider as a user's hand does."""
        self.page.locator(f"#{name}").evaluate(
            "(input, value) => { input.value = value; input.dispatchEvent(new Event('input')); }", str(value))

    def slide_all(self):
        """Moves each slider to both ends."""
        for name in self.page.locator("input[type=range]").evaluate_all("all => all.map(each => each.id)"):
            for end in ("max", "min"):
                self.slide(name, self.page.locator(f"#{name}").get_attribute(end))
        assert self.text("#choice") and self.text("#lens-says")
        assert not re.search("NaN|undefined", self.page.locator("main").inner_text())

    def charted(self, chart):
        """The numbers given to a chart: its edges, then each series without the last value, which is there twice."""
        edges, *series = self.page.evaluate("id => charts[id].data", chart)
        assert all(values[-1] == values[-2] for values in series)
        return np.array(edges), *(np.array(values[:-1], float) for values in series)


def opened(kind):
    """A fixture: the page of this kind, opened."""
    @pytest.fixture
    def tab(browser, request):
        tab = Tab(browser, request.getfixturevalue(kind)[1])
        yield tab
        tab.close()
    return tab


tab, hybrid_tab, pictured_tab = map(opened, ("plain", "hybrid", "pictured"))


def percents(text):
    """The numbers before "%" in a text, as shares."""
    return [float(number) / 100 for number in re.findall(r"([\d.]+) %", text)]


def number(text):
    """1.23 MB -> 1230000."""
    value, unit = text.split(" ")
    return float(value) * {"G": 1e9, "M": 1e6, "k": 1e3, "m": 1e-3, "µ": 1e-6}.get(unit[0], 1)


def test_tokens(tab, plain):
    """The page opens on the first word of the answer; a token that is picked is shown in all panels."""
    held = plain[0]
    assert "“France”" in tab.text("#piece") and "written by the model" in tab.text("#piece")
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


def test_the_way(tab, plain):
    """The words, the costs and the length of the vector at steps of each kind, and both charts."""
    held = plain[0]
    streams, norms, steps = unpacked(held["way"]["streams"]), unpacked(held["way"]["norms"]), held["way"]["steps"]
    chosen = [i for i in range(len(steps)) if i < 2 or i % 5 == 0 or i >= len(steps) - 2]  # 5: another kind each time
    assert {(steps[i]["function"], steps[i]["weight"]) for i in chosen} == {(s["function"], s["weight"]) for s in steps}
    for i in chosen:
        step, token = steps[i], i % len(held["tokens"]["ids"])
        tab.slide("way-step", i)
        tab.slide("way-token", token)
        words = held["words"].get(step["weight"], held["words"].get(step["function"]))
        assert f"{words}. Formula: {held['formulas'][step['function']]} " in tab.text("#step-is")
        shown = re.search(r"Length at token (\d+): (\S+)", tab.text("#length"))
        assert (shown is None) == (step["function"] == "rope_tables")
        assert shown is None or (int(shown[1]), float(shown[2])) == (token, pytest.approx(norms[i, token], rel=1e-3))
        np.testing.assert_allclose(tab.charted("along")[1], norms[i], rtol=1e-6)
        np.testing.assert_allclose(tab.charted("stream")[1], streams[:, token], rtol=1e-6)
        reached = min(step["layer"] + 1, len(streams) - 1)
        assert float(tab.text("#stream-is").split(": ")[1]) == pytest.approx(streams[reached, token], rel=6e-3)
        cells = tab.page.locator("#step td").all_text_contents()[1:]  # rows of (prefill, decode)
        for column, costs in enumerate((step["prefill"], step["decode"])):
            shape, *cost, share = cells[column::2]
            rate = costs["read"] / costs["seconds"]
            assert shape == " × ".join(map(str, costs["shape"]))
            assert [*map(number, cost)] == pytest.approx(
                [costs["read"], costs["operations"], costs["seconds"], rate], rel=0.006)
            assert percents(share)[0] == pytest.approx(rate / held["way"]["bandwidth"], abs=6e-4)


def test_attention(tab, plain, truth, demo):
    n, c = len(plain[0]["tokens"]["ids"]), demo.config
    frames = tab.page.locator("#heads fieldset")
    assert (frames.count(), tab.page.locator("#heads button").count()) == (c.num_key_value_heads, c.num_attention_heads)
    for layer in range(c.num_hidden_layers):
        i, token = (layer * 5 + 3) % c.num_attention_heads, (7 * layer + 2) % n
        tab.slide("layer", layer)
        tab.slide("asks", token)
        tab.page.locator("#heads button").nth(i).click()
        expected = truth.attention[layer][i][token]
        said = tab.text("#looks-at").split(" looks at: ")[1]
        shown = {int(at): float(share) / 100 for at, share in re.findall(r"(\d+) “.*?” ([\d.]+) %", said)}
        assert len(shown) == min(5, token + 1) and sum(shown.values()) >= np.sort(expected)[-5:].sum() - 5e-3
        assert shown == {at: pytest.approx(expected[at], abs=2e-3) for at in shown}
        shade = tab.page.evaluate(PIXEL, ["#map", token, int(expected.argmax())])
        assert shade[3] == 255 and shade[2] == pytest.approx(255 + np.sqrt(expected.max()) * (20 - 255), abs=3)  # --map
        score = float(re.search(r"previous-token score (\d\.\d+)", tab.text("#head-says"))[1])
        assert score == pytest.approx(np.mean([truth.attention[layer][i][t, t - 1] for t in range(1, n)]), abs=2e-3)


def test_delta_nets(hybrid_tab, hybrid):
    """Each layer's charts and pictures; beside them what a Qwen3.5 adds to the other panels."""
    tab, found = hybrid_tab, hybrid[0]
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
    assert (found["cache"]["per_position"], found["cache"]["states"]) == (size, bytes_)
    assert tab.charted("timeline")[1] == pytest.approx(
        [each["length"] * size + bytes_ for each in found["cache"]["passes"]])
    tab.slide("way-step", [step["function"] for step in found["way"]["steps"]].index("delta_rule_in_chunks"))
    tab.page.locator("#step-is button").click()
    assert "first, state = rule(" in tab.text("#lines .marked")


def test_hands(tab, plain, truth, demo):
    """The share of a pair of dimensions in q·k, before and after RoPE, and the angle."""
    pairs, half = plain[0]["attention"]["pairs"], demo.config.head_dim // 2
    group = demo.config.num_attention_heads // demo.config.num_key_value_heads
    for name, value in (("layer", 1), ("asks", 9), ("key", 4)):
        tab.slide(name, value)
    for i, pair in enumerate(pairs * 2):
        head = group + i // len(pairs)  # two of the heads on the second key head
        tab.page.locator("#heads button").nth(head).click()
        tab.slide("pair", i % len(pairs))
        q, k = (complex(x[pair], x[pair + half]) for x in (truth.q[1][head][9], truth.k[1][1][4]))
        frequency = demo.config.rope_theta ** (-2 * pair / demo.config.head_dim)
        shown = [float(re.search(r"-?[\d.]+(e-\d+)?$", text)[0]) for text in
                 tab.page.locator("#hands figcaption").all_text_contents()]
        products = np.array([q * np.conj(k), q * np.conj(k) * np.exp(5j * frequency)])
        assert shown == pytest.approx(products.real, abs=1e-2 * abs(q * k) + 1e-6)
        angles = [float(angle) for angle in re.findall(r"(-?[\d.]+)° from key to query", tab.text("#hands"))]
        assert np.exp(1j * np.radians(angles)) == pytest.approx(products / abs(q * k), abs=1e-2)
        degrees = float(re.search(r"changes by (-?[\d.]+)°", tab.text("#hands-say"))[1])
        assert degrees == pytest.approx(np.degrees(5 * frequency), abs=0.06)
    tab.slide("key", 12)
    assert "in the future" in tab.text("#hands-say")


def test_logit_lens(tab, plain, demo):
    held = plain[0]
    n, layers = len(held["tokens"]["ids"]), demo.config.num_hidden_layers
    ids = np.reshape(held["lens"]["ids"]["values"], held["lens"]["ids"]["shape"])
    cells = tab.page.locator("#lens-table [role=gridcell][tabindex]")
    assert cells.count() == n * (layers + 1) and tab.page.locator("#lens-table .leads").count() == n
    cells.nth(0).click()
    for layer in range(layers + 1):
        for _ in range(2):
            tab.page.keyboard.press("ArrowRight")
        token, said = min(2 * (layer + 1), n - 1), tab.text("#lens-says")
        assert percents(said.split(". The final")[0]) == pytest.approx(
            unpacked(held["lens"]["probabilities"])[layer, token], abs=6e-4)
        label = held["labels"][str(ids[layer, token, 0])]
        assert tab.page.locator(":focus").text_content() == label and f": “{label}”" in said
        tab.page.keyboard.press("ArrowDown")
    corner, below = (tab.page.locator(f"#lens-table tr:nth-child({row}) > :first-child").bounding_box()
                     for row in (1, 2))
    assert corner["x"] == below["x"] > 0  # the first column stays, its head, too


def test_choosing(tab, plain):
    """Each setting of each token; test_inspect.py compares the numbers."""
    held = plain[0]
    for i, step in enumerate(held["choosing"]["steps"]):
        tab.slide("drawn", i)
        logits, shares, p = (unpacked(step[name]) for name in ("logits", "shares", "probabilities"))
        for setting, words in enumerate(held["choosing"]["settings"]):
            tab.slide("setting", setting)
            assert tab.text("#setting-is") == words
            drawn, was = (f"“{held['labels'][str(step['draws'][k])]}”" for k in (setting, 0))
            said = f"{drawn} is drawn, as in the run." if drawn == was else \
                f"{drawn} would be drawn; the run drew {was}."
            kept = step["kept"][setting]
            assert tab.text("#choice") == f"{kept} of {held['about']['vocab_size']} tokens stay. {said}"
            assert tab.text("#candidates tr.lucky th").removesuffix(" ✓") == drawn
            rows = tab.page.locator("#candidates tr").all()[1:]
            likely = np.argsort(-logits[setting], kind="stable")[:12]
            assert 12 <= len(rows) <= 14
            for row, j in zip(rows, likely) if setting == i % len(held["choosing"]["settings"]) else ():
                token, *numbers = row.locator("th, td").all_text_contents()
                assert token.removesuffix(" ✓") == f"“{held['labels'][str(step['ids'][j])]}”"
                assert float(numbers[0]) == pytest.approx(logits[setting, j], abs=6e-3)
                assert percents("".join(numbers[1:])) == pytest.approx([p[j], shares[setting, j]], abs=6e-4)
                assert ("cut" in row.get_attribute("class")) == (shares[setting, j] == 0)


def test_the_source_is_a_click_away(tab, plain):
    """Each panel names its functions; each step its line, which is marked and in view."""
    held = plain[0]
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


# ---- Pictures --------------------------------------------------------------------------------------------------------

def test_what_each_head_sees(pictured_tab, pictured):
    """Shares in words and colours: the total of each head, the mean, the strongest squares, and one that is picked."""
    tab, held = pictured_tab, pictured[0]
    maps, at = weights(held), places(held)
    for layer, head, asks in ((0, 1, at[-1] + 1), (1, 0, len(held["tokens"]["ids"]) - 1), (1, 1, at[40])):
        tab.slide("seen-layer", layer)
        tab.slide("seen-token", asks)
        tab.page.locator("#seen .heads button").nth(head).click()
        tab.slide("key", at[30])
        seen = maps[layer, :, asks, at[0]:at[-1] + 1]
        captions = [percents(text)[0] for text in tab.page.locator("#seen .heads button").all_text_contents()]
        captions += [percents(text)[0] for text in tab.page.locator("#seen figcaption").all_text_contents()[1:]]
        assert captions == pytest.approx([*seen.sum(axis=1), seen.sum(axis=1).mean(), seen[head].sum()], abs=2e-3)
        assert percents(tab.text("#seen-says")) == pytest.approx(
            [seen[head].sum(), *np.sort(seen[head])[:-4:-1], seen[head][30]], abs=2e-3)
        assert "In the frame, row 2, column 6: " in tab.text("#seen-says")
        assert percents(tab.text("#seen-scale")) == pytest.approx([0, seen.max() / 4, seen.max()], abs=1e-3)
        for canvas, shares in (("#seen-pictures figure:nth-child(2) canvas", seen.mean(axis=0)),
                               ("#seen-pictures figure:nth-child(3) canvas", seen[head]),
                               (f"#seen .heads button:nth-child({head + 1}) canvas", seen[head])):
            for place in (int(shares.argmax()), int(shares.argmin()), 17):
                opacity = tab.page.evaluate(PIXEL, [canvas, place // 12, place % 12])[3]
                assert opacity == pytest.approx(230 * np.sqrt(shares[place] / seen.max()), abs=3)
    tab.slide("seen-token", 0)
    assert tab.text("#seen-says") == "0 “<|im_start|>” comes before the picture, so it can't look at it."


def test_tokens_of_a_picture_are_picked(pictured_tab, pictured):
    """By a click and by arrow keys: in the list of tokens, which shows one picture, and in the large picture."""
    tab, held = pictured_tab, pictured[0]
    at, n = places(held), len(held["tokens"]["ids"])
    pieces = tab.page.locator("#pieces > button")
    assert pieces.count() == n - 95 and tab.page.locator("#looks > span").count() == n - 95
    picture = pieces.nth(int(at[0]))
    box = picture.locator(".seen").bounding_box()
    tab.page.mouse.click(box["x"] + 7.5 / 12 * box["width"], box["y"] + 5.5 / 8 * box["height"])
    assert tab.page.evaluate("state.token") == at[0] + 5 * 12 + 7 and picture.get_attribute("aria-pressed") == "true"
    for key, row, column in (("Left", 5, 6), ("Up", 4, 6), ("Right", 4, 7), ("Down", 5, 7)):
        tab.page.keyboard.press(f"Arrow{key}")
        assert f"(the picture, row {row}, column {column})" in tab.text("#piece")
        assert f"time {at[0]}, row {at[0] + row}, column {at[0] + column}" in tab.text("#piece")
        assert picture.get_attribute("aria-label").endswith(f"row {row}, column {column}")
    column = tab.page.locator("#lens-table th[scope=col]").nth(int(at[0]))
    assert column.text_content() == f"{at[0] + 67} (the picture, row 5, column 7)"
    assert percents(tab.text("#lens-says").split(". The final")[0]) == pytest.approx(
        unpacked(held["lens"]["probabilities"])[-1, at[0] + 67], abs=6e-4)
    tab.page.locator("#lens-table [aria-selected]").focus()
    tab.page.keyboard.press("ArrowRight")
    assert tab.page.evaluate("state.token") == at[-1] + 1
    large = tab.page.locator("#seen .places").nth(2)
    large.press("Enter")
    large.press("ArrowDown")
    assert tab.page.evaluate("[state.key, state.token]") == [at[0] + 12, at[-1] + 1]
    assert "“<|vision_end|>” looks at: the picture" in tab.text("#looks-at")


# ---- All pages -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["plain", "hybrid", "pictured"])
@pytest.mark.parametrize("width, scheme", [(390, "dark"), (1440, "light")])
def test_looks_and_accessibility(browser, request, width, scheme, kind, screenshots):
    """Nothing is wider than the window; axe-core finds no violation, in an open source neither."""
    found, file = request.getfixturevalue(kind)
    tab = Tab(browser, file, width, scheme)
    if kind == "pictured":
        tab.slide("asks", found["about"]["n_prompt"] - 1)
        tab.page.locator("#seen .heads button").nth(0).click()
        tab.page.locator("#seen").screenshot(path=screenshots / f"inspect-picture-{width}.png")  # README's: 1440
    assert_looks(tab.page, width, screenshots / f"inspect-{kind}-{width}-{scheme}.png", full_page=True)
    if (width, kind) == (1440, "plain"):  # README's picture: the head that looks back most
        tab.page.locator("#copying button").first.click()
        top = tab.page.evaluate("document.querySelector('#attention h2').getBoundingClientRect().top + scrollY")
        place = {"x": 100, "y": top - 10, "width": 1240, "height": 840}
        tab.page.screenshot(path=screenshots / "inspect.png", full_page=True, clip=place)
    paper = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(map(int, re.findall(r"\d+", paper))) < 60 if scheme == "dark" else paper == "rgb(255, 255, 255)"
    tab.page.locator(".source").first.click()
    assert_looks(tab.page, width, screenshots / f"inspect-{kind}-source-{width}-{scheme}.png")
    tab.close()


@pytest.mark.parametrize("evil", [EVIL, "&lt;b&gt; &amp; \u202e\u200b\x07 @@CONTENTS@@", "Donaudampfschiff" * 12,
                                  "法国的首都是哪里" * 5])
def test_any_prompt_is_text(browser, tmp_path, demo, evil):
    wish = PageOptions(evil, answer=AnswerOptions(max_new_tokens=3))
    tab = Tab(browser, page_of(contents(demo, wish), tmp_path)[1], 390)
    assert tab.text("#prompt") == evil and evil in tab.text("#wrapped")
    assert tab.page.locator("script").count() == 4 and tab.page.locator("img, main b").count() == 0
    assert "".join(tab.page.locator("#pieces .prompt").all_text_contents()).isprintable()
    assert tab.page.evaluate("document.documentElement.scrollWidth") == 390
    tab.close()


SHORT = PageOptions("ab", raw=True, answer=AnswerOptions(max_new_tokens=2))
ONE = BASE | {"num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1, "eos_token_id": [1]}


@pytest.mark.parametrize("kind", ["one layer, one head, one token", "an answer that ends at once", "experts",
                                  "hybrid experts", "pictures, VL", "pictures, 3.5"])
def test_every_slider_of_other_models(browser, tmp_path, demo, kind):
    """Most have random weights, and no template."""
    wish = SHORT
    if kind.startswith("pictures"):
        config, wish = CONFIGS[kind.partition(", ")[2]], about(NOISE, shapes(), NOISE)
        model = qwen3.load_model(make_seeing(config, tmp_path / "model"))
    elif kind == "an answer that ends at once":
        model, wish = replace(demo, eos_token_ids=tuple(range(demo.config.vocab_size))), WISH
    else:
        config, wish = {"experts": (MOE, SHORT), "hybrid experts": (HYBRID_MOE, SHORT)}.get(
            kind, (ONE, replace(SHORT, prompt="a")))
        model = qwen3.load_model(make_random_model(config | {"vocab_size": VOCABULARY}, tmp_path / "model", "float32"))
    file = tmp_path / "page.html"
    file.write_text(qwen3_inspect.inspect(model, wish), "utf-8")
    tab = Tab(browser, file)
    tab.slide_all()
    if wish.images:
        assert tab.page.locator("#seen figcaption").count() == 9 and "picture 2" in tab.text("#seen-says")
    tab.close()
