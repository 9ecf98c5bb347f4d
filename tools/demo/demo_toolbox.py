"""Tools like those that people write, and what their arguments may be: the stock of demo_tools.py."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import demo_words as words
from demo_typing import choose


def text_value(rng: random.Random) -> str:
    return " ".join(
        rng.choice([words.noun, words.noun, words.invented, lambda r: r.choice(words.english("adjective"))])(rng)
        for _ in range(rng.choice([1, 1, 2, 3]))
    )


def message_value(rng: random.Random) -> str:
    return (
        choose(
            rng,
            rng.choice(
                [
                    "I am (late|here|at home|on my way|sick)",
                    "see you (tomorrow|at {t}|later|there)",
                    "(happy birthday|good luck|thank you|call me)",
                    "the {n} is (ready|here|broken|lost)",
                    "(dinner|lunch|the party) is at {t}",
                    "bring the {n}",
                ]
            ),
        )
        .replace("{t}", words.clock(rng))
        .replace("{n}", words.noun(rng))
    )


def code_value(rng: random.Random) -> str:
    return "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ0123456789") for _ in range(rng.randint(3, 8)))


def date_value(rng: random.Random) -> str:
    return rng.choice(
        [
            f"2026-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}",
            rng.choice("Monday Tuesday Wednesday Thursday Friday Saturday Sunday tomorrow today tonight".split()),
            f"{rng.choice('January February March April May June July August'.split())} {rng.randint(1, 28)}",
        ]
    )


def number_value(rng: random.Random) -> str:
    return words.decimal(rng) if rng.random() < 0.25 else words.whole(rng)


# What a value may be: its JSON type, how it is drawn.
KINDS: dict[str, tuple[str, Callable[[random.Random], str]]] = {
    "city": ("string", words.city),
    "person": ("string", words.name),
    "boolean": ("boolean", lambda r: ""),
    "clock": ("string", words.clock),
    "text": ("string", text_value),
    "message": ("string", message_value),
    "code": ("string", code_value),
    "date": ("string", date_value),
    "number": ("number", number_value),
    "whole": ("integer", words.whole),
    "minutes": ("integer", lambda r: str(r.randrange(1, 120))),
    "tongue": ("string", lambda r: r.choice("French German Spanish English Chinese Latin Japanese Italian Russian Dutch Greek Polish".split())),
    "currency": ("string", lambda r: r.choice("euros dollars pounds yen USD EUR GBP JPY CHF francs pesos rupees".split())),
    "switch": ("on|off", lambda r: r.choice(["on", "off"])),
    "lock": ("lock|unlock", lambda r: r.choice(["lock", "unlock"])),
    "unit": ("celsius|fahrenheit", lambda r: ""),
    "room": ("string", lambda r: r.choice(["kitchen", "bedroom", "living room", "bathroom", "garage", "hall", "office", "garden", words.noun(r)])),
    "tongue_zh": ("string", lambda r: r.choice("英语 法语 德语 日语 西班牙语 俄语 意大利语".split())),
    "city_zh": ("string", words.chinese_city),
    "person_zh": ("string", words.chinese_name),
    "noun_zh": ("string", lambda r: r.choice(words.chinese_nouns())),
}


@dataclass
class Tool:
    """`arguments`: name -> (names in the schema, kind); `questions` name them in braces. A question may come with values that
    it only implies: ("double {x}", {"factor": "2"})."""

    names: str
    descriptions: list[str]
    arguments: dict[str, tuple[str, str]]
    questions: list
    results: dict[str, str] = field(default_factory=dict)  # key -> kind
    topic: str = ""


TOOLS = [
    Tool(
        "get_weather weather get_current_weather current_weather weather_forecast fetchWeather lookup_weather weather-api getForecast",
        [
            "Get the (current |)weather (in|of|for) a (city|place|location)",
            "(Current |)weather (report|forecast|conditions) for a (location|city)",
            "Returns the (temperature|weather|forecast)",
        ],
        {"c": ("city location place town q", "city"), "u": ("unit units scale", "unit")},
        [
            "(What is|Tell me) the (weather|temperature) in {c} in {u}?",
            "weather {c} in {u}",
            "(What is|What's|How is|Tell me) the weather( like|) in {c}( today| now|)?",
            "(Is it|Will it be) (raining|warm|cold|sunny|snowing|windy|hot|foggy|nice) in {c}( right now| now| today| tomorrow|)?",
            "weather (in|for|) {c}",
            "{c} weather",
            "(How|What) (warm|cold|hot) is it in {c}?",
            "(What is|Tell me) the temperature in {c}( now|)?",
            "(Do I need|Should I take|Will I need) (an umbrella|a coat|a jacket|sunglasses) in {c}?",
            "Will it (rain|snow) in {c}( today| tomorrow|)?",
            "I am (going|flying) to {c}. How is the weather( there|)?",
            "How's the weather in {c}?",
            "Give me the forecast for {c}.",
        ],
        {"temperature": "number", "condition": "word"},
        "weather",
    ),
    Tool(
        "get_weather query_weather weather tianqi",
        ["查询城市的天气", "获取天气", "Get the weather in a city"],
        {"c": ("city location 城市", "city_zh")},
        [
            "{c}(今天|现在|)(的|)天气(怎么样|如何|好吗|)？",
            "(查|查一下|告诉我|请问){c}的天气。",
            "{c}(今天|明天|)(会|)下雨吗？",
            "{c}(冷|热)吗？",
            "{c}现在多少度？",
        ],
        {"temperature": "number", "condition": "noun_zh"},
        "weather",
    ),
    Tool(
        "get_time current_time time_in_city get_current_time world_clock clock getLocalTime",
        ["(Get|Returns) the (current|local) time (in|of) a (city|place)", "Local time of a place"],
        {"c": ("city location place timezone", "city")},
        [
            "(What time is it|How late is it|What is the time|What's the time|What is the local time) in {c}( now| right now|)?",
            "(Tell me the |)time in {c}",
            "{c} time",
            "Is it (night|morning|late|noon) in {c}?",
        ],
        {"time": "clock"},
        "time",
    ),
    Tool(
        "set_alarm alarm create_alarm alarm_clock wake_up add_alarm",
        ["(Set|Create|Add) an alarm( clock|)( for a time|)", "Wake the user at a time"],
        {"t": ("time at alarm_time when hour", "clock"), "x": ("label name title", "text")},
        [
            "Wake me( up|) at {t}.",
            "(Set|Create|Make|Add) an alarm (for|at) {t}( please|).",
            "Alarm at {t}",
            "I (must|have to|need to|want to) get up at {t}.",
            "(Can|Could) you wake me at {t}?",
            "Set an alarm for {t} called {x}.",
            "Ring at {t}.",
            "alarm {t}",
        ],
        {"status": "word"},
        "alarm wake",
    ),
    Tool(
        "set_timer timer start_timer countdown startTimer",
        ["(Start|Set) a timer( for some minutes|)", "Countdown in minutes"],
        {"m": ("minutes duration time length", "minutes")},
        [
            "(Set|Start|Make) a timer (for|of) {m} minutes.",
            "Timer( for|) {m} minutes",
            "(Wake|Call|Remind) me in {m} minutes.",
            "Count down {m} minutes.",
            "{m} minutes, please",
            "{m} minute timer",
        ],
        {"status": "word"},
        "timer minutes",
    ),
    Tool(
        "calculate calculator calc evaluate compute math eval_expression do_math",
        ["(Calculate|Evaluate) (an|a mathematical|a math) expression", "Calculator", "Does arithmetic"],
        {"e": ("expression formula input expr query", "text"), "a": ("", "number"), "b": ("", "number")},
        [
            (f"{p}{op}{s}", {"e": "{a} " + sign + " {b}"})
            for op, sign in [
                ("{a} times {b}", "*"),
                ("{a} * {b}", "*"),
                ("{a} x {b}", "*"),
                ("{a} plus {b}", "+"),
                ("{a} + {b}", "+"),
                ("{a} minus {b}", "-"),
                ("{a} - {b}", "-"),
                ("{a} divided by {b}", "/"),
                ("{a} / {b}", "/"),
                ("{a} multiplied by {b}", "*"),
            ]
            for p, s in [("(What is|What's|How much is) ", "?"), ("", ""), ("(Calculate|Compute|Solve) ", "."), ("", "( =|?|=)")]
        ],
        {"result": "number"},
        "sum",
    ),
    Tool(
        "multiply product times multiply_numbers mul",
        ["Multiply two numbers", "(Product|The product) of two numbers", "Returns a times b"],
        {"a": ("a x first num1 left", "number"), "b": ("b y second num2 right", "number")},
        [
            "(What is|What's|How much is|Calculate|) {a} (times|multiplied by|*|x) {b}?",
            "(Multiply|Please multiply) {a} (by|and|with) {b}.",
            "(What is the |)product of {a} and {b}",
        ],
        {"result": "number"},
        "sum",
    ),
    Tool(
        "add sum add_numbers plus addition",
        ["Add two numbers", "(Sum|The sum) of two numbers"],
        {"a": ("a x first num1", "number"), "b": ("b y second num2", "number")},
        [
            "(What is|What's|How much is|Calculate|) {a} (plus|+|and) {b}?",
            "(Add|Please add) {a} (to|and|with) {b}.",
            "(What is the |)sum of {a} and {b}",
        ],
        {"result": "number"},
        "sum",
    ),
    Tool(
        "divide quotient division div",
        ["Divide two numbers", "Divides a by b"],
        {"a": ("a x dividend numerator", "number"), "b": ("b y divisor denominator", "number")},
        ["(What is|How much is|Calculate|) {a} (divided by|/|over) {b}?", "Divide {a} by {b}."],
        {"result": "number"},
        "sum",
    ),
    Tool(
        "convert_currency exchange currency_converter convertMoney exchange_rate",
        ["Convert (money|an amount) (from one currency to another|between currencies)", "Currency converter"],
        {"a": ("amount value sum", "number"), "f": ("from from_currency source base", "currency"), "t": ("to to_currency target", "currency")},
        [
            "(Convert|Change|Exchange) {a} {f} (to|into|in) {t}.",
            "(How much is|How much are|What is|What are) {a} {f} in {t}?",
            "{a} {f} (in|to) {t}",
            "How many {t} (are|is|do I get for) {a} {f}?",
        ],
        {"result": "number"},
        "currency money pay",
    ),
    Tool(
        "translate translate_text translator translation",
        ["Translate (a text|text|words)( into a language|)"],
        {"x": ("text sentence phrase input", "text"), "l": ("language target_language to target", "tongue")},
        ["(Translate|Put) {x} (into|to|in) {l}.", "How do you say {x} in {l}?", "What is {x} in {l}?", "(Say|Give me) {x} in {l}.", "{x} in {l}"],
        {"translation": "text"},
        "translate language speak",
    ),
    Tool(
        "search web_search search_web lookup find google searchInternet query",
        ["Search the (web|internet)", "(Look something up|Find information)( about a topic| online|)"],
        {"q": ("query q topic text search_term", "text")},
        [
            "(Search|Look|Google) for {q}.",
            "Look up {q}.",
            "(Search|Google) {q}",
            "Find (something|information|articles|news) (about|on) {q}.",
            "Search the (web|internet) for {q}.",
            "What can you find (about|on) {q}?",
        ],
        {"result": "text"},
        "search about",
    ),
    Tool(
        "define dictionary define_word get_definition word_meaning",
        ["(Look up|Find) (a word|the meaning of a word)( in the dictionary|)", "Definition of a word"],
        {"w": ("word term text", "text")},
        ["What does {w} mean?", "Define {w}.", "(What is the |)(meaning|definition) of {w}", "Look up the word {w}.", "What is the meaning of {w}?"],
        {"definition": "text"},
        "define mean",
    ),
    Tool(
        "send_message send_mail message send_email text_person sendSms email",
        ["Send (a message|an email|a text)( to a person| to somebody|)", "Write to somebody"],
        {"p": ("to recipient person name contact", "person"), "m": ("text message body content", "message")},
        [
            "(Send|Write|Give) {p} (the|a) message(:|) {m}",
            "Send a message to {p}: {m}",
            "(Write|Text|Message|Email|Tell) {p}: {m}",
            "(Tell|Text|Message) {p} that {m}.",
            "Send an (email|SMS|message) to {p} (saying|that says) {m}.",
            "Let {p} know that {m}.",
        ],
        {"status": "word"},
        "message tell",
    ),
    Tool(
        "call_person phone_call call make_call dial",
        ["(Call|Phone) (a person|somebody|a contact)", "Makes a phone call"],
        {"p": ("name person contact who", "person")},
        [
            "(Call|Phone|Ring|Dial) {p}( please| now|).",
            "(Can|Could) you (call|phone) {p}?",
            "I want to (talk to|speak to|call) {p}.",
            "Make a call to {p}.",
        ],
        {"status": "word"},
        "call",
    ),
    Tool(
        "get_price stock_price price_of get_stock_price price getQuote",
        ["(Current |Get the |)price of (a thing|something|a product|a stock)"],
        {"i": ("item name product symbol ticker", "text")},
        ["(What does|How much does) {i} cost?", "How (much|expensive) is {i}?", "(What is the |)price of {i}", "{i} price"],
        {"price": "number", "currency": "currency"},
        "price cost",
    ),
    Tool(
        "create_event add_event calendar add_to_calendar schedule newEvent",
        ["(Add|Create) (an event|an appointment|a calendar entry)", "Put something into the calendar"],
        {"x": ("title name event summary", "text"), "d": ("date day when", "date"), "t": ("time start start_time", "clock")},
        [
            "(Add|Put|Schedule|Plan|Create) {x} (on|for) {d} at {t}.",
            "(Add|Put) {x} (to|into|in) my calendar (on|for) {d}.",
            "Schedule {x} {d} at {t}.",
            "I have {x} on {d} at {t}, note it.",
            "(Create|Make) an event {x} on {d}.",
        ],
        {"status": "word"},
        "calendar event",
    ),
    Tool(
        "add_reminder remind reminder set_reminder remind_me",
        ["(Set|Add|Create) a reminder", "Reminds the user of something"],
        {"x": ("text task message what", "message"), "t": ("time when at", "clock")},
        ["Remind me at {t}: {x}", "Remind me at {t} that {x}.", "(Set|Add) a reminder for {t}: {x}", "At {t} remind me: {x}"],
        {"status": "word"},
        "remind",
    ),
    Tool(
        "book_flight find_flights search_flights flight flights",
        ["(Book|Find|Search) (a flight|flights)( between two cities|)"],
        {"f": ("from origin departure from_city", "city"), "t": ("to destination arrival to_city", "city"), "d": ("date day when", "date")},
        [
            "(Book|Find|Search) (a flight|flights|a plane) from {f} to {t}.",
            "I (want|need|have) to fly from {f} to {t}( on {d}|).",
            "(Flights|flight) from {f} to {t}( on {d}|)",
            "(Is there|Are there) (a flight|flights) from {f} to {t}( on {d}|)?",
            "Fly me from {f} to {t}.",
        ],
        {"flight": "code", "price": "number"},
        "flight fly",
    ),
    Tool(
        "get_distance distance route how_far distance_between directions",
        ["(Distance|The distance) between two (places|cities)", "How far it is from one place to another"],
        {"f": ("from origin start a", "city"), "t": ("to destination end b", "city")},
        [
            "How far is it from {f} to {t}?",
            "(What is|Tell me) the distance (between {f} and {t}|from {f} to {t})?",
            "How (far|many kilometers) is {t} from {f}?",
            "(Distance|distance) {f} to {t}",
            "How do I get from {f} to {t}?",
        ],
        {"kilometers": "number"},
        "far distance",
    ),
    Tool(
        "play_music play play_song music start_music playTrack",
        ["Play (music|a song|some music)", "Starts a song"],
        {"s": ("song title track name query", "text"), "p": ("artist singer band", "person")},
        ["Play {s}( please|).", "Play (the song |)(|a song called ){s}.", "Play {s} by {p}.", "I want to hear {s} by {p}.", "(Put on|Start) {s}."],
        {"status": "word"},
        "play music",
    ),
    Tool(
        "switch_light lights set_light light_switch turn_light control_lights",
        ["(Turn|Switch) (the lights|a light|a lamp) on or off"],
        {"r": ("room place where location", "room"), "s": ("state status power switch", "switch")},
        [
            "(Turn|Switch) {s} the (light|lights|lamp) in the {r}.",
            "(Turn|Switch) the {r} (light|lights) {s}.",
            "(Light|Lights) {s} in the {r}",
            "{r} lights {s}",
            "Turn the lights in the {r} {s}.",
        ],
        {"status": "word"},
        "light",
    ),
    Tool(
        "set_heater fan_control set_fan switchDevice",
        ["(Turns|Switches) a device on or off", "Control of a (fan|heater|device)"],
        {"r": ("device name room", "room"), "s": ("on active enabled power", "boolean")},
        [
            ("(Turn|Switch) on the {r}.", {"s": "true"}),
            ("(Turn|Switch) the {r} on.", {"s": "true"}),
            ("(Turn|Switch) off the {r}.", {"s": "false"}),
            ("(Turn|Switch) the {r} off.", {"s": "false"}),
            ("(Start|Enable|Activate) the {r}.", {"s": "true"}),
            ("(Stop|Disable) the {r}.", {"s": "false"}),
        ],
        {"status": "word"},
        "turn",
    ),
    Tool(
        "set_alarm alarm naozhong",
        ["设置闹钟", "Set an alarm"],
        {"t": ("time 时间 at", "clock")},
        ["(请|)(设|设置|定)(一个|){t}的闹钟。", "{t}叫我起床。", "{t}(提醒|叫醒)我。", "我要{t}起床。"],
        {"status": "word"},
        "闹钟 起床",
    ),
    Tool(
        "send_message fasong sms",
        ["发送消息", "给某人发消息", "Send a message"],
        {"p": ("to name 收件人", "person_zh"), "m": ("text message 内容", "noun_zh")},
        ["(给|请给){p}(发消息|发短信|发信息)：{m}", "告诉{p}：{m}", "发消息给{p}：{m}"],
        {"status": "word"},
        "消息 告诉",
    ),
    Tool(
        "search web_search sousuo",
        ["搜索网页", "上网查找", "Search the web"],
        {"q": ("query q 关键词", "noun_zh")},
        ["(搜索|查一下|搜一下|帮我查){q}。", "(上网|在网上)(查|找){q}。", "查找关于{q}的信息。"],
        {"result": "noun_zh"},
        "搜 查",
    ),
    Tool(
        "get_price price jiage",
        ["查询价格", "Price of a product"],
        {"i": ("item product 商品", "noun_zh")},
        ["{i}(多少钱|的价格是多少|卖多少钱)？", "(查|问)一下{i}的价格。"],
        {"price": "number"},
        "钱 价格",
    ),
    Tool(
        "translate fanyi",
        ["翻译文字", "Translate a text"],
        {"x": ("text 文字 word", "noun_zh"), "l": ("language to 语言", "tongue_zh")},
        ["(把|请把){x}(翻译成|译成){l}。", "{x}用{l}怎么说？", "{l}的{x}怎么说？"],
        {"translation": "text"},
        "翻译 怎么说",
    ),
    Tool(
        "set_temperature thermostat heating set_thermostat",
        ["Set the (temperature|heating)( of a room|)", "Thermostat control"],
        {"r": ("room place where", "room"), "n": ("temperature degrees value target", "number")},
        [
            "(Set|Make|Heat) the {r} to {n}( degrees|).",
            "(Set|Turn) the (temperature|heating|heater) in the {r} to {n}.",
            "I want {n} degrees in the {r}.",
        ],
        {"status": "word"},
        "temperature heat",
    ),
    Tool(
        "add_to_list shopping_list add_item todo add_todo add_task",
        ["Add (an item|something) to (a|the) (shopping |todo |)list", "Puts something on the list"],
        {"i": ("item task thing text", "text")},
        [
            "(Add|Put) {i} (to|on) (my|the) (shopping |todo |)list.",
            "(We|I) need {i}, put it on the list.",
            "Note {i} on the list.",
            "Buy {i}: add it to the list.",
        ],
        {"status": "word"},
        "list",
    ),
    Tool(
        "get_phone_number phone_book find_number lookup_phone",
        ["(Find|Look up|Get) the phone number of (a person|somebody)"],
        {"p": ("name person who contact", "person")},
        [
            "(What is|What's|Find|Tell me) the (phone |telephone |)number of {p}?",
            "How can I (call|reach) {p}?",
            "{p}'s phone number",
            "What is {p}'s number?",
        ],
        {"phone": "whole"},
        "phone number",
    ),
    Tool(
        "track_package track_order parcel order_status trackShipment",
        ["(Track|Find) a (package|parcel|shipment)", "Status of an order"],
        {"i": ("id number code tracking_number order_id", "code")},
        [
            "Where is (my |the |)(package|parcel|order) {i}?",
            "Track (package|parcel|order|) {i}.",
            "(What is the |)status of (order|package) {i}",
            "Has {i} arrived?",
        ],
        {"status": "word", "place": "city"},
        "package order",
    ),
    Tool(
        "random_number roll random dice pick_number",
        ["(Random number|A random number) between two numbers", "Draws a number"],
        {"a": ("min low from start", "whole"), "b": ("max high to end", "whole")},
        ["(Give me|Pick|Draw|Roll|Choose) a (random |)number (between {a} and {b}|from {a} to {b}).", "A random number from {a} to {b}"],
        {"number": "whole"},
        "random",
    ),
    Tool(
        "get_population population population_of count_people",
        ["(Number of people|How many people) (who |)live in a place", "Population of a (city|place)"],
        {"c": ("city place name location", "city")},
        ["How many people live in {c}?", "(What is the |)population of {c}", "Tell me the population of {c}.", "How (big|large) is {c}?"],
        {"population": "whole"},
        "people population",
    ),
    Tool(
        "find_restaurant restaurants search_restaurants places_to_eat",
        ["(Find|Search) restaurants( in a city|)", "Places to eat"],
        {"c": ("city location place near", "city"), "k": ("cuisine food kind type", "tongue")},
        [
            "(Find|Show|Recommend) me a(n|) {k} restaurant in {c}.",
            "Where can I eat {k} food in {c}?",
            "(Find|Show me) (a restaurant|restaurants) in {c}.",
            "Restaurants in {c}",
            "Where can I eat in {c}?",
        ],
        {"name": "text", "rating": "number"},
        "restaurant eat",
    ),
    Tool(
        "get_news news headlines latest_news",
        ["(Get|Latest|Current) news( about a topic|)", "Headlines"],
        {"q": ("topic query about subject", "text")},
        [
            "(What is|What's|Is there|Give me|Tell me) (the |any |)(news|latest news) (about|on) {q}?",
            "News (about|on) {q}",
            "What happened with {q}?",
        ],
        {"headline": "text"},
        "news",
    ),
    Tool(
        "get_user find_user user_info lookup_user getAccount",
        ["(Get|Look up) (a user|an account)( by id|)", "Information about a user"],
        {"i": ("id user_id uid number", "whole")},
        ["(Who is|Find|Show|Look up|Get) user {i}.", "(Tell me about|Information about|What do you know about) user {i}", "Look up account {i}."],
        {"name": "person", "email": "text"},
        "user account",
    ),
    Tool(
        "send_money pay transfer transfer_money payment",
        ["(Send|Transfer|Pay) money( to a person|)"],
        {"p": ("to recipient person name", "person"), "a": ("amount sum value", "number"), "k": ("currency unit", "currency")},
        ["(Send|Pay|Transfer|Give) {p} {a} {k}.", "(Send|Pay|Transfer) {a} {k} to {p}.", "I owe {p} {a} {k}, send it."],
        {"status": "word"},
        "money pay",
    ),
]
