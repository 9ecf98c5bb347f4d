"""What the bundled model can do, measured by greedy decoding through qwen3.py on two kinds of questions:

    in-family   wordings of the training text, with values that were not trained on (names, pairs of numbers, ...)
    held-out    wordings, tools and schemas that training never saw (heldout.py)

    python demo/train/evaluate.py

prints one line per skill, then up to ten failures of each. Needs `pip install -e ".[train]"`.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from loop import ROOT, Score

sys.path.insert(1, str(ROOT))

import qwen3  # noqa: E402
from qwen3_batch import generate_batch  # noqa: E402
from tokenizer_utils import Answer, parse_answer  # noqa: E402

import corpus  # noqa: E402
import memory  # noqa: E402
import stories  # noqa: E402
from facts import fact  # noqa: E402
from heldout import HELD_OUT, HELD_OUT_CHAT, HELD_OUT_TOOLS  # noqa: E402
from questions import CHAT, QUESTIONS  # noqa: E402
from sums import beyond_sums, sum_turn  # noqa: E402
from talk import chat, unknown  # noqa: E402
from tokenizer import called  # noqa: E402
from toolbox import TOOLS, Tool  # noqa: E402
from tools import tool_use  # noqa: E402
from turns import Turn, language  # noqa: E402

MAX_TOKENS = 256
BATCH = 16


@dataclass
class Family:
    """A stock of wordings and tools that questions are drawn from."""

    book: dict[str, list[str]]
    chat: dict[str, list[str]]
    tools: list[Tool]
    invented: float  # the share of tools made up of random words


IN_FAMILY = Family(QUESTIONS, CHAT, TOOLS, 0.15)
HELD_OUT_FAMILY = Family(HELD_OUT, HELD_OUT_CHAT, HELD_OUT_TOOLS, 0.0)


@dataclass
class Case:
    """A conversation in which the assistant is to speak, and what makes its answer right."""

    messages: list[dict]
    is_right: Callable[[Answer], bool]
    answer: str  # a right one, as a model would write it
    tools: list[dict] | None = None
    enable_thinking: bool | None = None
    then: Callable[[Answer], "Case"] | None = None  # how the conversation goes on after a right answer


Draw = Callable[[random.Random, Family], Case]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def says(content: str, value: str) -> bool:
    """The value stands there whole, not as a part of a longer word or number."""
    return re.search(rf"(?<![A-Za-z0-9.]){re.escape(value)}(?![A-Za-z0-9])", content) is not None


def single(turn: Turn, enable_thinking: bool | None = None, tools: list[dict] | None = None) -> Case:
    return Case([user(turn.question)],
                lambda answer: any(says(answer.content, text) for text in turn.expected) and not answer.tool_calls,
                turn.answer, tools, enable_thinking)


def facts(lang: str | None, enable_thinking: bool | None = None) -> Draw:
    return lambda rng, family: single(fact(rng, family.book, lang), enable_thinking)


def sums(plus: bool | None, largest: int, enable_thinking: bool | None = None) -> Draw:
    return lambda rng, family: single(sum_turn(rng, family.book, largest, True, plus=plus), enable_thinking)


def three_digits_at_once(rng: random.Random, family: Family) -> Case:
    while not re.match(r"\d{3} . \d{3} ", (turn := sum_turn(rng, family.book, 1000, True)).answer):
        pass
    return single(turn, False)


def remembering(rng: random.Random, family: Family) -> Case:
    """One to three things told, perhaps corrected, up to ten turns in all; every answer on the way is the model's."""
    lang = language(rng)
    things = {thing.key(): thing for thing in (memory.memory(rng, lang) for _ in range(rng.choice([1, 2, 3])))}
    thing = next(iter(things.values()))
    said = [memory.told(rng, family.book, each, "tell").question for each in things.values()]
    said += [corpus.filler(rng).question for _ in range(rng.choice([0, 1, 2, 4, 5]))]
    if rng.random() < 0.3:
        thing.fill["o"], thing.fill["m"] = \
            thing.fill["m"], memory.value_of(rng, thing.kind, thing.fill["n"], bool(lang))
        said.append(memory.told(rng, family.book, thing, "fix").question)
    last = memory.asked(rng, family.book, thing)
    return spoken([], [*said, last.question], last, rng.choice([None, False]))


def spoken(messages: list[dict], questions: list[str], last: Turn, enable_thinking: bool | None) -> Case:
    """The first question; whatever is answered, the next ones follow. The last answer must hold the value."""
    messages = [*messages, user(questions[0])]
    if len(questions) == 1:
        return Case(messages, lambda answer: says(answer.content, last.expected[0]), last.answer,
                    enable_thinking=enable_thinking)
    return Case(messages, lambda answer: True, "OK.", enable_thinking=enable_thinking, then=lambda answer: spoken(
        [*messages, {"role": "assistant", "content": answer.content}], questions[1:], last, enable_thinking))


def never_told(rng: random.Random, family: Family) -> Case:
    return single(memory.never_told(rng, family.book, memory.memory(rng, language(rng))))


def tool_call(rng: random.Random, family: Family) -> Case:
    """Right when the calls are the expected ones, and the answer after them says what the tools returned."""
    use = tool_use(rng, family.tools, family.invented)
    thinking = rng.choice([None, False])

    def after_call(answer: Answer) -> Case:
        calling = use.calling() | {"reasoning_content": answer.reasoning or ""}
        messages = [use.asking(), calling, *({"role": "tool", "content": response} for response in use.responses)]
        return Case(messages, lambda last: all(text in last.content for text in use.expected), use.answer, use.offered,
                    thinking)

    calls = called(use.calling()["tool_calls"])
    return Case([use.asking()], lambda answer: answer.tool_calls == use.calls, calls, use.offered, thinking, after_call)


def no_tool_needed(rng: random.Random, family: Family) -> Case:
    use = tool_use(rng, family.tools, family.invented)
    return single(corpus.unhelped(rng, use), tools=use.offered)


FRAME_WORDS = set(re.findall(r"[a-z]+", " ".join(
    [*stories.PLACES, *stories.MOODS, *stories.GOALS, *stories.EVENTS, *stories.ENDINGS, *stories.HELPERS,
     "once upon a time there was were in an the and"]).lower()))


def story(lang: str) -> Draw:
    """Right when it names its subject, has no word from elsewhere, and ends as stories end."""

    def draw(rng: random.Random, family: Family) -> Case:
        turn = stories.story(rng, family.book, lang)
        subject = turn.expected[0]
        known = FRAME_WORDS | set(re.findall(r"\w+", turn.question.lower() + " " + turn.answer.lower()))

        def is_right(answer: Answer) -> bool:
            text = answer.content
            return says(text, subject) and text.endswith("故事讲完了。" if lang else "The end.") and (
                bool(lang) or set(re.findall(r"\w+", text.lower())) <= known)

        return Case([user(turn.question)], is_right, turn.answer)

    return draw


def outside(lang: str) -> Draw:
    return lambda rng, family: single(unknown(rng, family.book, lang) if rng.random() < 0.85
                                      else beyond_sums(rng, family.book, lang))


SKILLS: dict[str, tuple[Draw, int]] = {  # and how many times the sample's size is asked for
    "facts about countries, English": (facts(""), 2),
    "facts about countries, Chinese": (facts("_zh"), 2),
    "facts, both languages, --no-think": (facts(None, False), 1),
    "addition up to three digits": (sums(True, 1000), 1),
    "subtraction up to three digits": (sums(False, 1000), 1),
    "sums of one and two digits, --no-think": (sums(None, 100, False), 2),
    "sums of three digits, --no-think": (three_digits_at_once, 1),
    "remembers what it was told": (remembering, 2),
    "was not told": (never_told, 1),
    "calls the right tools, uses their answers": (tool_call, 2),
    "needs no tool though there is one": (no_tool_needed, 1),
    "tells a story about the subject, English": (story(""), 1),
    "tells a story about the subject, Chinese": (story("_zh"), 1),
    "doesn't know what is outside, English": (outside(""), 1),
    "doesn't know what is outside, Chinese": (outside("_zh"), 1),
    "small talk": (lambda rng, family: single(chat(rng, family.chat)), 1),
}


def ask(model: qwen3.Model, cases: list[Case]) -> tuple[list[Answer], int]:
    """(the answers, how many of them ended by themselves)"""
    tokenizer = model.tokenizer
    prompts = [tokenizer.encode(tokenizer.apply_chat_template(case.messages, case.tools,
                                                              enable_thinking=case.enable_thinking))
               for case in cases]
    outputs = generate_batch(model, prompts, MAX_TOKENS, temperature=0)
    return [parse_answer(tokenizer.decode(ids)) for ids in outputs], sum(len(ids) < MAX_TOKENS for ids in outputs)


def shown(case: Case, answer: Answer) -> str:
    asked = " / ".join(message["content"] for message in case.messages if message["role"] != "assistant")
    return f"{asked!r} -> {answer.content!r}" + (f" {json.dumps(answer.tool_calls, ensure_ascii=False)}"
                                                 if answer.tool_calls else "")


def measure(model: qwen3.Model, draw: Draw, family: Family, seed: str, n: int, ended: Score) -> Score:
    rng, score = random.Random(seed), Score(0, n)
    cases = [draw(rng, family) for _ in range(n)]
    for start in tqdm(range(0, n, BATCH), seed, leave=False, disable=None):
        waiting = cases[start : start + BATCH]
        while waiting:
            answers, n_ended = ask(model, waiting)
            ended.of, ended.right = ended.of + len(waiting), ended.right + n_ended
            following = []
            for case, answer in zip(waiting, answers):
                if not case.is_right(answer):
                    score.failures.append(shown(case, answer))
                elif case.then:
                    following.append(case.then(answer))
                else:
                    score.right += 1
            waiting = following
    return score


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "demo")
    parser.add_argument("--cases", type=int, default=100,
                        help="size of the sample per skill, doubled for the main skills (default 100)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fast", action="store_true", help="by the fast engine")
    parser.add_argument("--only", choices=["in-family", "held-out"], help="one of the two kinds of questions")
    parser.add_argument("--failures", type=int, default=10,
                        help="how many wrong answers of each kind to show (default 10)")
    args = parser.parse_args()
    if args.fast:
        from qwen3_numba import load_model
    else:
        from qwen3 import load_model
    model = load_model(args.model)
    families = {"in-family": IN_FAMILY, "held-out": HELD_OUT_FAMILY}
    if args.only:
        families = {args.only: families[args.only]}
    ended, failures = Score(), []
    print("| skill, greedy decoding | " + " | ".join(f"{kind} | share" for kind in families)
          + " |\n| --- |" + " --- | --- |" * len(families))
    for name, (draw, factor) in SKILLS.items():
        scores = []
        for kind, family in families.items():
            scores.append(measure(model, draw, family, f"{args.seed} {name} {kind}", factor * args.cases, ended))
            failures += [f"{name}, {kind}: {text}" for text in scores[-1].failures[: args.failures]]
        print(f"| {name} | {' | '.join(map(str, scores))} |", flush=True)
    print(f"\nEnded by itself within {MAX_TOKENS} tokens: {ended.right} of {ended.of}, {ended.right / ended.of:.2%}.\n")
    print("\n".join(failures))


if __name__ == "__main__":
    main()
