"""The world of the bundled model: every text it is trained and tested on, generated here and nowhere else.

`conversation(rng)` draws one training example. Questions are worded by questions.py in training and by
heldout.py in the evaluation: every function that asks takes the `book` of wordings to choose from.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import words
from facts import fact, fact_and_more, facts_of, yes_no
from memory import memory, remembering, told
from questions import PATTERNS, QUESTIONS
from stories import story
from sums import beyond_sums, small_sum, sum_turn
from talk import chat, not_known, repeat, unknown
from tools import ToolUse, misfit, tool_talk, tool_use
from turns import Turn, language
from typos import choose


@dataclass
class Example:
    """A conversation whose assistant messages are all right, so that all are trained on."""

    messages: list[dict]
    tools: list[dict] | None = None
    enable_thinking: bool | None = None  # as apply_chat_template takes it; None is the default: thinking
    raw: str = ""  # plain text, instead of a conversation
    # conversations that begin with the same system prompt and tools
    beside: list["Example"] = field(default_factory=list)


def filler(rng: random.Random) -> Turn:
    """A short turn about something else."""
    return rng.choice([fact, fact, small_sum, unknown, lambda r, _: chat(r)])(rng, QUESTIONS)


def unhelped(rng: random.Random, use: ToolUse) -> Turn:
    """A turn that none of the offered tools is for."""
    while True:
        kind = rng.random()
        if kind < 0.07:
            turn = story(rng, QUESTIONS)
        elif kind < 0.25:
            turn = told(rng, QUESTIONS, memory(rng, language(rng)), "tell")
        else:
            turn = filler(rng)
        if kind > 0.5 and (question := misfit(rng, use)):
            turn = not_known(question, "_zh" if words.chinese(question) else "")
        text = turn.question.lower()
        topics = {topic for tool in use.tools for topic in tool.topic.split()}
        if not ("sum" in topics and any(char.isdigit() for char in text)) \
                and not any(topic in text for topic in topics):
            return turn


SKILLS: dict[Callable[[random.Random], list[Turn]], float] = {
    lambda rng: [fact(rng, QUESTIONS) for _ in range(rng.choice([1, 1, 2, 3, 4]))]: 20,
    lambda rng: fact_and_more(rng, QUESTIONS): 3,
    lambda rng: [yes_no(rng, QUESTIONS, language(rng)) for _ in range(rng.choice([3, 4, 5, 6]))]: 7,
    lambda rng: [sum_turn(rng, QUESTIONS)]: 10,
    lambda rng: [small_sum(rng, QUESTIONS) for _ in range(rng.choice([2, 4, 6, 8]))]: 8,
    lambda rng: remembering(rng, QUESTIONS, filler): 21,
    lambda rng: [story(rng, QUESTIONS)]: 5,
    lambda rng: [rng.choice([unknown, unknown, beyond_sums])(rng, QUESTIONS) for _ in range(rng.choice([1, 2, 3]))]: 18,
    lambda rng: [chat(rng) for _ in range(rng.choice([1, 2, 3]))]: 9,
    lambda rng: [repeat(rng, QUESTIONS) for _ in range(rng.choice([1, 2, 3]))]: 5,
    lambda rng: [filler(rng) for _ in range(rng.choice([2, 3, 4]))]: 3,
}
TOOL_SHARE, RAW_SHARE = 0.5, 0.012
BESIDE = 6  # more questions to the tools of a conversation, as far as there is room


def system_prompt(rng: random.Random) -> str:
    return choose(rng, rng.choice(PATTERNS["system"])).replace("{n}", words.noun(rng)).replace("{m}", words.name(rng))


def messages_of(turns: list[Turn]) -> list[dict]:
    messages = []
    for turn in turns:
        messages += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
    return messages


def raw_text(rng: random.Random) -> str:
    """Plain text for `--raw`: sentences about countries, and stories."""
    if rng.random() < 0.3:
        return story(rng, QUESTIONS).answer
    zh = rng.random() < 0.3
    return ("" if zh else " ").join(rng.choice(list(facts_of(words.country(rng), zh).values()))[1]
                                    for _ in range(rng.choice([1, 2, 3])))


def conversation(rng: random.Random) -> Example:
    """One drawing from the whole mixture."""
    if rng.random() < RAW_SHARE:
        return Example([], raw=raw_text(rng))
    if rng.random() < TOOL_SHARE:
        drawn = with_tools(rng)
    else:
        turns = rng.choices(list(SKILLS), list(SKILLS.values()))[0](rng)
        needless = turns[-1].skill == "memory" and rng.random() < 0.08
        drawn = switched(rng, answered(turns), tool_use(rng).offered if needless else None)
    if rng.random() < 0.15:
        system = {"role": "system", "content": system_prompt(rng)}
        for example in [drawn, *drawn.beside]:
            example.messages.insert(0, system)
    return drawn


def answered(turns: list[Turn]) -> list[dict]:
    """The turns as messages, with the thought of the last one."""
    messages = messages_of(turns)
    messages[-1]["reasoning_content"] = turns[-1].thought
    return messages


def with_tools(rng: random.Random) -> Example:
    """A conversation that is offered tools. Beside it stand more questions to the same tools, which share what takes
    the most tokens, their schemas: twice as many calls are learned in the same time."""
    talked = rng.choice([1, 1, 2, 3])
    uses = tool_talk(rng, talked + BESIDE)
    tools = uses[0].offered

    def needless() -> list[Turn]:
        return [unhelped(rng, uses[0]) for _ in range(rng.choice([1, 1, 2]))]

    if rng.random() < 0.3:
        messages = answered(needless())
    else:
        messages = messages_of([unhelped(rng, uses[0])]) if rng.random() < 0.15 else []
        messages += [message for use in uses[:talked] for message in use.messages()]
    drawn = switched(rng, messages, tools)
    for use in uses[talked:]:
        one = answered(needless()) if rng.random() < 0.25 else use.messages()[: rng.choice([2, 2, 2, None])]
        drawn.beside.append(switched(rng, one, tools))
    return drawn


def switched(rng: random.Random, messages: list[dict], tools: list[dict] | None) -> Example:
    """The conversation under one position of the thinking switch: off more rarely for the long sums, whose steps are to
    be learned."""
    drawn = Example(messages, tools)
    asking = [message for message in messages if message["role"] == "user"][-1]
    long_sum = "digits:" in messages[-1].get("reasoning_content", "")
    mode = rng.random()
    if mode < (0.2 if long_sum and len(messages) == 2 else 0.45):
        drawn.enable_thinking = False
        for message in messages:
            message.pop("reasoning_content", None)
        calls = [i for i, message in enumerate(messages) if "tool_calls" in message]
        if calls and rng.random() < 0.5:  # the call is what the model says now: an empty thought stands before it
            del messages[calls[-1] + 1 :]
    elif mode > 0.97:
        asking["content"] += " /no_think"
        for message in messages:
            message["reasoning_content"] = ""
    elif mode > 0.95:
        asking["content"] += " /think"
    return drawn
