"""What the bundled model can do, measured by greedy decoding through qwen3.py on questions that it was not trained on.

    python tools/eval_demo.py

prints one line per skill. --failures shows what went wrong.
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

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import demo_corpus  # noqa: E402
import qwen3  # noqa: E402
from tokenizer_utils import Answer, parse_answer  # noqa: E402

MAX_TOKENS = 256
BATCH = 16


@dataclass
class Case:
    """A conversation in which the assistant is to speak, and what makes its answer right."""
    messages: list[dict]
    is_right: Callable[[Answer], bool]
    tools: list[dict] | None = None
    enable_thinking: bool | None = None
    then: Callable[[Answer], "Case"] | None = None  # how the conversation goes on after a right answer


def from_example(example: demo_corpus.Example, enable_thinking: bool | None = None) -> Case:
    return Case(example.messages, lambda answer: all(text in answer.content for text in example.expected) and not answer.tool_calls,
                example.tools, enable_thinking)


def facts(language: str, enable_thinking: bool | None = None) -> Callable[[random.Random], Case]:
    def draw(rng: random.Random) -> Case:
        while (example := demo_corpus.fact(rng, held_out=True)).language != language:
            pass
        return from_example(example, enable_thinking)
    return draw


def arithmetic(plus: bool, enable_thinking: bool | None = None) -> Callable[[random.Random], Case]:
    def draw(rng: random.Random) -> Case:
        while (" + " in (example := demo_corpus.arithmetic(rng, held_out=True)).answer) != plus:
            pass
        return from_example(example, enable_thinking)
    return draw


def memory(rng: random.Random) -> Case:
    """A name or a number told, a question about something else, then the question; all answers are the model's own."""
    kind = rng.choice(["name", "number"])
    tell, ask, _ = demo_corpus.MEMORIES[kind]
    while True:
        value, question = demo_corpus.remembered(rng, kind), rng.choice(ask)
        if demo_corpus.is_held_out("memory", value, question):
            break
    told = demo_corpus.turn_told(rng, kind, value, rng.choice(tell), "")[0]
    aside = demo_corpus.aside(rng).messages[-1]

    def speak(messages: list[dict], *following: dict) -> Case:
        """Whatever the answer to these messages is, the conversation goes on; after the last it must hold the value."""
        if not following:
            return Case(messages, lambda answer: value in re.findall(r"\w+", answer.content))
        return Case(messages, lambda answer: True,
                    then=lambda answer: speak([*messages, demo_corpus.assistant(answer.content), following[0]], *following[1:]))

    return speak([told], aside, demo_corpus.user(question))


def tools(rng: random.Random) -> Case:
    """Right when the call is the expected one, as JSON, and the answer after it says what the tool returned."""
    use = demo_corpus.tool_use(rng, held_out=True)

    def after_call(answer: Answer) -> Case:
        call = {"type": "function", "function": answer.tool_calls[0]}
        messages = [demo_corpus.user(use.question),
                    {"role": "assistant", "content": "", "reasoning_content": answer.reasoning or "", "tool_calls": [call]},
                    {"role": "tool", "content": json.dumps(use.response)}]
        return Case(messages, lambda last: all(str(value) in last.content for value in use.response.values()), use.offered)

    return Case([demo_corpus.user(use.question)], lambda answer: answer.tool_calls == [use.call], use.offered, then=after_call)


def no_tool_needed(rng: random.Random) -> Case:
    example = rng.choice([demo_corpus.fact, demo_corpus.arithmetic])(rng, True)
    example.tools = demo_corpus.tool_use(rng, True).offered
    return from_example(example)


def story(rng: random.Random) -> Case:
    return from_example(demo_corpus.story(rng, held_out=True))


def unknown(rng: random.Random) -> Case:
    return from_example(demo_corpus.unknown(rng, held_out=True))


SKILLS: dict[str, tuple[Callable[[random.Random], Case], int]] = {  # and how many times the sample's size is asked for
    "facts about countries, English": (facts("en"), 2),
    "facts about countries, Chinese": (facts("zh"), 2),
    "facts, both languages, --no-think": (lambda rng: facts(rng.choice(["en", "zh"]), False)(rng), 1),
    "addition up to three digits": (arithmetic(True), 2),
    "subtraction up to three digits": (arithmetic(False), 2),
    "addition, --no-think": (arithmetic(True, False), 1),
    "subtraction, --no-think": (arithmetic(False, False), 1),
    "remembers a name or a number": (memory, 2),
    "calls a tool and uses its answer": (tools, 2),
    "needs no tool though there is one": (no_tool_needed, 1),
    "tells a story about the subject": (story, 1),
    "doesn't know what is outside": (unknown, 1),
}


def ask(model: qwen3.Model, cases: list[Case]) -> tuple[list[Answer], int]:
    """(the answers, how many of them ended by themselves)"""
    tokenizer = model.tokenizer
    prompts = [tokenizer.encode(tokenizer.apply_chat_template(case.messages, case.tools, enable_thinking=case.enable_thinking)) for case in cases]
    outputs = qwen3.generate_batch(model, prompts, MAX_TOKENS, temperature=0)
    return [parse_answer(tokenizer.decode(ids)) for ids in outputs], sum(len(ids) < MAX_TOKENS for ids in outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "demo")
    parser.add_argument("--cases", type=int, default=100, help="size of the sample per skill, doubled for the main skills (default 100)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fast", nargs="?", const="bf16", choices=["bf16", "int8", "int4"],
                        help="by the fast engine, with the weights as they are or quantized")
    parser.add_argument("--failures", action="store_true", help="print the wrong answers to stderr")
    args = parser.parse_args()
    if args.fast is None:
        model = qwen3.load_model(args.model)
    else:
        import qwen3_numba
        model = qwen3_numba.load_model(args.model, None if args.fast == "bf16" else args.fast)
    asked = ended = 0
    print("| skill, greedy decoding | right | of | share |\n| --- | --- | --- | --- |")
    for name, (draw, factor) in SKILLS.items():
        rng = random.Random(f"{args.seed} {name}")
        cases = [draw(rng) for _ in range(factor * args.cases)]
        right = 0
        for start in tqdm(range(0, len(cases), BATCH), name, leave=False, disable=None):
            waiting = cases[start:start + BATCH]
            while waiting:
                answers, n_ended = ask(model, waiting)
                asked, ended = asked + len(waiting), ended + n_ended
                following = []
                for case, answer in zip(waiting, answers):
                    if not case.is_right(answer):
                        if args.failures:
                            print(f"{name}: {case.messages[-1]['content']!r} -> {answer}", file=sys.stderr)
                    elif case.then:
                        following.append(case.then(answer))
                    else:
                        right += 1
                waiting = following
        print(f"| {name} | {right} | {len(cases)} | {right / len(cases):.1%} |", flush=True)
    print(f"| ends by itself within {MAX_TOKENS} tokens | {ended} | {asked} | {ended / asked:.2%} |")


if __name__ == "__main__":
    main()
