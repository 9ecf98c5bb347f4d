"""Tools as programs offer them: described by a JSON schema, called by the model with JSON, their answers said in words.

Some are like those that people write (weather, alarms, messages, ...) under changing names; the others are made up of
random words, so that only name, description and schema say what a tool is for and which words are its values.
Sentences are put together from an intent, its values in any order, and words that belong to no value.
"""

import json
import random
import re
from dataclasses import dataclass

import words
from questions import PATTERNS
from toolbox import FREE, KINDS, STANDING, TOOLS, Tool, date_value, number_value, one_of, wording
from turns import plural
from typos import choose, typed

# Kinds that one can't tell from each other by their looks are of one group; all that are not listed are of another.
LOOKS = {**{kind: "number" for kind in "few whole number percent minutes".split()},
         **{kind: kind for kind in "clock date email file code phone".split()}}

# ---- Tools for random things ----------------------------------------------------------------------------------------

NAMES = "{v}_{n} {v}_{n} {v}_{n} get_{n} get_{n} find_{n} {n}_{v} {n} {n}_service {n}_{other}".split()
DESCRIPTIONS, INTENTS, COUNTED, NAMED, COUNTS, ZH_INTENTS, BEFORE, SHOW = (
    PATTERNS[key] for key in "descriptions intents counted named counts zh_intents before show".split())
OBJECTS = PATTERNS["objects"]  # where the verb is for the value: "feed the dog", "open the camera app"
VALUES = "city person text title number whole code clock date enum thing email file color few place".split()
GENERAL = ("city city from to place who recipient time time until date date title topic id user_id count days minutes "
           "limit email level tongue").split()
ZH_GENERAL = {"city": "city location place 城市 地点", "person": "name person user 姓名", "clock": "time 时间",
              "date": "date day 日期", "whole": "number count 数量"}


def random_tool(rng: random.Random, verb: str = "", noun: str = "", zh: bool = False) -> Tool:
    """A service for a random thing: only the schema says which words of a sentence are values."""

    def thing_word() -> str:
        return rng.choice(words.chinese_nouns()) if zh else \
            words.noun(rng) if rng.random() < 0.85 else words.invented(rng)

    noun = noun or thing_word()
    verb = verb or rng.choice("查询 获取 预订 购买 打开 设置 发送 计算 寻找".split() if zh else words.english("verb"))
    fixed = {"v": verb, "n": noun, "other": thing_word(), "a": rng.choice(words.english("adjective"))}
    arguments: dict[str, tuple[str, str]] = {}
    forms: dict[str, list[str]] = {}
    thing, kind, unit, intents = noun, rng.random(), plural(words.noun(rng)), ZH_INTENTS if zh else INTENTS
    if kind < 0.2:  # a value before the thing: "the blue lamp", "Oslo lamps"
        arguments["s"] = (rng.choice("kind type color style model owner topic".split()),
                          rng.choice(VALUES) + "_zh" * zh)
        thing = "{s}的" + noun if zh else "{s} " + noun
    elif kind < 0.35 and not zh:
        # a number before the thing, or of a unit: "3 lamps", "20 minutes of lamp", "2 cups of strong tea"
        arguments["k"] = (rng.choice(["count", "amount", "number", unit]), rng.choice(["few", "whole", "number"]))
        thing = rng.choice([f"{{k}} {plural(noun)}", f"{{k}} {unit} of {noun}"])
        if rng.random() < 0.4:
            arguments["s"] = (rng.choice("kind type color style size".split()),
                              rng.choice("enum enum color text city".split()))
            thing = rng.choice([f"{{k}} {{s}} {plural(noun)}", f"{{k}} {unit} of {{s}} {noun}"])
    elif kind < 0.65 and not zh:
        intents = OBJECTS
        arguments["o"] = (rng.choice([noun, noun, "name", "item", "target", "what"]),
                          rng.choice("thing thing person file place code text".split()))
        if rng.random() < 0.4:
            arguments["k"] = (rng.choice(["amount", unit, unit]), rng.choice(["few", "whole", "number"]))
            forms["k"] = [f"{{}} {unit}", f"{{}} {unit}", f"with {{}} {unit}", f"for {{}} {unit}", f"by {{}} {unit}"]
            intents = rng.choice([OBJECTS, COUNTED])
    for i in range(rng.choice([0, 0, 1, 1, 2] if arguments else [0, 1, 1, 1, 2, 2, 3])):
        if zh:
            kind = rng.choice(list(ZH_GENERAL))
            names, own = ZH_GENERAL[kind], ["在{}" if kind == "city" else "给{}" if kind == "person" else "{}", "{}"]
        elif rng.random() < 0.3:
            names, kind = words.noun(rng), rng.choice(VALUES)
            own = [form.replace("{name}", names) for form in NAMED + COUNTS * (LOOKS.get(kind) == "number")]
        else:
            names, kind, own = STANDING[rng.choice(GENERAL)]
        names = rng.choice(names.split())
        if names not in {name for name, _ in arguments.values()}:
            arguments[str(i)], forms[str(i)] = (names, kind + "_zh" * (kind + "_zh" in KINDS) * zh), own
    arguments = {key: (names, kind if kind in KINDS or kind == "enum" else "noun_zh")
                 for key, (names, kind) in arguments.items()}
    filled = fixed | {"thing": thing, "u": unit}
    fill = lambda text: re.sub(r"\{([vnau]|other|thing)\}", lambda part: filled[part[1]], text)  # noqa: E731
    name = fixed | ({"v": rng.choice(words.english("verb")), "n": words.noun(rng), "other": words.noun(rng)} if zh
                    else {})
    return Tool(
        rng.choice(NAMES[:3] if intents is OBJECTS else NAMES).format(**name).replace(" ", "_"),
        [rng.choice(["{v}{n}", "{v}一个{n}", "{n}{v}"]).format(**fixed) if zh else fill(rng.choice(DESCRIPTIONS))],
        arguments,
        [fill(rng.choice(intents)) for _ in range(2)]
        + [f"{{0}}'s {thing}", f"{verb} {{0}}"]
        * ("0" in arguments and not zh and LOOKS.get(arguments["0"][1]) != "number" and rng.random() < 0.2),
        {words.noun(rng): rng.choice(["number", "text", "word", "clock", "person"])
         for _ in range(rng.choice([1, 1, 2]))},
        noun,
        forms or {"": []},
        {key for key in forms if rng.random() < 0.2},
        f"{verb} {noun}",
        verb,
    )


# ---- Sentences ------------------------------------------------------------------------------------------------------

ASKING = set("what what's how is it does do did will when where which who am are can could should may was has "
             "have".split())
SMALL = set("the a an my me is are do does please it to of for".split())
OPENING, MIDDLE, CLOSING = wording("opening"), wording("middle"), wording("closing")
HERE_AND_NOW = ["now", "right now", "today", "tonight", "at the moment", "currently", "this evening", "later",
                "tomorrow", "this week"]
OPENING_ZH, CLOSING_ZH = one_of("opening_zh"), one_of("closing_zh")


def compose(rng: random.Random, tool: Tool) -> tuple[str, dict[str, str]]:
    """(a sentence for one of the tool's intents, with `{key}` where values stand; the values that it only implies)"""
    text, *given = rng.choice(tool.questions).split(" => ")
    implied = dict(re.findall(r"(\w+)=(.+?)(?= \w+=|$)", given[0])) if given else {}
    text = " ".join(choose(rng, text).split())
    kinds = {key: kind for key, (_, kind) in tool.arguments.items()}
    inside = {*re.findall(r"\{(\w+)\}", text), *implied}
    said = [key for key in kinds if key in tool.forms and key not in inside and kinds[key] != "boolean"]
    said = [key for key in said if rng.random() < (0.35 if key in tool.optional else 0.92)]
    rng.shuffle(said)
    return (in_chinese if words.chinese(text) else in_english)(rng, tool, text, said), implied


def in_chinese(rng: random.Random, tool: Tool, text: str, said: list[str]) -> str:
    text = "".join(rng.choice(tool.forms[key]).replace("{}", f"{{{key}}}") + rng.choice(["", "，"])
                   for key in said) + text
    # so that 9 and 7:30 are not 97:30
    text = (OPENING_ZH(rng) if rng.random() < 0.2 else "") + text.replace("}{", "}，{")
    if not text.endswith("}") and rng.random() < 0.2:
        text += CLOSING_ZH(rng)
    return text + rng.choice(["", "", "？" if text[-1] in "吗样何少谁里么呢" else "。"])


def in_english(rng: random.Random, tool: Tool, text: str, said: list[str]) -> str:
    """The intent with its values in any order: as a question or an order, in whole sentences or a few words."""
    free = lambda text: any(tool.arguments[key][1] in FREE for key in re.findall(r"\{(\w+)\}", text))  # noqa: E731
    terse, asks, noun_phrase = rng.random() < 0.2, text.split()[0].lower() in ASKING, text.startswith("the ")
    if terse:
        text = " ".join(word for word in text.split() if word not in SMALL) or text
    elif noun_phrase and rng.random() < 0.8:
        text = f"{choose(rng, SHOW[0])} {text}"
    elif text.split()[0] in words.english("verb") and rng.random() < 0.3:
        text = f"{choose(rng, BEFORE[0])} {text}"
        asks = text.split()[0] in ASKING
    phrases, tail = phrases_of(rng, tool, said, terse and not free(text), not free(text))
    end = re.search(r"(:| to| that| saying|:? that says|) \{(\w+)\}$", text)
    if end and free(end[0]):
        if end[1] and rng.random() < 0.5:  # remind me - at five - to ...
            text, tail = text[: end.start()], end[0]
        elif tool.arguments[end[2]][1] == "message":  # nothing shows its end
            text = f"{phrases[0]}{rng.choice([',', ''])} {text}" if phrases and rng.random() < 0.5 else text
            phrases = []
    if phrases and rng.random() < 0.15 and not terse:
        text = f"{phrases.pop()}{rng.choice([', ', ' ', ': ', ', '])}{text}"
    if not free(text + tail) and rng.random() < 0.06:
        timeless = not {"clock", "date", "minutes"} & {kind for _, kind in tool.arguments.values()}
        phrases.insert(rng.randint(0, len(phrases)),
                       rng.choice(HERE_AND_NOW) if timeless and rng.random() < 0.5 else MIDDLE(rng))
    text = rng.choice([" ", " ", " ", ", "] if len(phrases) > 1 else [" "]).join([text, *phrases]) + tail
    if said and rng.random() < 0.1 and LOOKS.get(tool.arguments[said[0]][1]) != "number" and '"' not in text:
        text = text.replace(f"{{{said[0]}}}", f'"{{{said[0]}}}"')
    if rng.random() < 0.06:
        text = OPENING(rng) + rng.choice([". ", ", ", ", so ", ": ", " - ", "! "]) + text
    if terse or (free(text.split()[-1]) and text[-1] != '"'):
        text += rng.choice(["", "", ".", ".", "!", ". " + words.capital(CLOSING(rng))])
    else:
        text += rng.choice([", ", " ", ". "]) + CLOSING(rng) if rng.random() < 0.06 else ""
        text += rng.choice(["", "", "?" if asks else "."])
    return words.capital(text) if rng.random() < 0.5 and text[0] != "{" else text


def phrases_of(rng: random.Random, tool: Tool, said: list[str], bare: bool, tailed: bool) -> tuple[list[str], str]:
    """(how values stand that the intent does not name; the one of any words: last if `tailed`, or in quotes)"""
    phrases, tail, kinds = [], "", {key: kind for key, (_, kind) in tool.arguments.items()}
    for key in said:
        alike = [other for other in kinds if other != key and LOOKS.get(kinds[other]) == LOOKS.get(kinds[key])]
        # "for Ann" could be any of two people
        others = {form for other in alike for form in tool.forms.get(other, ["{}"])}
        form = rng.choice([form for form in tool.forms[key] if form not in others] or tool.forms[key])
        if bare and not alike and rng.random() < 0.7:
            form = "{}"
        if '"' in form or kinds[key] not in FREE:
            phrases.append(form.replace("{}", f"{{{key}}}"))
        elif tailed and not tail:
            tail = " " + form.replace("{}", f"{{{key}}}")
        else:
            phrases.append(form.replace("{}", f'"{{{key}}}"'))
    return phrases, tail


# ---- What is offered ------------------------------------------------------------------------------------------------

# How much more often than others these are asked for. Without a tool, the weather and the time are outside the model's
# world, so it must see often enough that with one they aren't.
POPULAR = {"weather": 30, "天气": 12, "time": 10} | dict.fromkeys(
    "forecast alarm timer reminder message search translate light".split(), 4)


def restyled(rng: random.Random, name: str) -> str:
    """The name as another programmer would write it: it can only be copied from the schema."""
    kind = rng.random()
    if kind < 0.1:
        return re.sub(r"_(\w)", lambda part: part[1].upper(), name)
    if kind < 0.16:
        return name.replace("_", rng.choice("-."))
    if kind < 0.3:
        word = rng.choice(["now", "tool", "v2", "api", "my", "service", "quick", "home", words.noun(rng)])
        return rng.choice([f"{name}_{word}", f"{word}_{name}"]).replace(" ", "_")
    if kind < 0.36:  # only the description says what it is for
        return rng.choice([words.invented(rng), f"tool_{rng.randint(1, 9)}", f"fn{rng.randint(1, 99)}",
                           words.noun(rng).replace(" ", "_")])
    return name


@dataclass
class Offer:
    """A tool with the names that it goes by in one conversation."""

    tool: Tool
    name: str
    names: dict[str, str]  # of the arguments
    types: dict[str, str]
    choices: dict[str, list[str]]
    schema: dict


def respelled(rng: random.Random, name: str) -> str:
    """The argument's name as another programmer would write it."""
    before, behind = "target new input the my wanted chosen this".split(), "name value text id param in field".split()
    if rng.random() < 0.5:
        name = f"{rng.choice(before)}_{name}" if rng.random() < 0.4 else f"{name}_{rng.choice(behind)}"
    else:
        name = rng.choice([f"{name}_{words.noun(rng).replace(' ', '_')}", name.capitalize(), name.upper(), name[:3]])
    return re.sub(r"_(\w)", lambda part: part[1].upper(), name) if rng.random() < 0.2 else name


# How a schema describes an argument; what it gives as an example is nothing to say.
PROPERTY = wording("property")


def offer(rng: random.Random, tool: Tool) -> Offer:
    """The tool under one of its names, each argument under one of its own that no other has."""
    names, types, choices, properties = {}, {}, {}, {}
    described = rng.random() < 0.35
    for key, (spellings, kind) in tool.arguments.items():
        if not spellings:
            continue
        name = rng.choice([name for name in spellings.split() if name not in properties] or [key])
        if tool.forms and name.isascii() and rng.random() < 0.12:
            name = next(other for other in (respelled(rng, name), name) if other not in properties)
        type_ = KINDS[kind][0] if kind in KINDS else kind.replace("enum", "string")
        if kind == "enum":
            choices[key] = [words.noun(rng) for _ in range(rng.randint(2, 4))]
            if rng.random() < 0.3:  # in the schema as programs write it, in the question as people do
                written = rng.choice([str.upper, words.capital,
                                      lambda noun: f"{rng.choice(words.english('adjective'))}_{noun}"])
                choices[key] = [written(noun) for noun in choices[key]]
        if "|" in type_:
            choices[key], type_ = type_.split("|"), "string"
        if type_ in ("number", "integer") and rng.random() < 0.15:
            type_ = "string"
        names[key], types[key] = name, type_
        properties[name] = {"type": type_} | ({"description": PROPERTY(rng).format(name.replace("_", " "))}
                                              if described else {})
        if key in choices:
            properties[name]["enum"] = choices[key]
    name = rng.choice(tool.names.split())
    if tool.forms:
        name = restyled(rng, name)
    parameters = {"type": "object", "properties": properties} | (
        {"required": [names[key] for key in names if rng.random() < (0.1 if key in tool.optional else 0.9)]}
        if rng.random() < 0.6 else {}
    )
    description = choose(rng, rng.choice(tool.descriptions))
    description = words.capital(description) + ("." if rng.random() < 0.15 else "") \
        if rng.random() < 0.7 else description
    function = {"name": name, "description": description, "parameters": parameters}
    return Offer(tool, name, names, types, choices, {"type": "function", "function": function})


def relative(rng: random.Random, tool: Tool) -> Tool:
    """A tool of the same field, or with the same verb for another thing, or, where every question names the verb, with
    another verb for the same thing."""
    near = [other for other in TOOLS if other.section == tool.section and other.label != tool.label]
    if near:
        return rng.choice(near)
    if tool.section and not words.chinese(tool.topic):
        same_thing = all(tool.section in question.split() for question in tool.questions) and rng.random() < 0.5
        return random_tool(rng, noun=tool.topic) if same_thing else random_tool(rng, tool.section)
    return random_tool(rng, zh=words.chinese(tool.topic))


def alike(one: Tool, two: Tool) -> bool:
    """Whether a question for one could be for the other."""
    if not (one.label and two.label):
        return bool({*one.topic.split()} & {*two.topic.split()})
    same_thing = one.topic != two.topic and (one.topic in two.topic.split() or two.topic in one.topic.split())
    return same_thing or one.label == two.label or bool({*one.names.split()} & {*two.names.split()})


def usual_tool(rng: random.Random, tools: list[Tool]) -> Tool:
    return rng.choices(tools, [POPULAR.get(tool.label, 1) for tool in tools])[0]


def offers_of(rng: random.Random, tools: list[Tool], invented: float) -> list[Offer]:
    """One to four tools; the first is the one that is asked for."""
    chosen = [random_tool(rng, zh=rng.random() < 0.12) if rng.random() < invented else usual_tool(rng, tools)]
    for _ in range(rng.choice([0, 0, 1, 1, 1, 1, 2, 2, 3])):
        near = chosen[0].label and rng.random() < 0.5
        other = relative(rng, chosen[0]) if near else random_tool(rng) if rng.random() < 0.25 else rng.choice(tools)
        if not any(alike(other, one) for one in chosen):
            chosen.append(other)
    offers: dict[str, Offer] = {}
    for tool in chosen:
        given = offer(rng, tool)
        offers.setdefault(given.name, given)
    return list(offers.values())


def spoken(given: Offer, key: str, choice: str) -> str:
    """The value of an enum as people say it."""
    return choice.replace("_", " ").lower() if given.tool.arguments[key][1] == "enum" else choice


def value_of(rng: random.Random, given: Offer, key: str, zh: bool) -> str:
    if key in given.choices:
        return spoken(given, key, rng.choice(given.choices[key]))
    kind = given.tool.arguments[key][1]
    if "sum" in given.tool.topic.split():
        return words.decimal(rng) if rng.random() < 0.15 else str(rng.randrange(10 ** rng.choice([1, 2, 3, 4])))
    return KINDS[kind + "_zh" if zh and kind + "_zh" in KINDS else kind][1](rng)


@dataclass
class ToolUse:
    """A question that needs a tool, from the tools on offer to the last answer."""

    question: str
    offered: list[dict]
    calls: list[dict]  # {"name": ..., "arguments": {...}}
    responses: list[str]
    answer: str
    expected: list[str]  # what the answer repeats of the responses
    tools: list[Tool]

    def asking(self) -> dict:
        return {"role": "user", "content": self.question}

    def calling(self) -> dict:
        calls = [{"type": "function", "function": call} for call in self.calls]
        return {"role": "assistant", "content": "",
                "reasoning_content": "I need " + " and ".join(call["name"] for call in self.calls) + ".",
                "tool_calls": calls}

    def messages(self) -> list[dict]:
        return [self.asking(), self.calling(),
                *({"role": "tool", "content": response} for response in self.responses),
                {"role": "assistant", "content": self.answer, "reasoning_content": "The tool has answered."}]


def parsed(text: str, kind: str):
    """The JSON value of a typed number; any other text stays as it is."""
    if kind == "boolean":
        return text == "true"
    if kind in ("number", "integer"):
        return float(text) if "." in text else int(text)
    return text


def arguments_of(given: Offer, pattern: str, implied: dict[str, str], fill: dict[str, str]) -> dict:
    """The call's arguments that the question names or implies, in the schema's order and spelling."""
    found = {}
    for key, name in given.names.items():
        if key in implied:
            found[name] = parsed(re.sub(r"\{(\w+)\}", lambda part: fill[part[1]], implied[key]), given.types[key])
        elif f"{{{key}}}" in pattern:
            said = next((choice for choice in given.choices.get(key, []) if spoken(given, key, choice) == fill[key]),
                        fill[key])
            found[name] = parsed(said, given.types[key])
    return found


def response_of(rng: random.Random, given: Offer) -> dict:
    draw = {
        "word": lambda r: r.choice("ok done sunny cloudy rainy windy snowy clear started sent delivered good open "
                                   "closed ready set saved".split()),
        "noun": lambda r: r.choice(words.chinese_nouns()),
        **{kind: pair[1] for kind, pair in KINDS.items()},
    }
    found = {}
    for key, kind in given.tool.results.items():
        text = draw[kind](rng)
        found[key] = parsed(text, KINDS.get(kind, ("string",))[0])
    if rng.random() < 0.25:
        found[words.noun(rng)] = rng.choice([words.noun(rng), rng.randrange(1000), round(rng.random() * 100, 1),
                                             words.invented(rng)])
    return found


def shown(value) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def in_words(call: dict, response, zh: bool) -> str:
    """The same sentence for every tool: the call's first text, then each field of the answer."""
    if isinstance(response, str):
        return response
    about = next((value for value in call["arguments"].values() if isinstance(value, str)), "")
    if zh:
        return (f"{about}：" if about else "") + "，".join(f"{key}是{shown(value)}"
                                                         for key, value in response.items()) + "。"
    fields = [f"the {key.replace('_', ' ')} is {shown(value)}" for key, value in response.items()]
    said = " and ".join([", ".join(fields[:-1]), fields[-1]] if len(fields) > 1 else fields) + "."
    return f"{about}: {said}" if about else words.capital(said)


def request(rng: random.Random, given: Offer) -> tuple[str, list[dict]]:
    """(a question that needs the tool, the calls that it needs)"""
    tool = given.tool
    if tool.forms:
        pattern, implied = compose(rng, tool)
    else:
        chosen = rng.choice(tool.questions)
        pattern, implied = chosen if isinstance(chosen, tuple) else (chosen, {})
        pattern = choose(rng, pattern)
    zh = words.chinese(pattern)
    keys = [key for key in tool.arguments if "{" + key + "}" in pattern + " ".join(implied.values())]
    fill = {key: value_of(rng, given, key, zh) for key in keys}
    moments = [key for key in tool.arguments if tool.arguments[key][1] in ("date", "clock")]
    for key in moments if tool.forms and not zh else []:
        if key in fill and len(moments) == 1 and rng.random() < 0.15:
            fill[key] = date_value(rng) + rng.choice([" at ", " "]) + words.clock(rng)
        if re.match("to|next|this|the", fill.get(key, "")):  # nobody says "on tomorrow"
            pattern = re.sub(rf"\b(on|at|by) \{{{key}\}}", f"{{{key}}}", pattern)
    free = any(tool.arguments[key][1] in FREE for key in keys)
    again = {}
    if keys and not implied and not given.choices and rng.random() < 0.2:
        pattern, again = doubled(rng, given, pattern, {key: fill[key] for key in keys}, zh)
    question, said = typed(rng, pattern, fill | again, copied=True, cased=not given.choices, framed=not free)
    calls = [{"name": given.name, "arguments": arguments_of(given, pattern, implied, said)}]
    if again:
        said |= {key: said[f"{key}_2"] for key in keys if f"{key}_2" in again}
        calls.append({"name": given.name, "arguments": arguments_of(given, pattern, implied, said)})
    return question, calls


def doubled(rng: random.Random, given: Offer, pattern: str, fill: dict[str, str], zh: bool
            ) -> tuple[str, dict[str, str]]:
    """(the pattern with values near each other asked for twice: "in {city} and {city_2}"; the second values)"""
    keys = list(fill) if rng.random() < 0.6 else [rng.choice(list(fill))]
    start = min(pattern.index(f"{{{key}}}") for key in keys)
    end = max(pattern.index(f"{{{key}}}") + len(key) + 2 for key in keys)
    kinds, between = {given.tool.arguments[key][1] for key in keys}, re.sub(r"\{\w+\}", "", pattern[start:end])
    again = {f"{key}_2": value_of(rng, given, key, zh) for key in keys}
    too_long = len(between) > 4 if zh else len(between.split()) > 2
    unclear = kinds & {"message", "message_zh", "task"} or (len(keys) > 1 and kinds & FREE)
    if too_long or unclear or re.search('["《“]', pattern) or any(again[f"{key}_2"] in fill[key]
                                                                 or fill[key] in again[f"{key}_2"] for key in keys):
        return pattern, {}
    before = pattern[:start].split()[-1:]
    joint = rng.choice(["和", "、", "还有"]) if zh else " and "
    if not zh and before and before[0] in ("in", "for", "to", "of", "at", "on", "from", "with") and rng.random() < 0.4:
        joint += before[0] + " "
    return pattern[:end] + joint + re.sub(r"\{(\w+)\}", r"{\1_2}", pattern[start:end]) + pattern[end:], again


def both(rng: random.Random, first: str, calls: list[dict], second: str, more_calls: list[dict]) -> str:
    """Two requests in one message. After a value of several words, only a new sentence shows its end."""
    ends = any(len(shown(value).split()) > 1 and first.rstrip("?.!").endswith(shown(value))
               for value in calls[-1]["arguments"].values())
    if words.chinese(first):
        return first.rstrip("。？?") + rng.choice(["，", "，再", "，然后", "，还有", "。", "，顺便"]) + second
    if ends or rng.random() < 0.3:
        return first + ("" if first[-1] in "?.!" else ".") + " " + second
    if not any(second.startswith(shown(value)) for call in more_calls for value in call["arguments"].values()) \
            and second[:2] not in ("I ", "I'"):
        second = second[0].lower() + second[1:]
    return first.rstrip("?.! ") + rng.choice([" and ", " and ", " and ", ", then ", ", and ", " and also ", ", ",
                                              " and then ", "; "]) + second


def tool_talk(rng: random.Random, count: int, tools: list[Tool] = TOOLS, invented: float = 0.15) -> list[ToolUse]:
    """`count` questions to the same tools, the first of which is asked first."""
    offers = offers_of(rng, tools, invented)
    listed = [each.schema for each in offers]
    rng.shuffle(listed)
    uses = []
    for i in range(count):
        given = rng.choice(offers) if i else offers[0]
        question, calls = request(rng, given)
        asked = [given] * len(calls)
        if len(calls) == 1 and count > 1 and rng.random() < 0.12:
            other = rng.choice(offers)
            more, more_calls = request(rng, other)
            if words.chinese(more) == words.chinese(question):
                question = both(rng, question, calls, more, more_calls)
                calls, asked = [*calls, *more_calls], [*asked, *[other] * len(more_calls)]
        responses = [response_of(rng, each) for each in asked]
        if rng.random() < 0.12:
            responses = [rng.choice(["{a}, {b}", "{a}", "{a} {b}"]).format(a=KINDS["text"][1](rng), b=number_value(rng))
                         for _ in calls]
        zh = words.chinese(question)
        uses.append(ToolUse(
            question, listed, calls,
            [response if isinstance(response, str) else json.dumps(response, ensure_ascii=False)
             for response in responses],
            ("" if zh else " ").join(in_words(call, response, zh) for call, response in zip(calls, responses)),
            [shown(value) for response in responses
             for value in ([response] if isinstance(response, str) else response.values())],
            [each.tool for each in offers]))
    return uses


def tool_use(rng: random.Random, tools: list[Tool] = TOOLS, invented: float = 0.5) -> ToolUse:
    """One question that needs a tool."""
    return tool_talk(rng, 1, tools, invented)[0]


ANYTHING = {"search", "wiki", "搜索"}  # tools that are for whatever one wants to know


def misfit(rng: random.Random, use: ToolUse) -> str | None:
    """A question for a tool of a field from which none is offered; None where what is offered may be for anything."""
    sections, labels = {tool.section for tool in use.tools}, {tool.label for tool in use.tools}
    zh = "中文" in sections
    if labels & ANYTHING or not all(sections) or (zh and len(sections) > 1):
        return None
    if zh:  # all of one section: relatives share a character of a label
        said = {tool.label: set("".join([tool.label, *tool.descriptions])) for tool in TOOLS if tool.section == "中文"}
        others = [tool for tool in TOOLS if tool.label in said
                  and not any({*tool.label} & said[one] or {*one} & said[tool.label] for one in labels)]
    else:
        others = [tool
                  for tool in TOOLS if tool.section not in sections | {"sums", "中文"} and tool.label not in ANYTHING]
    others = [tool for tool in others if not any({*tool.topic.split()} & {*one.topic.split()} for one in use.tools)]
    return request(rng, offer(rng, usual_tool(rng, others)))[0]
