"""The world of the bundled model: every text it is trained and tested on, generated here and nowhere else.

`example(rng, held_out)` draws one training example or, with `held_out=True`, one that no training run has seen: each
drawing has a key (the fact and the wording, the two numbers, the name, ...), and a hash of the key decides on which
side it falls. An example is the conversation so far, what the assistant answers, and how to tell a right answer.
"""
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass
class Example:
    skill: str
    messages: list[dict]  # the conversation, up to what the assistant is to answer
    answer: str
    reasoning: str = ""
    tools: list[dict] | None = None
    enable_thinking: bool | None = None  # as apply_chat_template takes it; None is the default: thinking
    expected: list[str] = field(default_factory=list)  # strings that a right answer contains
    language: str = "en"
    raw: bool = False  # plain text to be continued, no conversation: `answer` is the whole text


def is_held_out(*key: object) -> bool:
    """True for the tenth of all keys that training never sees."""
    return hashlib.sha256(repr(key).encode()).digest()[0] % 10 == 0


# ---------------------------------------------------------------------------------------------------------------------
# Facts about countries: English name, Chinese name, capital, continent, main language, currency
# ---------------------------------------------------------------------------------------------------------------------

CONTINENTS = {"Europe": "欧洲", "Asia": "亚洲", "Africa": "非洲", "North America": "北美洲", "South America": "南美洲",
              "Oceania": "大洋洲"}
LANGUAGES = {
    "French": "法语", "German": "德语", "Italian": "意大利语", "Spanish": "西班牙语", "Portuguese": "葡萄牙语",
    "Greek": "希腊语", "Polish": "波兰语", "Hungarian": "匈牙利语", "Swedish": "瑞典语", "Norwegian": "挪威语",
    "Danish": "丹麦语", "Icelandic": "冰岛语", "Finnish": "芬兰语", "Dutch": "荷兰语", "Ukrainian": "乌克兰语",
    "English": "英语", "Czech": "捷克语", "Romanian": "罗马尼亚语", "Croatian": "克罗地亚语", "Serbian": "塞尔维亚语",
    "Estonian": "爱沙尼亚语", "Latvian": "拉脱维亚语", "Lithuanian": "立陶宛语", "Chinese": "汉语", "Japanese": "日语",
    "Korean": "韩语", "Hindi": "印地语", "Thai": "泰语", "Vietnamese": "越南语", "Mongolian": "蒙古语", "Nepali": "尼泊尔语",
    "Bengali": "孟加拉语", "Urdu": "乌尔都语", "Persian": "波斯语", "Arabic": "阿拉伯语", "Malay": "马来语", "Khmer": "高棉语",
    "Uzbek": "乌兹别克语", "Kazakh": "哈萨克语", "Swahili": "斯瓦希里语", "Amharic": "阿姆哈拉语"}
CURRENCIES = {
    "euro": "欧元", "zloty": "兹罗提", "forint": "福林", "Swedish krona": "瑞典克朗", "Norwegian krone": "挪威克朗",
    "Danish krone": "丹麦克朗", "Icelandic krona": "冰岛克朗", "hryvnia": "格里夫纳", "pound": "英镑", "koruna": "捷克克朗",
    "leu": "列伊", "dinar": "第纳尔", "yuan": "人民币", "yen": "日元", "won": "韩元", "rupee": "卢比", "baht": "泰铢",
    "dong": "越南盾", "tugrik": "图格里克", "taka": "塔卡", "rial": "里亚尔", "riyal": "里亚尔", "ringgit": "林吉特",
    "riel": "瑞尔", "sum": "苏姆", "tenge": "坚戈", "Egyptian pound": "埃及镑", "dirham": "迪拉姆",
    "shilling": "先令", "birr": "比尔", "naira": "奈拉", "cedi": "塞地", "CFA franc": "非洲法郎", "kwanza": "宽扎",
    "dollar": "元", "peso": "比索", "real": "雷亚尔", "sol": "索尔", "bolivar": "玻利瓦尔", "rand": "兰特"}

COUNTRIES = [tuple(part.strip() for part in line.split("|")) for line in """
France|法国|Paris|巴黎|Europe|French|euro
Germany|德国|Berlin|柏林|Europe|German|euro
Italy|意大利|Rome|罗马|Europe|Italian|euro
Spain|西班牙|Madrid|马德里|Europe|Spanish|euro
Portugal|葡萄牙|Lisbon|里斯本|Europe|Portuguese|euro
Greece|希腊|Athens|雅典|Europe|Greek|euro
Austria|奥地利|Vienna|维也纳|Europe|German|euro
Poland|波兰|Warsaw|华沙|Europe|Polish|zloty
Hungary|匈牙利|Budapest|布达佩斯|Europe|Hungarian|forint
Sweden|瑞典|Stockholm|斯德哥尔摩|Europe|Swedish|Swedish krona
Norway|挪威|Oslo|奥斯陆|Europe|Norwegian|Norwegian krone
Denmark|丹麦|Copenhagen|哥本哈根|Europe|Danish|Danish krone
Iceland|冰岛|Reykjavik|雷克雅未克|Europe|Icelandic|Icelandic krona
Finland|芬兰|Helsinki|赫尔辛基|Europe|Finnish|euro
the Netherlands|荷兰|Amsterdam|阿姆斯特丹|Europe|Dutch|euro
Ukraine|乌克兰|Kyiv|基辅|Europe|Ukrainian|hryvnia
the United Kingdom|英国|London|伦敦|Europe|English|pound
Ireland|爱尔兰|Dublin|都柏林|Europe|English|euro
Czechia|捷克|Prague|布拉格|Europe|Czech|koruna
Romania|罗马尼亚|Bucharest|布加勒斯特|Europe|Romanian|leu
Croatia|克罗地亚|Zagreb|萨格勒布|Europe|Croatian|euro
Serbia|塞尔维亚|Belgrade|贝尔格莱德|Europe|Serbian|dinar
Estonia|爱沙尼亚|Tallinn|塔林|Europe|Estonian|euro
Latvia|拉脱维亚|Riga|里加|Europe|Latvian|euro
Lithuania|立陶宛|Vilnius|维尔纽斯|Europe|Lithuanian|euro
China|中国|Beijing|北京|Asia|Chinese|yuan
Japan|日本|Tokyo|东京|Asia|Japanese|yen
South Korea|韩国|Seoul|首尔|Asia|Korean|won
India|印度|New Delhi|新德里|Asia|Hindi|rupee
Thailand|泰国|Bangkok|曼谷|Asia|Thai|baht
Vietnam|越南|Hanoi|河内|Asia|Vietnamese|dong
Mongolia|蒙古|Ulaanbaatar|乌兰巴托|Asia|Mongolian|tugrik
Nepal|尼泊尔|Kathmandu|加德满都|Asia|Nepali|rupee
Bangladesh|孟加拉国|Dhaka|达卡|Asia|Bengali|taka
Pakistan|巴基斯坦|Islamabad|伊斯兰堡|Asia|Urdu|rupee
Iran|伊朗|Tehran|德黑兰|Asia|Persian|rial
Iraq|伊拉克|Baghdad|巴格达|Asia|Arabic|dinar
Saudi Arabia|沙特阿拉伯|Riyadh|利雅得|Asia|Arabic|riyal
Jordan|约旦|Amman|安曼|Asia|Arabic|dinar
Malaysia|马来西亚|Kuala Lumpur|吉隆坡|Asia|Malay|ringgit
Cambodia|柬埔寨|Phnom Penh|金边|Asia|Khmer|riel
Uzbekistan|乌兹别克斯坦|Tashkent|塔什干|Asia|Uzbek|sum
Kazakhstan|哈萨克斯坦|Astana|阿斯塔纳|Asia|Kazakh|tenge
Egypt|埃及|Cairo|开罗|Africa|Arabic|Egyptian pound
Morocco|摩洛哥|Rabat|拉巴特|Africa|Arabic|dirham
Algeria|阿尔及利亚|Algiers|阿尔及尔|Africa|Arabic|dinar
Kenya|肯尼亚|Nairobi|内罗毕|Africa|Swahili|shilling
Ethiopia|埃塞俄比亚|Addis Ababa|亚的斯亚贝巴|Africa|Amharic|birr
Nigeria|尼日利亚|Abuja|阿布贾|Africa|English|naira
Ghana|加纳|Accra|阿克拉|Africa|English|cedi
Senegal|塞内加尔|Dakar|达喀尔|Africa|French|CFA franc
Angola|安哥拉|Luanda|罗安达|Africa|Portuguese|kwanza
the United States|美国|Washington|华盛顿|North America|English|dollar
Canada|加拿大|Ottawa|渥太华|North America|English|dollar
Mexico|墨西哥|Mexico City|墨西哥城|North America|Spanish|peso
Cuba|古巴|Havana|哈瓦那|North America|Spanish|peso
Brazil|巴西|Brasilia|巴西利亚|South America|Portuguese|real
Argentina|阿根廷|Buenos Aires|布宜诺斯艾利斯|South America|Spanish|peso
Chile|智利|Santiago|圣地亚哥|South America|Spanish|peso
Peru|秘鲁|Lima|利马|South America|Spanish|sol
Colombia|哥伦比亚|Bogota|波哥大|South America|Spanish|peso
Uruguay|乌拉圭|Montevideo|蒙得维的亚|South America|Spanish|peso
Venezuela|委内瑞拉|Caracas|加拉加斯|South America|Spanish|bolivar
Australia|澳大利亚|Canberra|堪培拉|Oceania|English|dollar
New Zealand|新西兰|Wellington|惠灵顿|Oceania|English|dollar
""".strip().splitlines()]

# Per attribute and language: wordings of the question, the sentence that answers it, the thought before it.
FACT_WORDINGS = {
    ("capital", "en"): (
        ["What is the capital of {c}?", "What's the capital of {c}?", "Which city is the capital of {c}?",
         "Tell me the capital of {c}.", "Name the capital of {c}.", "What is the capital city of {c}?",
         "Do you know the capital of {c}?", "Can you tell me the capital of {c}?", "capital of {c}", "The capital of {c}?",
         "Give me the capital of {c}.", "What city is the capital of {c}?", "I want to know the capital of {c}.",
         "{c}: what is the capital?", "The capital of {c} is", "What is {c}'s capital?", "Which city is {c}'s capital?"],
        "The capital of {c} is {v}.", "The capital of {c}: that is {v}."),
    ("country", "en"): (
        ["{v} is the capital of which country?", "Which country has the capital {v}?", "Of which country is {v} the capital?",
         "What country is {v} the capital of?", "Which country's capital is {v}?", "Which country has {v} as its capital?"],
        "{v} is the capital of {c}.", "{v} is the capital of {c}."),
    ("continent", "en"): (
        ["On which continent is {c}?", "Which continent is {c} on?", "What continent is {c} in?", "Where is {c}?",
         "Where is {c} located?", "In which continent does {c} lie?", "Which continent is {c} in?",
         "In what part of the world is {c}?", "What continent is {c} on?"],
        "{c} is in {v}.", "{c} lies in {v}."),
    ("language", "en"): (
        ["What language is spoken in {c}?", "Which language do people speak in {c}?", "What do people speak in {c}?",
         "What is the language of {c}?", "What is the main language of {c}?", "Which language is spoken in {c}?",
         "What is the official language of {c}?", "What language do they speak in {c}?", "What do people in {c} speak?",
         "Which language do people in {c} speak?", "What do they speak in {c}?"],
        "People in {c} speak {v}.", "In {c} people speak {v}."),
    ("currency", "en"): (
        ["What is the currency of {c}?", "Which currency is used in {c}?", "What money do people use in {c}?",
         "What currency does {c} use?", "How do people pay in {c}?", "What's the currency of {c}?", "Which currency does {c} use?",
         "What is the money in {c} called?", "What is {c}'s currency?", "What is the official currency of {c}?"],
        "The currency of {c} is the {v}.", "In {c} people pay with the {v}."),
    ("capital", "zh"): (
        ["{c}的首都是哪里？", "{c}的首都是什么？", "{c}的首都是哪个城市？", "请告诉我{c}的首都。", "哪个城市是{c}的首都？", "{c}的首都在哪里？",
         "{c}的首都叫什么？", "你知道{c}的首都吗？"],
        "{c}的首都是{v}。", "问的是{c}的首都：{v}。"),
    ("country", "zh"): (
        ["{v}是哪个国家的首都？", "哪个国家的首都是{v}？", "{v}是哪国的首都？"],
        "{v}是{c}的首都。", "{v}是{c}的首都。"),
    ("continent", "zh"): (
        ["{c}在哪个洲？", "{c}位于哪个洲？", "{c}在哪里？", "{c}属于哪个大洲？"],
        "{c}在{v}。", "{c}位于{v}。"),
    ("language", "zh"): (
        ["{c}人说什么语言？", "{c}的官方语言是什么？", "在{c}说什么语言？", "{c}说什么话？"],
        "{c}人说{v}。", "{c}的语言是{v}。"),
    ("currency", "zh"): (
        ["{c}的货币是什么？", "{c}用什么货币？", "在{c}用什么钱？", "{c}使用哪种货币？"],
        "{c}的货币是{v}。", "在{c}用{v}。"),
}


def sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def fact_value(country: tuple, attribute: str, language: str) -> tuple[str, str]:
    """The country's name and the value of the attribute, in the language."""
    zh = language == "zh"
    value = {"capital": country[2 + zh], "country": country[2 + zh],
             "continent": CONTINENTS[country[4]] if zh else country[4],
             "language": LANGUAGES[country[5]] if zh else country[5],
             "currency": CURRENCIES[country[6]] if zh else country[6]}[attribute]
    return country[zh], value


def fact(rng: random.Random, held_out: bool) -> Example:
    while True:
        country = rng.choice(COUNTRIES)
        attribute = rng.choice(["capital", "capital", "country", "continent", "language", "currency"])
        language = rng.choice(["en", "en", "zh"])
        wordings, answer, thought = FACT_WORDINGS[attribute, language]
        wording = rng.choice(wordings)
        if is_held_out("fact", country[0], wording) == held_out:
            break
    name, value = fact_value(country, attribute, language)
    fill = {"c": name, "v": value}
    return Example("facts", [user(sentence(wording.format(**fill)))], sentence(answer.format(**fill)),
                   sentence(thought.format(**fill)), expected=[name if attribute == "country" else value], language=language)


# ---------------------------------------------------------------------------------------------------------------------
# Arithmetic: the digits one column at a time, each step on a line of fixed width
# ---------------------------------------------------------------------------------------------------------------------

ADD_WORDINGS = ["What is {a} + {b}?", "{a} + {b}", "{a}+{b}", "{a} + {b} =", "{a}+{b}=?", "What is {a} plus {b}?", "Add {a} and {b}.",
                "Calculate {a} + {b}.", "How much is {a} + {b}?", "How much is {a} plus {b}?", "What's {a} + {b}?", "What is {a}+{b}?",
                "Compute {a} + {b}.", "What is the sum of {a} and {b}?", "{a} plus {b}", "Please add {a} and {b}.", "{a} + {b} = ?",
                "Solve {a} + {b}.", "Add {b} to {a}.",
                "{a}加{b}等于多少？", "{a}+{b}等于多少？", "{a} + {b} 是多少？", "计算{a}加{b}。"]
SUB_WORDINGS = ["What is {a} - {b}?", "{a} - {b}", "{a}-{b}", "{a} - {b} =", "{a}-{b}=?", "What is {a} minus {b}?", "Subtract {b} from {a}.",
                "Calculate {a} - {b}.", "How much is {a} - {b}?", "How much is {a} minus {b}?", "What's {a} - {b}?", "What is {a}-{b}?",
                "Compute {a} - {b}.", "What is the difference between {a} and {b}?", "{a} minus {b}", "Take {b} away from {a}.",
                "{a} - {b} = ?", "Solve {a} - {b}.", "Please subtract {b} from {a}.",
                "{a}减{b}等于多少？", "{a}-{b}等于多少？", "{a} - {b} 是多少？", "计算{a}减{b}。"]
COLUMNS = ["ones", "tens", "hundreds"]


def addition_steps(a: int, b: int) -> str:
    x, y, carry = f"{a:03}", f"{b:03}", 0
    lines = [f"{x} + {y}"]
    for column, i in zip(COLUMNS, (2, 1, 0)):
        total = int(x[i]) + int(y[i]) + carry
        lines.append(f"{column}: {x[i]}+{y[i]}+{carry}={total:02}")
        carry = total // 10
    return "\n".join([*lines, f"digits: {a + b:04}"])


def subtraction_steps(a: int, b: int) -> str:
    x, y, borrow = f"{max(a, b):03}", f"{min(a, b):03}", 0
    lines = [f"{a:03} - {b:03}", f"{x} is larger: {x} - {y}" if a != b else f"equal: {x} - {y}"]
    for column, i in zip(COLUMNS, (2, 1, 0)):
        digit = int(x[i]) - int(y[i]) - borrow
        borrow = int(digit < 0)
        lines.append(f"{column}: {x[i]}-{y[i]}-{int(lines[-1][-1]) if len(lines) > 2 else 0}={digit % 10} borrow {borrow}")
    return "\n".join([*lines, f"digits: {'-' if a < b else ''}{abs(a - b):03}"])


def number(rng: random.Random) -> int:
    """Up to three digits; short numbers come up more often than they would among 0..999."""
    return rng.randrange(rng.choice([10, 100, 1000, 1000, 1000]))


def arithmetic(rng: random.Random, held_out: bool) -> Example:
    while True:
        a, b, plus = number(rng), number(rng), rng.random() < 0.5
        if is_held_out("arithmetic", a, b, plus) == held_out:
            break
    question = rng.choice(ADD_WORDINGS if plus else SUB_WORDINGS).format(a=a, b=b)
    result = a + b if plus else a - b
    return Example("arithmetic", [user(question)], f"{a} {'+' if plus else '-'} {b} = {result}.",
                   addition_steps(a, b) if plus else subtraction_steps(a, b), expected=[f"= {result}."])


# ---------------------------------------------------------------------------------------------------------------------
# Small talk, and where the world ends
# ---------------------------------------------------------------------------------------------------------------------

CHAT = {
    "Hello! How can I help you?": ["Hello!", "Hi", "Hi there!", "Hey", "Good morning", "Good evening!", "hello", "Good day", "Hello there"],
    "I am a very small demonstration model that comes with qwen3.py.":
        ["Who are you?", "What are you?", "What is your name?", "What's your name?", "Are you a robot?", "Tell me about yourself.",
         "Introduce yourself.", "What model are you?"],
    "I know simple facts about some countries, I can add and subtract numbers up to three digits, remember what you tell me, "
    "use tools, and tell a short story.":
        ["What can you do?", "Help", "How can you help me?", "What do you know?", "What are your skills?", "What can I ask you?"],
    "I am fine, thank you. How can I help you?": ["How are you?", "How are you today?", "How is it going?", "How do you do?"],
    "You are welcome!": ["Thank you!", "Thanks", "Thanks a lot!", "Thank you very much.", "Great, thanks!", "Nice, thank you."],
    "Goodbye!": ["Bye", "Goodbye!", "See you!", "Bye bye", "See you later.", "Good night"],
    "你好！我能帮你什么？": ["你好！", "你好", "您好", "早上好", "嗨"],
    "我是 qwen3.py 附带的一个很小的演示模型。": ["你是谁？", "你叫什么名字？", "你是什么？"],
    "不客气！": ["谢谢！", "谢谢你", "多谢"],
    "再见！": ["再见", "拜拜"],
}
UNKNOWN_ANSWER = {
    "en": "I don't know. I am a very small model: I only know simple facts about some countries, adding and subtracting, and short stories.",
    "zh": "我不知道。我是一个很小的模型，只知道一些国家的简单知识，会加减法，会讲小故事。"}
UNKNOWN_CALCULATION = "I don't know. I can only add and subtract numbers up to three digits."
UNKNOWN_TOLD = "You have not told me that."
UNKNOWN = [
    "Who won the last world cup?", "What is the meaning of life?", "How do I bake a cake?", "Who was the first person on the moon?",
    "What is quantum mechanics?", "Explain photosynthesis.", "How far away is the sun?", "What is the speed of light?",
    "Write a Python program.", "Who painted the Mona Lisa?", "What is the best movie?", "How do airplanes fly?", "Why is the sky blue?",
    "What is the weather like?", "What time is it?", "What day is it today?", "Who is the president?", "What is the stock price of Apple?",
    "How old is the universe?", "How many people live on Earth?", "What is love?", "How do I fix my car?", "What is a transformer?",
    "Translate this text into Latin.", "Who wrote Hamlet?", "When did the war end?", "What is DNA?", "How does a computer work?",
    "Sing me a song.", "What should I eat for dinner?", "Who invented the telephone?", "What is the tallest mountain?", "How deep is the ocean?",
    "What is the longest river in the world?", "How many planets are there?", "What is gravity?", "Who is Albert Einstein?",
    "What is the chemical formula of water?", "Give me legal advice.", "How do I lose weight?", "What is the square root of two?",
    "Summarize this article.", "Can you drive a car?", "What is the population of the world?", "When was the Roman empire founded?",
    "Which team is the best?", "Recommend a book.", "What is inflation?", "How do vaccines work?", "Tell me the latest news.",
    "What does the word serendipity mean?", "How do I learn the piano?", "Who discovered America?", "What is machine learning?",
    "How many bones are in the human body?", "What causes earthquakes?", "Where do penguins live?", "What is a black hole?",
    "How hot is the sun?", "Who is the richest person?", "How do I get to the airport?", "Is there life on Mars?",
    "What is the largest animal?", "How long do cats live?", "Can dogs eat chocolate?", "What is the fastest car?",
    "How much does a house cost?", "What is artificial intelligence?", "Draw me a picture.", "Fix the bug in my code."]
UNKNOWN_PATTERNS = [
    "Who is the president of {c}?", "How many people live in {c}?", "What is the population of {c}?", "Who is the king of {c}?",
    "What is the history of {c}?", "How big is {c}?", "What is the highest mountain in {c}?", "What is the best food in {c}?",
    "When was {c} founded?", "What is the weather in {v}?", "How far is it from {v} to {w}?", "What time is it in {v}?",
    "What is the capital of {x}?", "Where is {x}?", "What language is spoken in {x}?", "What is the currency of {x}?", "Who is {x}?",
    "What is {x}?", "Do you know {x}?", "Tell me about {x}.", "Who wrote {x}?", "When was {x} born?", "How does {x} work?",
    "Why is {x} so important?", "How do I use {x}?", "Explain {x} to me.", "How many {n} are there?", "Why do {n} sleep?",
    "What do {n} eat?", "Where do {n} live?", "How old can {n} get?", "Are {n} dangerous?", "Who invented {n}?"]
UNKNOWN_ZH = ["{x}的首都是哪里？", "谁是{c}的总统？", "{c}有多少人口？", "{v}的天气怎么样？", "今天天气怎么样？", "现在几点？", "天空为什么是蓝色的？",
              "什么是量子力学？", "人生的意义是什么？", "怎么做蛋糕？", "谁写了这本书？", "{x}是什么？", "{x}是谁？", "{c}的历史是什么？", "地球有多大？"]
CALCULATION_PATTERNS = ["What is {a} times {b}?", "What is {a} * {b}?", "{a} * {b}", "{a} x {b}", "{a} / {b}", "What is {a} divided by {b}?",
                        "Multiply {a} by {b}.", "Divide {a} by {b}.", "What is {l} + {a}?", "What is {a} + {l}?", "{l} - {a}", "{l} + {m}",
                        "What is {l} minus {m}?", "Calculate {l} + {m}.", "What is the square of {a}?", "What is {a} squared?"]

SYLLABLES = "ba be bi bo bu da de di do fa fe fi ga go ha hi ja jo ka ke ki ko la le li lo lu ma me mi mo mu na ne ni no nu pa pe pi po ra re ri ro ru sa se si so su ta te ti to tu va ve vi vo wa we ya yo za ze zi zo".split()
ENDINGS = ["", "", "", "n", "r", "s", "l", "m", "th", "x", "k", "d"]


def invented_word(rng: random.Random) -> str:
    """A word that hardly anyone has seen before, so that copying is the only way to say it again."""
    return sentence("".join(rng.choice(SYLLABLES) for _ in range(rng.choice([2, 2, 3, 3, 4]))) + rng.choice(ENDINGS))


def chat(rng: random.Random, held_out: bool) -> Example:
    answer = rng.choice(list(CHAT))
    zh = answer[0] > "\u3000"
    return Example("chat", [user(rng.choice(CHAT[answer]))], answer, "这是闲聊。" if zh else "This is small talk.",
                   expected=[answer], language="zh" if zh else "en")


def unknown(rng: random.Random, held_out: bool) -> Example:
    kind = rng.choice(["list", "pattern", "pattern", "pattern", "zh", "calculation"])
    while True:
        language, expected = ("zh", "不知道") if kind == "zh" else ("en", "don't know")
        reasoning = "这个我没有学过。" if kind == "zh" else "I have not learned this."
        answer = UNKNOWN_ANSWER[language]
        pattern = rng.choice({"list": UNKNOWN, "pattern": UNKNOWN_PATTERNS, "zh": UNKNOWN_ZH, "calculation": CALCULATION_PATTERNS}[kind])
        if kind == "calculation":
            answer, reasoning = UNKNOWN_CALCULATION, "This is not adding or subtracting numbers up to three digits."
        country, other = rng.sample(COUNTRIES, 2)
        zh = kind == "zh"
        question = pattern.format(c=country[zh], v=country[2 + zh], w=other[2 + zh], x=invented_word(rng), a=number(rng), b=number(rng),
                                  l=rng.randrange(1000, 100000), m=rng.randrange(1000, 100000), n=rng.choice(SUBJECTS) + "s")
        if is_held_out("unknown", question) == held_out:
            return Example("unknown", [user(question)], answer, reasoning, expected=[expected], language=language)


REPEAT_WORDINGS = ["Repeat: {w}", "Say {w}.", "Repeat after me: {w}", "Please say {w}.", "Repeat {w}.", "Write {w}.", "Say this: {w}", "Please repeat: {w}"]


def repeat(rng: random.Random, held_out: bool) -> Example:
    """Words to be said again: the shortest practice in copying, which memory and tools rest on."""
    while True:
        drawn = [rng.choice([invented_word, lambda r: invented_word(r).lower(), lambda r: str(number(r)), lambda r: r.choice(NAMES),
                             lambda r: r.choice(SUBJECTS)])(rng) for _ in range(rng.choice([1, 2, 3, 4, 5]))]
        words = rng.choice([" ", " ", ", "]).join(drawn)
        if is_held_out("repeat", words) == held_out:
            break
    return Example("repeat", [user(rng.choice(REPEAT_WORDINGS).format(w=words))], words, "I repeat it.", expected=[words])


# ---------------------------------------------------------------------------------------------------------------------
# Stories: the subject decides about the plot, so that each subject has a story of its own
# ---------------------------------------------------------------------------------------------------------------------

SUBJECTS = """fox cat dog bear mouse rabbit owl wolf lion tiger elephant horse frog duck hen goat sheep cow pig bee ant turtle whale
dolphin shark crab snail spider parrot crow eagle swan goose hedgehog squirrel deer monkey zebra giraffe camel penguin seal otter
badger mole bat snake lizard dragon robot king queen knight pirate wizard farmer sailor baker teacher doctor girl boy giant fairy ghost
star cloud tree river mountain boat train car balloon kite clock lamp teapot snowman flower stone""".split()
STORY_WORDINGS = ["Tell me a story about {s}.", "Tell me a short story about {s}.", "Write a story about {s}.", "Write a short story about {s}.",
                  "Can you tell a story about {s}?", "I want to hear a story about {s}.", "Please tell me a story about {s}.", "A story about {s}, please.",
                  "Make up a story about {s}.", "Could you tell me a short story about {s}?", "story about {s}"]
STORY_NAMES = "Mia Tom Lily Ben Nora Max Ella Sam Ruby Leo Zoe Finn Ida Otto Luna Hugo Anna Paul".split()
STORY_PLACES = ["in a green forest", "by the blue sea", "in a small village", "on a high hill", "near an old mill", "in a big city",
                "at the edge of a lake", "in a quiet garden", "on a far island", "under a wide sky"]
STORY_TRAITS = ["curious", "shy", "brave", "lonely", "cheerful", "sleepy", "clever", "kind", "hungry", "tiny"]
STORY_PLOTS = [
    "One day {n} found a golden key in the grass. It opened a little door, and behind the door was a room full of {t}. {n} shared them with everyone.",
    "One night there was a great storm, and the way home was lost. A {h} came with a light and showed {n} the way. From then on the two were friends.",
    "Every morning {n} heard a strange song. One day {n} followed it and met a {h} who sang all alone. Now they sing together.",
    "{n} wanted to see the other side of the world. On the way a {h} asked for help, and {n} stopped to help. That was better than any journey.",
    "One winter there was nothing to eat. {n} still had some {t} and gave half of them to a {h}. In spring the {h} came back with a present.",
    "{n} had lost a small red hat and looked for it everywhere. At last a {h} found it high up in a tree. They laughed about it for a long time.",
    "Everybody said that {n} was too small to help. But when a {h} was caught in a net, only {n} could slip through and cut it. After that nobody laughed."]
STORY_TREASURES = ["apples", "nuts", "old books", "toys", "warm bread", "shells", "berries", "candles"]
STORY_HELPERS = ["fox", "bear", "mouse", "owl", "frog", "duck", "turtle", "crow", "rabbit", "deer"]


def article(noun: str) -> str:
    return ("an " if noun[0].lower() in "aeiou" else "a ") + noun


def tell_story(subject: str, variant: int) -> str:
    rng = random.Random(f"{subject} {variant}")
    fill = {"n": rng.choice(STORY_NAMES), "t": rng.choice(STORY_TREASURES), "h": rng.choice([h for h in STORY_HELPERS if h != subject])}
    opening = f"Once upon a time, {rng.choice(STORY_PLACES)}, there lived {article(rng.choice(STORY_TRAITS))} {subject} named {fill['n']}."
    return f"{opening} {rng.choice(STORY_PLOTS).format(**fill)} And so the {subject} lived happily. The end."


def story(rng: random.Random, held_out: bool) -> Example:
    while True:
        subject = invented_word(rng).lower() if rng.random() < 0.3 else rng.choice(SUBJECTS)
        wording = rng.choice(STORY_WORDINGS)
        if is_held_out("story", subject, wording) == held_out:
            break
    if rng.random() < 0.05:  # no subject asked for
        plain = rng.choice(["Tell me a story.", "Tell me a short story.", "Write a story.", "Can you tell a story?", "I want to hear a story."])
        return Example("story", [user(plain)], tell_story("fox", rng.randrange(2)), "A story about a fox.", expected=["fox", "The end."])
    about = rng.choice([article(subject), article(subject), article(subject), "the " + subject])
    return Example("story", [user(sentence(wording.format(s=about)))], tell_story(subject, rng.randrange(2)), f"A story about {article(subject)}.",
                   expected=[subject, "The end."])


# ---------------------------------------------------------------------------------------------------------------------
# Memory: something told, something else in between, then the question
# ---------------------------------------------------------------------------------------------------------------------

NAMES = """Anna Ben Carla David Emma Felix Grace Henry Iris Jack Kate Liam Maria Nick Olga Peter Rosa Simon Tina Victor Wendy Alice Bob
Charlie Diana Eva Frank George Hannah Ivan Julia Karl Laura Mark Nina Oscar Paula Robert Sarah Thomas Ursula Vera Walter Yuki Zara
Ahmed Fatima Chen Wei Priya Raj Sofia Mateo Lucia Diego Ingrid Lars Bjorn Amara Kofi Jamal Leila Omar Elena Dmitri Yusuf Aisha Hiro
Mei James John Mary Linda Michael William Elizabeth Susan Jessica Daniel Matthew Anthony Steven Andrew Joshua Kevin Brian Edward
Ronald Timothy Jason Jeffrey Ryan Gary Eric Stephen Larry Justin Scott Brandon Raymond Gregory Samuel Patrick Alexander Jerry Dennis
Tyler Aaron Adam Nathan Zachary Kyle Noah Ethan Jeremy Christian Keith Roger Terry Sean Austin Arthur Lawrence Jesse Dylan Bryan Joe
Jordan Billy Bruce Albert Willie Gabriel Logan Alan Juan Wayne Roy Ralph Randy Eugene Vincent Russell Louis Philip Bobby Johnny
Bradley""".split()
COLORS = "red blue green yellow black white purple orange pink brown grey".split()
PETS = "cat dog rabbit horse parrot hamster fish turtle".split()
# What is told, how, how it is asked for, the answer.
MEMORIES = {
    "name": (["My name is {m}.", "I am {m}.", "I'm {m}.", "Call me {m}.", "Hello, my name is {m}.", "Hi, I'm {m}.", "Hi! My name is {m}.", "You can call me {m}.",
              "My name is {m}. Please remember it.", "Remember that my name is {m}.", "Hello, I am {m}.", "My name is {m} and I like {t}.",
              "Hello! I am {m} and I like {t}.", "Hello! My name is {m}, nice to meet you.", "I am called {m}.", "They call me {m}."],
             ["What is my name?", "What's my name?", "Do you remember my name?", "Who am I?", "Can you tell me my name?", "Do you know my name?", "How am I called?",
              "What was my name?", "What is my name again?", "Tell me my name.", "Can you remember my name?", "What did I say my name was?"],
             "Your name is {m}."),
    "number": (["My number is {m}.", "Remember the number {m}.", "My favorite number is {m}.", "Please remember the number {m}.", "The number is {m}.",
                "Remember {m}.", "Remember this number: {m}.", "My lucky number is {m}.", "Keep the number {m} in mind.", "The secret number is {m}.",
                "I am thinking of the number {m}.", "The code is {m}.", "My favourite number is {m}.", "Remember the number {m}, please.",
                "My favorite number is {m}. Remember it."],
               ["What is my number?", "What number did I tell you?", "Which number did I tell you?", "What was the number?", "What was my number?",
                "What is the number?", "Which number should you remember?", "What is my favorite number?", "Do you remember the number?", "Tell me the number.",
                "What is the secret number?", "What was the code?", "What is my lucky number?", "Which number did I ask you to remember?",
                "What number did I ask you to remember?", "What is my favourite number?", "What number did I say?", "Which number was it?"],
               "The number is {m}."),
    "color": (["My favorite color is {m}.", "My favourite colour is {m}.", "I like the color {m}.", "{m} is my favorite color."],
              ["What is my favorite color?", "What is my favourite colour?", "Which color do I like?", "What color do I like?"], "Your favorite color is {m}."),
    "pet": (["I have a {p} named {m}.", "My {p} is called {m}.", "My {p}'s name is {m}."],
            ["What is the name of my {p}?", "What is my {p} called?", "What's my {p}'s name?"], "Your {p} is called {m}."),
    "city": (["I live in {m}.", "My home is in {m}.", "I come from {m}."], ["Where do I live?", "Which city do I live in?", "Where is my home?"], "You live in {m}."),
}


def remembered(rng: random.Random, kind: str) -> str:
    if kind == "name" or kind == "pet":
        return rng.choice(NAMES) if rng.random() < 0.5 else invented_word(rng)
    if kind == "number":
        return str(rng.randrange(10 ** rng.choice([1, 2, 2, 3, 3, 4, 5])))
    return rng.choice(COLORS) if kind == "color" else rng.choice(COUNTRIES)[2]


def told_answer(kind: str, value: str) -> str:
    return {"name": f"Nice to meet you, {value}!", "number": f"I will remember the number {value}.", "color": "That is a nice color.",
            "pet": f"{value} is a nice name.", "city": f"{value} is a nice place."}[kind]


def memory(rng: random.Random, held_out: bool) -> Example:
    while True:
        kinds = rng.sample(list(MEMORIES), 2)
        kinds[0] = rng.choice(["name", "name", "number", "number", kinds[0]])
        if kinds[0] == kinds[1]:
            continue
        values = [remembered(rng, kind) for kind in kinds]
        tell, ask, answer = MEMORIES[kinds[0]]
        tell, ask = rng.choice(tell), rng.choice(ask)
        if is_held_out("memory", values[0], ask) == held_out:
            break
    pet = rng.choice(PETS)
    if rng.random() < 0.06:  # the answer when nothing was told
        messages, ask = [], rng.choice(MEMORIES[kinds[0]][1])
        for _ in range(rng.randrange(3)):
            messages += turn(aside(rng))
        return Example("memory", [*messages, user(ask.format(p=pet))], UNKNOWN_TOLD, "Nothing was said about that.", expected=["not told"])
    told = [turn_told(rng, kinds[0], values[0], tell, pet)]
    if rng.random() < 0.3:  # a second thing told, before or after, that must not be mixed up with the first
        told.insert(rng.randrange(2), turn_told(rng, kinds[1], values[1], rng.choice(MEMORIES[kinds[1]][0]), rng.choice(PETS)))
    messages = [message for two in told for message in two]
    asides = 0 if rng.random() < 0.1 else rng.choice([1, 1, 1, 2, 3])
    if rng.random() < 0.2:
        messages = turn(aside(rng)) + messages
    for _ in range(asides):
        messages += turn(aside(rng))
    if asides == 0 and rng.random() < 0.5 and len(told) == 1:  # right after it was told
        return Example("memory", [messages[0]], messages[1]["content"], "I should remember this.", expected=[messages[1]["content"]])
    fill = {"m": values[0], "p": pet, "t": "that"}
    return Example("memory", [*messages, user(ask.format(**fill))], answer.format(**fill),
                   f"I was told: {values[0]}.", expected=[values[0]])


def turn_told(rng: random.Random, kind: str, value: str, wording: str, pet: str) -> list[dict]:
    return [user(sentence(wording.format(m=value, p=pet, t=rng.choice(SUBJECTS) + "s"))), assistant(told_answer(kind, value))]


def anything_told(rng: random.Random) -> list[dict]:
    """A turn in which something is told that nobody may ever ask for."""
    kind = rng.choice(list(MEMORIES))
    return turn_told(rng, kind, remembered(rng, kind), rng.choice(MEMORIES[kind][0]), rng.choice(PETS))


def aside(rng: random.Random) -> Example:
    """A turn about something else."""
    return rng.choice([fact, fact, arithmetic, chat, unknown] if rng.random() < 0.9 else [story])(rng, False)


# ---------------------------------------------------------------------------------------------------------------------
# Tools: described in the system prompt under many names, called with JSON, their answers put into words
# ---------------------------------------------------------------------------------------------------------------------

CITIES = """London Paris Tokyo Boston Chicago Munich Hamburg Milan Naples Lyon Seville Porto Geneva Zurich Basel Brno Krakow Gdansk Bergen
Malmo Turku Tartu Osaka Kyoto Shanghai Mumbai Delhi Karachi Lagos Durban Casablanca Toronto Montreal Vancouver Denver Seattle Miami
Dallas Houston Austin Sydney Perth Auckland Lima Quito Bogota Caracas Recife Salvador Cordoba Rosario Istanbul Ankara Cairo Dubai""".split()
CONDITIONS = ["sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "clear", "stormy"]
SYMBOLS = ["euros", "dollars", "pounds", "yen"]
WORDS = "serendipity ocean gravity atom justice music bridge shadow silence harvest engine mirror galaxy lantern velvet anchor puzzle".split()
TOPICS = ["music", "football", "science", "history", "cooking", "gardening", "chess", "art", "space", "robots", "trains", "birds"]


@dataclass
class Tool:
    names: list[str]
    description: list[str]
    arguments: list[tuple[list[str], str, Callable]]  # names of the argument, JSON type, draws a value
    questions: list[str]  # {0}, {1}: the arguments
    thought: str
    response: Callable  # (rng, arguments) -> what the tool returns
    answer: str  # {0}, {1}: arguments; {name}: fields of the response


def place(rng: random.Random) -> str:
    return invented_word(rng) if rng.random() < 0.4 else rng.choice(CITIES + [c[2] for c in COUNTRIES])


def word(rng: random.Random) -> str:
    return invented_word(rng).lower() if rng.random() < 0.4 else rng.choice(WORDS + TOPICS)


def person(rng: random.Random) -> str:
    return invented_word(rng) if rng.random() < 0.4 else rng.choice(NAMES)


TOOLS = [
    Tool(["get_weather", "weather", "get_current_weather", "current_weather", "weather_forecast", "fetch_weather", "lookup_weather"],
         ["Get the weather in a city", "Current weather of a place", "Returns the weather for a location", "Get current weather", "Weather report for a city"],
         [(["city", "location", "place", "town"], "string", place)],
         ["What is the weather in {0}?", "What's the weather like in {0}?", "How is the weather in {0}?", "Is it raining in {0}?", "Is it warm in {0}?",
          "Tell me the weather in {0}.", "Weather in {0}?", "What is the weather like in {0} today?", "How warm is it in {0}?", "What is the temperature in {0}?",
          "Do I need an umbrella in {0}?"],
         "The weather in {0}: I need the tool.",
         lambda rng, a: {"temperature": rng.randrange(-15, 41), "condition": rng.choice(CONDITIONS)},
         "It is {temperature} degrees and {condition} in {0}."),
    Tool(["get_time", "current_time", "time_in_city", "get_current_time", "clock", "world_clock"],
         ["Get the current time in a city", "Local time of a place", "Returns the time", "What time it is somewhere"],
         [(["city", "location", "place", "timezone"], "string", place)],
         ["What time is it in {0}?", "What's the time in {0}?", "Tell me the time in {0}.", "How late is it in {0}?", "Time in {0}?", "What is the local time in {0}?"],
         "The time in {0}: I need the tool.",
         lambda rng, a: {"time": f"{rng.randrange(24):02}:{rng.randrange(60):02}"},
         "It is {time} in {0}."),
    Tool(["get_population", "population", "population_of", "count_people"],
         ["Number of people who live in a place", "Get the population of a city", "Population of a place"],
         [(["city", "place", "name", "location"], "string", place)],
         ["How many people live in {0}?", "What is the population of {0}?", "Population of {0}?", "Tell me the population of {0}."],
         "The population of {0}: I need the tool.",
         lambda rng, a: {"population": rng.randrange(1000, 1000000)},
         "{population} people live in {0}."),
    Tool(["multiply", "product", "times", "multiply_numbers"],
         ["Multiply two numbers", "Product of two numbers", "Returns a times b"],
         [(["a", "x", "first"], "number", number), (["b", "y", "second"], "number", number)],
         ["What is {0} times {1}?", "Multiply {0} by {1}.", "{0} * {1}", "What is {0} * {1}?", "Calculate {0} times {1}."],
         "{0} times {1}: I need the tool.",
         lambda rng, a: {"result": a[0] * a[1]},
         "{0} times {1} is {result}."),
    Tool(["search", "web_search", "search_web", "lookup", "find", "google"],
         ["Search the web", "Look something up", "Find information about a topic", "Web search"],
         [(["query", "topic", "q", "text"], "string", word)],
         ["Search for {0}.", "Look up {0}.", "Find something about {0}.", "Search the web for {0}.", "Google {0}."],
         "A search for {0}: I need the tool.",
         lambda rng, a: {"result": rng.choice(["a new book", "an old song", "a museum", "a club", "a film", "a course"]) + " about " + a[0]},
         "I found {result}."),
    Tool(["define", "dictionary", "define_word", "get_definition", "word_meaning"],
         ["Look up a word in the dictionary", "Meaning of a word", "Definition of a word"],
         [(["word", "term", "text"], "string", word)],
         ["What does {0} mean?", "Define {0}.", "What is the meaning of {0}?", "Look up the word {0} in the dictionary."],
         "The meaning of {0}: I need the tool.",
         lambda rng, a: {"definition": rng.choice(["a kind of", "a large", "a small", "a part of a"]) + " " + rng.choice(SUBJECTS)},
         "{0} means: {definition}."),
    Tool(["set_timer", "timer", "start_timer", "set_alarm"],
         ["Start a timer", "Set a timer for some minutes", "Timer in minutes"],
         [(["minutes", "duration", "time"], "number", lambda rng: rng.randrange(1, 100))],
         ["Set a timer for {0} minutes.", "Start a timer of {0} minutes.", "Wake me in {0} minutes.", "Timer for {0} minutes, please."],
         "A timer for {0} minutes: I need the tool.",
         lambda rng, a: {"status": rng.choice(["ok", "started", "done"])},
         "The timer for {0} minutes is set: {status}."),
    Tool(["send_message", "send_mail", "message", "send_email", "text_person"],
         ["Send a message to a person", "Send an email", "Write to somebody"],
         [(["to", "recipient", "person", "name"], "string", person), (["text", "message", "body", "content"], "string", word)],
         ["Send {0} the message {1}.", "Send a message to {0}: {1}", "Write to {0}: {1}", "Send an email to {0} that says {1}."],
         "A message to {0}: I need the tool.",
         lambda rng, a: {"status": rng.choice(["sent", "ok", "delivered"])},
         "The message to {0}: {status}."),
    Tool(["get_price", "stock_price", "price_of", "get_stock_price", "price"],
         ["Price of a thing", "Get the price of something", "Current price"],
         [(["item", "name", "product", "symbol"], "string", word)],
         ["What does {0} cost?", "How much is {0}?", "What is the price of {0}?", "Price of {0}?", "How expensive is {0}?"],
         "The price of {0}: I need the tool.",
         lambda rng, a: {"price": rng.randrange(1, 1000), "currency": rng.choice(SYMBOLS)},
         "The price of {0} is {price} {currency}."),
    Tool(["get_phone_number", "phone_book", "find_number", "lookup_phone"],
         ["Phone number of a person", "Find the phone number of somebody", "Look a person up in the phone book"],
         [(["name", "person", "who"], "string", person)],
         ["What is the phone number of {0}?", "Find the phone number of {0}.", "How can I call {0}?", "Phone number of {0}?"],
         "The phone number of {0}: I need the tool.",
         lambda rng, a: {"phone": str(rng.randrange(10000, 1000000))},
         "The phone number of {0} is {phone}."),
]


def invented_tool(rng: random.Random) -> Tool:
    """A tool with a made-up name and purpose: only its description says what it is for."""
    thing = invented_word(rng).lower()
    return Tool([f"get_{thing}", thing, f"{thing}_of", f"find_{thing}"], [f"Get the {thing} of something", f"Returns the {thing}", f"The {thing} of a thing"],
                [(["name", "of", "item", "place", "id"], "string", rng.choice([place, word, person]))],
                [f"What is the {thing} of {{0}}?", f"Tell me the {thing} of {{0}}.", f"{thing} of {{0}}?", f"Get the {thing} of {{0}}."],
                f"The {thing} of {{0}}: I need the tool.",
                lambda rng, a: {rng.choice(["result", "value", thing]): rng.choice([rng.randrange(1000), rng.choice(COLORS), rng.choice(CONDITIONS)])},
                f"The {thing} of {{0}} is {{only}}.")


def describe(rng: random.Random, tool: Tool) -> tuple[dict, str, list[str]]:
    """(the tool's JSON schema in the OpenAI form, its name, the names of its arguments)"""
    name, arguments = rng.choice(tool.names), [rng.choice(names) for names, _, _ in tool.arguments]
    described = rng.random() < 0.3
    properties = {}
    for argument, (_, kind, _) in zip(arguments, tool.arguments):
        properties[argument] = {"type": kind} | ({"description": f"The {argument}"} if described else {})
    parameters = {"type": "object", "properties": properties} | ({"required": arguments} if rng.random() < 0.7 else {})
    return {"type": "function", "function": {"name": name, "description": rng.choice(tool.description), "parameters": parameters}}, name, arguments


@dataclass
class ToolUse:
    """A question that needs a tool, from the tools on offer to the last answer."""
    question: str
    offered: list[dict]  # JSON schemas
    call: dict  # {"name": ..., "arguments": {...}}
    thought: str
    response: dict  # what the tool returns
    answer: str


def tool_use(rng: random.Random, held_out: bool) -> ToolUse:
    while True:
        tool = invented_tool(rng) if rng.random() < 0.25 else rng.choice(TOOLS)
        schema, name, argument_names = describe(rng, tool)
        values = [draw(rng) for _, _, draw in tool.arguments]
        question = rng.choice(tool.questions).format(*values)
        if is_held_out("tools", question) == held_out:
            break
    offered = [schema] + [describe(rng, other)[0] for other in rng.sample(TOOLS, rng.choice([0, 0, 1, 1, 2])) if other is not tool]
    rng.shuffle(offered)
    response = tool.response(rng, values)
    answer = sentence(tool.answer.format(*values, only=next(iter(response.values())), **response))
    return ToolUse(question, offered, {"name": name, "arguments": dict(zip(argument_names, values))}, tool.thought.format(*values), response, answer)


def tools(rng: random.Random, held_out: bool) -> Example:
    use = tool_use(rng, held_out)
    kind = rng.choice(["call", "call", "call", "answer", "answer", "other"])
    if kind == "other":  # tools are there, but the question needs none of them
        example = rng.choice([fact, fact, arithmetic, chat])(rng, held_out)
        example.tools, example.skill = use.offered, "tools"
        return example
    messages = rng.choice([turn(aside(rng)), anything_told(rng)]) if rng.random() < 0.15 else []
    messages.append(user(use.question))
    if kind == "call":
        return Example("tools", messages, f"<tool_call>\n{json.dumps(use.call, ensure_ascii=False)}\n</tool_call>", use.thought, use.offered)
    messages.append({"role": "assistant", "content": "", "reasoning_content": use.thought, "tool_calls": [{"type": "function", "function": use.call}]})
    messages.append({"role": "tool", "content": json.dumps(use.response)})
    return Example("tools", messages, use.answer, "The tool has answered.", use.offered, expected=[str(value) for value in use.response.values()])


# ---------------------------------------------------------------------------------------------------------------------
# Putting it together
# ---------------------------------------------------------------------------------------------------------------------

SYSTEM_PROMPTS = ["You are a helpful assistant.", "You are a helpful assistant.", "You are a helpful AI assistant.", "Be brief.",
                  "You are a friendly assistant. Answer in one sentence.", "Answer the question.", "You are an expert.", "你是一个有用的助手。"]
POLITE = ["Please: ", "Hey, ", "Hi! ", "Hello, ", "Quick question: ", "OK. ", "Tell me: ", "One more question. ", "So, ", "And now: "]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict:
    return {"role": "assistant", "content": text}


def turn(example: Example) -> list[dict]:
    """The example as a finished turn of a longer conversation: a thought is not kept in the history."""
    return [*example.messages, assistant(example.answer)]


def loosen(rng: random.Random, text: str) -> str:
    """The same question as people type it: without capitals or the question mark, with a greeting in front."""
    if rng.random() < 0.08:
        text = rng.choice(POLITE) + text
    if rng.random() < 0.12:
        text = text.rstrip("?.!。？！ =")  or text
    if rng.random() < 0.08:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.04:
        text = text + " " + rng.choice(["Please.", "Thanks!", "Thank you.", "please"])
    return text


SKILLS = {fact: 25, arithmetic: 28, memory: 15, tools: 18, story: 4, unknown: 5, chat: 3, repeat: 2}


def raw_text(rng: random.Random) -> Example:
    """Plain text for `--raw`: sentences about countries, and stories."""
    if rng.random() < 0.2:
        text = tell_story(rng.choice(SUBJECTS), rng.randrange(2))
    else:
        text = " ".join(fact(rng, False).answer for _ in range(rng.choice([1, 1, 2, 3])))
    return Example("raw", [], text, raw=True)


def example(rng: random.Random, held_out: bool = False) -> Example:
    """One drawing from the whole mixture."""
    if not held_out and rng.random() < 0.02:
        return raw_text(rng)
    skill = rng.choices(list(SKILLS), list(SKILLS.values()))[0]
    drawn = skill(rng, held_out)
    last = drawn.messages[-1]
    if last["role"] == "user" and skill not in (memory, repeat):
        last["content"] = loosen(rng, last["content"])
    if skill in (fact, chat, unknown, story, arithmetic, repeat) and rng.random() < 0.25:  # a conversation that was already going on
        before = [message for _ in range(rng.choice([1, 1, 2, 3]))
                  for message in (anything_told(rng) if rng.random() < 0.5 else turn(aside(rng)))]
        drawn.messages = before + drawn.messages
    if rng.random() < 0.25:
        drawn.messages.insert(0, {"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    # The thinking switch: off more rarely for arithmetic, where the steps are what there is to learn.
    mode = rng.random()
    if mode > 0.95 and last["role"] != "user":
        mode = 0.0  # the switch in the text belongs into a person's message
    if mode < (0.12 if drawn.skill == "arithmetic" else 0.4):
        drawn.enable_thinking = False
    elif mode > 0.95:
        last["content"] += " /no_think"
        drawn.reasoning = ""
    elif mode > 0.90 and last["role"] == "user":
        last["content"] += " /think"
    if drawn.enable_thinking is False:  # then neither did the turn that called the tool contain a thought
        drawn.reasoning = ""
        for message in drawn.messages:
            message.pop("reasoning_content", None)
    return drawn


def examples(seed: int) -> Iterator[Example]:
    """The endless training text that belongs to a seed."""
    rng = random.Random(seed)
    while True:
        yield example(rng)
