"""tests/tiny_seeing: a Qwen3.5 with a vision tower that demo/train/seeing.py has trained on drawn shapes."""
import itertools
import random

import pytest
from PIL import Image, ImageDraw

import qwen3
import qwen3_numba
from configs import ROOT

COLOURS = {"red": (200, 45, 50), "green": (50, 165, 70), "blue": (60, 80, 200)}
SHAPES = ("circle", "square", "triangle")
QUESTIONS = {"What is this?": "{} {}", "Which colour?": "{}", "Which shape?": "{1}"}


def drawing(rng, colour, shape):
    """None that it was trained on: places and sizes are whole pixels here, and the ground is grey."""
    side, grey = rng.randrange(64, 512), rng.randrange(205, 250)
    size = rng.randrange(side * 5 // 8, side * 7 // 8)
    x, y = rng.randrange(side - size), rng.randrange(side - size)
    image = Image.new("RGB", (side, side), (grey, grey, grey))
    draw, box, ink = ImageDraw.Draw(image), (x, y, x + size, y + size), COLOURS[colour]
    {"circle": lambda: draw.ellipse(box, ink), "square": lambda: draw.rectangle(box, ink),
     "triangle": lambda: draw.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], ink)}[shape]()
    return image


def answer(model, image, most, question, order):
    content = [{"type": "image", "image": image, "max_pixels": most}, {"type": "text", "text": question}][::order]
    return qwen3.chat(model, {"role": "user", "content": content}, temperature=0, max_new_tokens=20).finish().text


@pytest.mark.parametrize("engine", [qwen3.Engine, qwen3_numba.engine])
@pytest.mark.parametrize("order", [1, -1], ids=["the picture first", "the question first"])
def test_it_says_what_it_sees(engine, order):
    """9 kinds of pictures, one for each question, every second one in the usual size: 26 of 27 answers are right."""
    model, rng = qwen3.load_model(ROOT / "tests/tiny_seeing", engine()), random.Random(0)
    right = [answer(model, drawing(rng, colour, shape), most, question, order) == form.format(colour, shape)
             for (colour, shape, (question, form)), most in zip(itertools.product(COLOURS, SHAPES, QUESTIONS.items()),
                                                                itertools.cycle((64 * 64, None)))]
    assert len(right) == 27 and sum(right) >= 26
