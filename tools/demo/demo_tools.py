"""Tools as programs offer them: described by a JSON schema, called by the model with JSON, their answers put into words.

Some are like those that people write (weather, alarms, messages, ...) under changing names; the others are made up of
random words, so that only name, description and schema say what a tool is for and which words are its values.
"""

import json
import random
import re
from dataclasses import dataclass

import demo_words as words
from demo_toolbox import KINDS, TOOLS, Tool, number_value, text_value
from demo_turns import plural
from demo_typing import choose, typed

INVENTED_DESCRIPTIONS = [
    "{V} the {n}",
    "{V}s the {n} of a {o}",
    "Get the {n}",
    "Returns the {n} of {o}",
    "{V} {n}",
    "The {n} of a {o}",
    "Finds {n}",
    "{n} service",
    "Use this to {v} a {n}",
]
INVENTED_QUESTIONS = [
    "(Tell me|Give me|Get|What is|Show me|Find|) the {n} (of|for|in) {0}",
    "{v} the {n} (of|for|in|with|on) {0}",
    "{v} {0}",
    "(Please |Can you |Could you |I want to |){v} the {n} {0}",
    "{n} (for|of|) {0}",
    "(What is|Show) {0}'s {n}",
    "Use {f} (with|for|on) {0}",
    "{f} {0}",
    "I need the {n} (of|for) {0}",
    "{v} a {n} (for|called|named|with) {0}",
]
MORE = [
    "(and|with|,|, with) {name} {value}",
    "(and|,|) {name}: {value}",
    "(where the|and the|, the) {name} is {value}",
    "({name} = {value}|{name}={value})",
]
NO_ARGUMENT = ["{v} the {n}( now| please|)", "(What is|Show me|Give me|Get|Tell me) the {n}", "(Please |Can you |){v} the {n}", "Use {f}"]


def invented_tool(rng: random.Random) -> Tool:
    verb, noun, other = rng.choice(words.english("verb")), words.noun(rng), words.noun(rng)
    if rng.random() < 0.3:
        noun = words.invented(rng)
    first = rng.choice(
        [
            f"{verb}_{noun}",
            f"{verb}_{noun}",
            f"get_{noun}",
            f"{noun}_{verb}",
            noun,
            f"{verb}{words.capital(noun)}",
            f"{noun}.{verb}",
            f"{noun}-{verb}",
            f"find_{noun}",
            f"{noun}_api",
        ]
    )
    count = rng.choice([0, 1, 1, 1, 2, 2, 3])
    names = rng.sample(
        [
            "id",
            "name",
            "date",
            "count",
            "city",
            "color",
            "size",
            "user",
            "level",
            "type",
            "key",
            "value",
            "speed",
            "limit",
            "title",
            "price",
            "email",
            "path",
            "mode",
            "unit",
            *(words.noun(rng) for _ in range(12)),
        ],
        count,
    )
    arguments = {
        str(i): (name, rng.choice(["city", "person", "text", "number", "whole", "code", "clock", "date", "text", "enum"]))
        for i, name in enumerate(names)
    }
    pattern = rng.choice(INVENTED_QUESTIONS if count else NO_ARGUMENT)
    if count and rng.random() < 0.3:  # the first argument under its name, too
        pattern += " " + rng.choice(MORE).replace("{name}", names[0]).replace("{value}", "{0}") if "{0}" not in pattern else ""
    for i in range(1, count):
        if rng.random() < 0.85:
            pattern += " " + rng.choice(MORE).replace("{name}", names[i].replace("_", " ")).replace("{value}", f"{{{i}}}")
    fixed = {"v": verb, "n": noun, "o": other, "f": first, "V": words.capital(verb)}
    pattern = re.sub(r"\{([vnfoV])\}", lambda part: fixed[part[1]], pattern)
    description = re.sub(r"\{([vnfoV])\}", lambda part: fixed[part[1]], rng.choice(INVENTED_DESCRIPTIONS))
    return Tool(
        first,
        [description],
        arguments,
        [pattern],
        {words.noun(rng): rng.choice(["number", "text", "city", "word", "person", "clock"]) for _ in range(rng.choice([1, 1, 2, 3]))},
        noun,
    )


def parsed(text: str, kind: str):
    """The JSON value of a typed number; any other text stays as it is."""
    if kind == "boolean":
        return text == "true"
    if kind in ("number", "integer"):
        return float(text) if "." in text else int(text)
    return text


# What a made-up service may be asked with: the argument's names, its kind, and how it stands in a sentence.
PHRASES = [
    ("city town location place address area region", "city", ["in {}", "at {}", "near {}", "for {}", "around {}"]),
    ("origin start departure source from", "city", ["from {}", "leaving {}", "starting in {}"]),
    ("destination target arrival goal to", "city", ["to {}", "going to {}"]),
    ("person name who user guest contact recipient owner", "person", ["for {}", "with {}", "of {}", "by {}", "to {}"]),
    ("time at hour start begin when", "clock", ["at {}", "for {}", "by {}", "from {}"]),
    ("date day when on", "date", ["on {}", "for {}", "{}", "by {}"]),
    ("title name topic subject label text about", "text", ["called {}", "named {}", "about {}", "on {}"]),
    ("id code number key reference", "code", ["number {}", "with the id {}", "{}", "with code {}"]),
]
SIZES = "size amount quantity count number volume length".split()
SORTS = "kind type sort color flavor style model size".split()
IMPERATIVES = [
    "{V} (a|the|my|me a|) {thing}{phrases}(.|)",
    "(Please|Can you|Could you|I want to|I'd like to|I have to|You should|Would you) {v} (a|the|my|) {thing}{phrases}",
    "(I need|I want|I'd like|Get me|Give me|We need|Order|Book|Find|Make) (a|the|some|) {thing}{phrases}(.|, please|)",
]
INQUIRIES = [
    "(When|Where|What|Which|How|Who) is the {thing}{phrases}?",
    "(Is there|Do you have|Do they have|Can I get) (a|any|some) {thing}{phrases}?",
    "(What|Which) {thing} (is there|can I get|do they have|is it){phrases}?",
    "How (many|much) {thing} (is|are) there{phrases}?",
    "How {a} is the {thing}{phrases}?",
    "{thing}{phrases}",
    "(Show|Tell|Give) me the {thing}{phrases}.",
    "(Check|Look up|Search|Find out) the {thing}{phrases}.",
]


def plausible_tool(rng: random.Random) -> Tool:
    """A service for a random thing, asked in whole sentences: only the schema says which of their words are values."""
    verb, noun, adjective = rng.choice(words.english("verb")), words.noun(rng), rng.choice(words.english("adjective"))
    name = rng.choice(
        [f"{verb}_{noun}", f"get_{noun}", f"{noun}_{verb}", noun, f"{noun}_service", f"{verb}{words.capital(noun)}", f"find_{noun}"]
    )
    description = rng.choice(
        [
            "{V} a {n}",
            "{V} the {n}",
            "(Get|Find|Look up|Returns) the {n}",
            "{n} (service|information|search|control)",
            "Tells the {n}",
            "{V}s {n}",
        ]
    )
    thing, arguments, values = noun, {}, 0
    if rng.random() < 0.3:  # a value before the thing: "the blue lamp"
        arguments["s"] = (rng.choice([*SORTS, words.noun(rng)]), rng.choice(["enum", "text", "person", "city"]))
        thing = "{s} " + noun
    elif rng.random() < 0.2:  # a number before the thing, or of a unit: "3 lamps", "20 minutes of lamp"
        unit = plural(words.noun(rng))
        arguments["s"] = (rng.choice([*SIZES, unit]), rng.choice(["whole", "number"]))
        thing = rng.choice(["{s} " + plural(noun), "{s} " + unit + " of " + noun])
    phrases = []
    for spellings, kind, forms in rng.sample(PHRASES, rng.choice([0, 1, 1, 1, 2, 2, 3] if not arguments else [0, 0, 1, 1, 2])):
        if not set(spellings.split()) & {one for own, _ in arguments.values() for one in own.split()}:
            key = str(values)
            arguments[key], values = (spellings, kind), values + 1
            if rng.random() < 0.9:
                phrases.append(" " + rng.choice(forms).replace("{}", f"{{{key}}}"))
    if not arguments and rng.random() < 0.8:
        return plausible_tool(rng)
    rng.shuffle(phrases)
    pattern = rng.choice(IMPERATIVES + INQUIRIES)
    if phrases and not arguments.get("s") and rng.random() < 0.15:
        first = re.search(r"\{\d\}", phrases[0])[0]
        pattern, phrases = rng.choice([first + "'s {thing}{phrases}", "{thing} " + first + "{phrases}"]), phrases[1:]
    fixed = {"v": verb, "n": noun, "V": words.capital(verb), "a": adjective, "thing": thing, "phrases": "".join(phrases)}
    fill = lambda text: re.sub(r"\{([vnVa]|thing|phrases)\}", lambda part: fixed[part[1]], text)  # noqa: E731
    results = {words.noun(rng): rng.choice(["number", "text", "word", "clock", "person"]) for _ in range(rng.choice([1, 1, 2]))}
    return Tool(name, [fill(description)], arguments, [fill(pattern)], results, noun)


def plausible_tool_zh(rng: random.Random) -> Tool:
    noun, verb = rng.choice(words.chinese_nouns()), rng.choice("查询 获取 预订 购买 打开 设置 发送 计算 寻找".split())
    name = rng.choice([f"{rng.choice(words.english('verb'))}_{words.noun(rng)}", f"get_{words.noun(rng)}", words.noun(rng)])
    arguments = {
        "0": rng.choice(
            [("city location place 城市 地点", "city_zh"), ("name person user 姓名", "person_zh"), ("item what 名称", "noun_zh")]
        )
    }
    questions = [
        "(查|查一下|查询|帮我查|告诉我|我想知道){0}的{n}。",
        "{0}的{n}(是什么|怎么样|是多少|在哪里|)？",
        "{0}有{n}吗？",
        "{v}{0}的{n}。",
        "{n}：{0}",
        "(给|为|帮){0}{v}{n}。",
    ]
    if rng.random() < 0.3:
        arguments["1"] = rng.choice([("time 时间", "clock"), ("number count 数量", "whole"), ("date 日期", "date")])
        questions = ["{v}{0}的{n}，{1}。", "{1}(为|给){0}{v}{n}。", "{0}{1}的{n}怎么样？"]
    question = rng.choice(questions).replace("{n}", noun).replace("{v}", verb)
    return Tool(
        name, [rng.choice([verb + noun, f"{verb}一个{noun}", f"{noun}{verb}"])], arguments, [question], {words.noun(rng): "noun_zh"}, noun
    )


@dataclass
class Offer:
    """A tool with the names that it goes by in one conversation."""

    tool: Tool
    name: str
    names: dict[str, str]  # of the arguments
    types: dict[str, str]
    choices: dict[str, list[str]]
    schema: dict


def offer(rng: random.Random, tool: Tool) -> Offer:
    names, types, choices, properties = {}, {}, {}, {}
    described = rng.random() < 0.4
    for key, (spellings, kind) in tool.arguments.items():
        if not spellings:
            continue
        name = rng.choice(spellings.split())
        type_ = KINDS.get(kind, ("string",))[0]
        if kind == "enum":
            choices[key] = [words.noun(rng) for _ in range(rng.randint(2, 4))]
        if "|" in type_:
            choices[key], type_ = type_.split("|"), "string"
        if type_ in ("number", "integer") and rng.random() < 0.15:
            type_ = "string"
        names[key], types[key] = name, type_
        properties[name] = {"type": type_} | (
            {"description": rng.choice(["The {}", "the {}", "{} to use", "A {}"]).format(name.replace("_", " "))} if described else {}
        )
        if key in choices:
            properties[name]["enum"] = choices[key]
    name = rng.choice(tool.names.split())
    parameters = {"type": "object", "properties": properties} | (
        {"required": [names[key] for key in names if rng.random() < 0.9]} if rng.random() < 0.7 else {}
    )
    function = {"name": name, "description": choose(rng, rng.choice(tool.descriptions)), "parameters": parameters}
    return Offer(tool, name, names, types, choices, {"type": "function", "function": function})


def value_of(rng: random.Random, given: Offer, key: str) -> str:
    if key in given.choices:
        return rng.choice(given.choices[key])
    kind = given.tool.arguments[key][1]
    if given.tool.topic == "sum":
        return words.decimal(rng) if rng.random() < 0.15 else str(rng.randrange(10 ** rng.choice([1, 2, 3, 4])))
    return KINDS[kind][1](rng)


@dataclass
class ToolUse:
    """A question that needs a tool, from the tools on offer to the last answer."""

    question: str
    offered: list[dict]
    calls: list[dict]  # {"name": ..., "arguments": {...}}
    responses: list[str]
    answer: str
    expected: list[str]  # what the answer repeats of the responses
    topics: str = ""
    zh: bool = False

    def asking(self) -> dict:
        return {"role": "user", "content": self.question}

    def calling(self) -> dict:
        calls = [{"type": "function", "function": call} for call in self.calls]
        return {
            "role": "assistant",
            "content": "",
            "reasoning_content": "I need " + " and ".join(call["name"] for call in self.calls) + ".",
            "tool_calls": calls,
        }

    def messages(self) -> list[dict]:
        return [
            self.asking(),
            self.calling(),
            *({"role": "tool", "content": response} for response in self.responses),
            {"role": "assistant", "content": self.answer, "reasoning_content": "The tool has answered."},
        ]


def arguments_of(given: Offer, pattern: str, implied: dict[str, str], fill: dict[str, str]) -> dict:
    """The call's arguments: those that the question names or implies, in the schema's order."""
    found = {}
    for key, name in given.names.items():
        if key in implied:
            found[name] = parsed(re.sub(r"\{(\w+)\}", lambda part: fill[part[1]], implied[key]), given.types[key])
        elif f"{{{key}}}" in pattern:
            found[name] = parsed(fill[key], given.types[key])
    return found


def response_of(rng: random.Random, given: Offer) -> dict:
    draw = {
        "word": lambda r: r.choice(
            "ok done sunny cloudy rainy windy snowy clear started sent delivered good open closed ready set saved".split()
        ),
        **{kind: pair[1] for kind, pair in KINDS.items()},
    }
    found = {}
    for key, kind in given.tool.results.items():
        text = draw[kind](rng)
        found[key] = parsed(text, KINDS.get(kind, ("string",))[0])
    if rng.random() < 0.25:
        found[words.noun(rng)] = rng.choice([words.noun(rng), rng.randrange(1000), round(rng.random() * 100, 1), words.invented(rng)])
    return found


def shown(value) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def in_words(call: dict, response, zh: bool) -> str:
    """The same sentence for every tool: the call's first text, then each field of the answer."""
    if isinstance(response, str):
        return response
    about = next((value for value in call["arguments"].values() if isinstance(value, str)), "")
    if zh:
        return (f"{about}：" if about else "") + "，".join(f"{key}是{shown(value)}" for key, value in response.items()) + "。"
    fields = [f"the {key.replace('_', ' ')} is {shown(value)}" for key, value in response.items()]
    said = " and ".join([", ".join(fields[:-1]), fields[-1]] if len(fields) > 1 else fields) + "."
    return f"{about}: {said}" if about else words.capital(said)


def tool_use(rng: random.Random, tools: list[Tool] = TOOLS, invented: float = 0.65) -> ToolUse:
    draw = rng.choice([invented_tool, plausible_tool, plausible_tool, plausible_tool_zh if rng.random() < 0.4 else plausible_tool])
    tool = draw(rng) if rng.random() < invented else rng.choice(tools)
    others = [
        other
        for other in (draw(rng) if rng.random() < 0.4 else rng.choice(tools) for _ in range(rng.choice([0, 0, 0, 1, 1, 2])))
        if not set(other.topic.split()) & set(tool.topic.split())
    ]
    offers = {}
    for given in [offer(rng, tool), *(offer(rng, other) for other in others)]:
        offers.setdefault(given.name, given)
    given = next(iter(offers.values()))
    chosen = rng.choice(tool.questions)
    pattern, implied = chosen if isinstance(chosen, tuple) else (chosen, {})
    pattern = choose(rng, pattern)
    fill = {key: value_of(rng, given, key) for key in tool.arguments}
    zh = words.chinese(pattern)
    question, fill = typed(rng, pattern, fill, copied=True, cased=not given.choices)
    calls = [{"name": given.name, "arguments": arguments_of(given, pattern, implied, fill)}]
    if len(fill) == 1 and not implied and rng.random() < 0.22 and tool.arguments and not given.choices:  # the same for two values
        key = next(iter(fill))
        second = value_of(rng, given, key)
        if question.count(fill[key]) == 1 and second != fill[key]:
            question = question.replace(
                fill[key],
                fill[key]
                + rng.choice(
                    ["和", "、"]
                    if zh
                    else [" and ", " and ", " and in " if tool.arguments[key][1] == "city" and " in {" in pattern else " and "]
                )
                + second,
            )
            calls.append({"name": given.name, "arguments": arguments_of(given, pattern, implied, {key: second})})
    responses = [response_of(rng, given) for _ in calls]
    if rng.random() < 0.12:
        responses = [rng.choice(["{a}, {b}", "{a}", "{a} {b}"]).format(a=text_value(rng), b=number_value(rng)) for _ in calls]
    answer = ("" if zh else " ").join(in_words(call, response, zh) for call, response in zip(calls, responses))
    expected = [shown(value) for response in responses for value in ([response] if isinstance(response, str) else response.values())]
    listed = [each.schema for each in offers.values()]
    rng.shuffle(listed)
    return ToolUse(
        question,
        listed,
        calls,
        [response if isinstance(response, str) else json.dumps(response, ensure_ascii=False) for response in responses],
        answer,
        expected,
        " ".join(each.tool.topic for each in offers.values()),
        zh,
    )
