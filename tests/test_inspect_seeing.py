"""Pictures in the page of qwen3_inspect.py: how large they are, what is kept of them, and what the page shows."""
import base64
import io
import re

import numpy as np
import pytest
from PIL import Image, ImageDraw

import qwen3
import qwen3_inspect
from configs import ROOT
from helpers import assert_looks, assert_one_line, message_of, run_main
from qwen3_lib.page import contents as panels
from qwen3_lib.generation.options import AnswerOptions
from qwen3_lib.page.contents import PageOptions, contents
from qwen3_lib.page.page import html
from test_inspect import unpacked
from test_inspect_browser import PIXEL, Tab, file, percents, tab  # noqa: F401 (fixtures)
from test_qwen3_vision import CONFIGS, make_seeing

COLOURS = Image.fromarray(np.random.default_rng(0).integers(0, 256, (12, 16, 3), np.uint8))
NOISE = COLOURS.resize((1600, 1200), 3)  # 36 x 27 tokens in qwen3.py


def shapes():
    """A red circle, a blue square and a green triangle."""
    image = Image.new("RGB", (384, 256), (232, 230, 224))
    draw = ImageDraw.Draw(image)
    draw.ellipse((30, 110, 150, 230), (205, 45, 45))
    draw.rectangle((240, 20, 350, 130), (55, 75, 205))
    draw.polygon([(210, 240), (330, 240), (270, 140)], (45, 160, 65))
    return image


def wish(*images, **options):
    return PageOptions("What is this?", answer=AnswerOptions(max_new_tokens=8, temperature=0, seed=0, **options),
                       quantized=False, images=images)


@pytest.fixture(scope="module")
def seeing():
    return qwen3.load_model(ROOT / "tests/tiny_seeing")


@pytest.fixture(scope="module")
def held(seeing):
    """Contents of a page of a model that was trained: 8 rows and 12 columns of tokens."""
    return contents(seeing, wish(shapes()))


@pytest.fixture(scope="module", params=CONFIGS)
def random_model(request, tmp_path_factory):
    return qwen3.load_model(make_seeing(CONFIGS[request.param], tmp_path_factory.mktemp("seeing")))


def shown(picture):
    """The pixels of a picture in the page."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(picture["url"].partition(",")[2]))).convert("RGB"))


def places(found, k=0):
    """Where the tokens of the k-th picture stand."""
    return np.flatnonzero(np.array(found["tokens"]["ids"]) == ~k)


def weights(found):
    """[layers, heads, n, n] from the page."""
    n, maps = len(found["tokens"]["ids"]), unpacked(found["attention"]["maps"])
    full = np.zeros((*maps.shape[:2], n, n))
    full[:, :, *np.tril_indices(n)] = maps
    return full


# ---- The contents of the page ----------------------------------------------------------------------------------------

def test_a_picture_among_the_tokens(held, seeing):
    [picture], tokens, at = held["pictures"], held["tokens"], places(held)
    assert (picture["rows"], picture["columns"], picture["full"]) == (8, 12, 96)
    assert len(at) == 96 and np.ptp(at) == 95 and {tokens["parts"][i] for i in at} == {"prompt"}
    assert [held["labels"][str(tokens["ids"][i])] for i in (at[0] - 1, at[0], at[-1] + 1)] == [
        "<|vision_start|>", "the picture", "<|vision_end|>"]
    assert np.array_equal(shown(picture), np.asarray(shapes()))  # PNG, which is smaller for a drawing
    question = [{"type": "image", "image": shapes()}, {"type": "text", "text": "What is this?"}]
    expected = qwen3.chat(seeing, {"role": "user", "content": question}, temperature=0, max_new_tokens=8)
    assert held["about"]["answer"] == expected.finish().text


def test_pictures_are_made_small_until_they_fit(random_model):
    """Two that differ and one that comes twice; their tokens and the text fill the page, and nothing goes beyond it."""
    found = contents(random_model, wish(NOISE, shapes(), NOISE))
    first, second, third = found["pictures"]
    room = panels.check_room(random_model, 0, 8, 2 * panels.PAGE_ROOM)
    n, used = [len(places(found, k)) for k in range(3)], len(found["tokens"]["ids"])
    assert used <= room + 8 and n[0] == n[2] == first["rows"] * first["columns"] == third["rows"] * third["columns"]
    assert n[1] == 96 and 0.8 * (room - used + sum(n)) / 3 < n[0] < first["full"] == 36 * 27
    expected = np.asarray(NOISE.resize((32 * first["columns"], 32 * first["rows"]), 3), float)
    assert first["url"].startswith("data:image/jpeg") and np.abs(shown(first) - expected).mean() < 8
    small = contents(random_model, wish(NOISE, max_pixels=2**14))["pictures"][0]
    assert small["rows"] * small["columns"] == small["full"] <= 16
    assert len(html(found)) < 3 * panels.PAGE_ROOM


def test_heads_that_look_at_a_shape(held):
    """tests/tiny_seeing has learned to see: a head of its first attention looks at the shapes, row by row."""
    [picture], at = held["pictures"], places(held)
    coloured = np.ptp(shown(picture).astype(int), axis=2).reshape(8, 32, 12, 32).mean(axis=(1, 3)) > 15
    asks = held["about"]["n_prompt"] - 1
    seen = weights(held)[0, 0, asks, at].reshape(8, 12)
    assert seen.sum() > 0.9 and seen[coloured].sum() > 0.9 * seen.sum() and coloured.mean() < 0.5


def test_positions_turn_the_hands(random_model):
    """q and k before RoPE, turned by time, row or column as the page says, make the attention weights of the page."""
    found = contents(random_model, wish(shapes()))
    attention, at, n = found["attention"], places(found), len(found["tokens"]["ids"])
    positions, half = np.array(attention["positions"]), random_model.config.rope_dim // 2
    assert positions[:at[0] + 1].tolist() == [[i] * 3 for i in range(at[0] + 1)]
    grid = np.indices((8, 12)).reshape(2, -1).T + at[0]
    assert np.array_equal(positions[at], np.column_stack([np.full(96, at[0]), grid]))
    assert positions[at[-1] + 1:].tolist() == [[at[0] + 12 + i] * 3 for i in range(n - at[-1] - 1)]
    assert attention["pairs"] == list(range(half)) and {*attention["axes"]} == {0, 1, 2}
    angles = positions[:, attention["axes"]] * np.array(attention["frequencies"])
    q, k = (x[..., :half] + 1j * x[..., half:] for x in (unpacked(attention[name]).astype(float) for name in "qk"))
    if random_model.config.rope_dim < random_model.config.head_dim:
        return  # a Qwen3.5 turns a part of each head, and the page has this part only
    q, k = (x * np.exp(1j * angles) for x in (q[1, 3], k[1, 3 * k.shape[1] // q.shape[1]]))
    scores = (q @ k.conj().T).real / np.sqrt(2 * half)
    scores = np.exp(np.where(np.tri(n), scores - scores.max(axis=1, keepdims=True), -np.inf))
    np.testing.assert_allclose(weights(found)[1, 3], scores / scores.sum(axis=1, keepdims=True), atol=2e-3)


# ---- The page in a browser -------------------------------------------------------------------------------------------

def test_what_each_head_sees(tab, held):
    """Shares in words and colours: the total of each head, the mean, the strongest squares, and one that is picked."""
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
        total, *best, framed = percents(tab.text("#seen-says"))
        assert [total, *best, framed] == pytest.approx(
            [seen[head].sum(), *np.sort(seen[head])[:-4:-1], seen[head][30]], abs=2e-3)
        assert "In the frame, row 2, column 6: " in tab.text("#seen-says")
        assert percents(tab.text("#seen-scale")) == pytest.approx(
            [0, seen.max() / 4, seen.max()], abs=1e-3)
        for canvas, shares in (("#seen-pictures figure:nth-child(2) canvas", seen.mean(axis=0)),
                               ("#seen-pictures figure:nth-child(3) canvas", seen[head]),
                               (f"#seen .heads button:nth-child({head + 1}) canvas", seen[head])):
            for place in (int(shares.argmax()), int(shares.argmin()), 17):
                opacity = tab.page.evaluate(PIXEL, [canvas, place // 12, place % 12])[3]
                assert opacity == pytest.approx(230 * np.sqrt(shares[place] / seen.max()), abs=3)
    tab.slide("seen-token", 0)
    assert tab.text("#seen-says") == "0 “<|im_start|>” comes before the picture, so it can't look at it."


def test_tokens_of_a_picture_are_picked(tab, held):
    """By a click and by arrow keys: in the list of tokens, which shows one picture, and in the large picture."""
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
    probabilities = unpacked(held["lens"]["probabilities"])
    assert percents(tab.text("#lens-says").split(". The final")[0]) == pytest.approx(
        probabilities[-1, at[0] + 67], abs=6e-4)
    tab.page.locator("#lens-table [aria-selected]").focus()
    tab.page.keyboard.press("ArrowRight")
    assert tab.page.evaluate("state.token") == at[-1] + 1
    large = tab.page.locator("#seen .places").nth(2)
    large.press("Enter")
    large.press("ArrowDown")
    assert tab.page.evaluate("state.key") == at[0] + 12 and tab.page.evaluate("state.token") == at[-1] + 1
    assert "“<|vision_end|>” looks at: the picture" in tab.text("#looks-at")


def test_hands_turn_by_time_row_or_column(tab, held):
    attention, at, asks = held["attention"], places(held), held["about"]["n_prompt"] - 1
    tab.slide("asks", asks)
    tab.slide("key", at[67])  # row 5, column 7
    for pair, axis in enumerate(attention["axes"]):
        tab.slide("pair", pair)
        assert tab.text("#pair-is").endswith(f" by {('time', 'row', 'column')[axis]}")
        positions = at[0] + 12 + asks - at[-1] - 1, at[0] + (0, 5, 7)[axis]
        degrees = re.findall(r" by (-?[\d.]+)°", tab.text("#hands-say"))
        expected = [10000 ** (-pair / 8) * each for each in (*positions, positions[0] - positions[1])]
        assert [*map(float, degrees)] == pytest.approx(np.degrees(expected), abs=0.06)


@pytest.mark.parametrize("width, scheme", [(400, "dark"), (1280, "light")])
def test_looks_and_accessibility(browser, file, held, width, scheme, screenshots):
    """As of other pages; the picture of README is taken here."""
    tab = Tab(browser, file, width, scheme)
    tab.slide("asks", held["about"]["n_prompt"] - 1)
    tab.page.locator("#seen .heads button").nth(0).click()
    assert_looks(tab.page, width, screenshots / f"inspect-seeing-{width}-{scheme}.png", full_page=True)
    tab.page.locator("#seen").screenshot(path=screenshots / f"inspect-picture-{width}.png")  # README's: 1280
    tab.close(file)


def test_every_slider_with_several_pictures(browser, tmp_path, random_model):
    file = tmp_path / "page.html"
    file.write_text(qwen3_inspect.inspect(random_model, wish(NOISE, shapes(), NOISE)), "utf-8")
    tab = Tab(browser, file)
    for name in tab.page.locator("input[type=range]").evaluate_all("all => all.map(each => each.id)"):
        for end in ("max", "min"):
            tab.slide(name, tab.page.locator(f"#{name}").get_attribute(end))
    assert tab.page.locator("#seen figcaption").count() == 9 and "picture 2" in tab.text("#seen-says")
    assert not re.search("NaN|undefined", tab.page.locator("main").inner_text())
    tab.close(file)


# ---- The command -----------------------------------------------------------------------------------------------------

def test_command(tmp_path, capfd):
    shapes().save(tmp_path / "shapes.png")
    status, out, err = run_main(
        capfd, "--model", ROOT / "tests/tiny_seeing", "--image", tmp_path / "shapes.png", "--image",
        tmp_path / "shapes.png", "What is this?", "--max-pixels", 2**14, "-n", 2, "--out", tmp_path / "page.html",
        main=qwen3_inspect.main)
    page = (tmp_path / "page.html").read_text("utf-8")
    assert (status, err) == (0, "") and page.count("data:image/png") == 2 and '"kl":{"int8":' in page
    NOISE.save(tmp_path / "noise.png")
    status, out, err = run_main(
        capfd, "--model", ROOT / "tests/tiny_seeing", "--image", tmp_path / "noise.png", "What is this?", "-n", 2,
        "--no-quantized", "--out", tmp_path / "page.html", main=qwen3_inspect.main)
    assert status == 0
    assert_one_line(err, "room for", "972 that qwen3.py makes")


@pytest.mark.parametrize("args, words", [
    (["--image", "shapes.png"], ["demo", "can't see"]),
    (["--image", "missing.png", "--model", "./nowhere"], ["missing.png", "no such file"]),  # before the model is loaded
    (["--image", "shapes.png", "--raw"], ["raw", "--image"]),
    (["--image", "shapes.png", "--model", ROOT / "tests/tiny_seeing", "--max-pixels", 0], ["--max-pixels"])])
def test_bad_input_is_one_line(args, words, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shapes().save(tmp_path / "shapes.png")
    status, out, err = run_main(capfd, "What is this?", *args, "--no-quantized", main=qwen3_inspect.main)
    assert status == 1 and not out and [*tmp_path.iterdir()] == [tmp_path / "shapes.png"]
    assert_one_line(err, *words)


def test_a_text_that_names_a_picture_is_refused(seeing):
    assert "image_pad" in message_of(contents, seeing, PageOptions("<|image_pad|>", images=[shapes()]))
