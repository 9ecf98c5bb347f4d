"""The stock of demo_tools.py: what the values of arguments may be, how they stand in sentences, and tools like those that people write."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import demo_words as words
from demo_sums import in_words
from demo_typing import choose


def one_of(text: str) -> Callable[[random.Random], str]:
    """Draws one of the words of `text`; a `_` in one stands for a space."""
    return lambda rng: rng.choice(text.split()).replace("_", " ")


def wording(*patterns: str) -> Callable[[random.Random], str]:
    """Draws a pattern and fills it: {n} noun, {a} adjective, {v} verb, {x} made-up word, {m} name, {c} city, {t} time, {d} digit."""
    draw = {
        "n": words.noun,
        "a": lambda r: r.choice(words.english("adjective")),
        "v": lambda r: r.choice(words.english("verb")),
        "x": words.invented,
        "m": words.name,
        "c": words.city,
        "t": words.clock,
        "d": lambda r: str(r.randint(2, 9)),
    }

    def fill(rng: random.Random) -> str:
        text = choose(rng, rng.choice(patterns))
        for key, word in draw.items():
            while "{" + key + "}" in text:
                text = text.replace("{" + key + "}", word(rng), 1)
        return text

    return fill


text_value = wording("{n}", "{n}", "{x}", "{a}", "{a} {n}", "{n} {n}", "{x} {n}", "{n} {x}", "{n} {n} {n}", "{a} {n} {n}")
query_value = wording(
    "{n}", "{n} {n}", "(best|cheap|new|used|old|good) {n}", "{n} (recipe|history|prices|ideas|rules|facts|near {c}|in {c})", "(how|where) to {v} (a|the) {n}",
    "{a} {n}", "{m}", "{x}", "{c}", "{n} for {n}", "why (is|are) {n} {a}", "(history|price|meaning|size) of {n}", "{x} {n}",
)  # fmt: skip
title_value = wording(
    "{n}", "{x}", "{a} {n}", "the {n}", "the {a} {n}", "{n} of {n}", "{n} in the {n}", "{m}", "my {n}", "{a} {a} {n}", "{n} {d}",
    "the {n} of {c}", "{v} the {n}", "(team|family|birthday|lunch|work) (meeting|dinner|party|call|trip)", "{n} {n}", "{x} {x}",
)  # fmt: skip
message_value = wording(
    "I am (late|here|at home|on my way|sick|{a}|busy|in {c})", "I'm (late|here|at home|on my way|sick|{a}|running late|not coming)",
    "see you (tomorrow|at {t}|later|there|in {c}|soon)", "(happy birthday|good luck|thank you|call me|come home|well done|get well soon)",
    "the {n} is (ready|here|broken|lost|{a}|in the {n})", "(dinner|lunch|the party|the {n}) is at {t}", "bring (the|a|my|your) {n}( and the {n}|)",
    "(I|we) (need|want|have|found|lost|forgot|like|will bring) (the|a|my|two|your) {n}( and a {n}|)", "we meet (at {t}|in {c}|at the {n})",
    "(can|will|could) you {v} the {n}", "I will (be there at {t}|{v} the {n}|call you back|come later)", "my {n} is {a}", "{v} the {n}",
    "don't (forget|{v}) the {n}", "the (train|meeting|{n}) (was moved to|starts at|leaves at) {t}", "{m} (says hello|is {a}|has the {n}|will {v} it)",
    "where is (the|my) {n}", "it is {a} (here|in {c})", "there is (a|no) {n} in the {n}",
)  # fmt: skip
task_value = wording(
    "(buy|get|order|find|bring|fetch) (milk|bread|eggs|the {n}|a {n}|some {n}|{n}|{n} and {n})", "(call|phone|visit|email|meet|pay|thank|help) {m}",
    "call (mum|mom|dad|the {n}|my {n}|my boss)", "{v} (the|my|a) {n}", "{v} the {a} {n}", "(feed|wash|walk|clean|paint|fix) (the|my) {n}",
    "(take|throw) out the (trash|{n})", "pay the (rent|bill|{n})", "water the (plants|flowers|{n})", "go to (the {n}|{c}|bed|work)", "be {a}",
    "write to {m}", "pick up (the {n}|{m}|the kids)", "look for (a|the) {n}", "ask {m} about the {n}", "talk to {m}", "turn off the {n}",
)  # fmt: skip


def code_value(rng: random.Random) -> str:
    return "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ0123456789") for _ in range(rng.randint(3, 8)))


MONTHS = one_of("January February March April May June July August September October November December")
WEEKDAYS = one_of("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")


def date_value(rng: random.Random) -> str:
    day, month, weekday, name = rng.randint(1, 28), rng.randint(1, 12), WEEKDAYS(rng), MONTHS(rng)
    soon = choose(rng, "(tomorrow|today|tonight|this weekend|next week|tomorrow evening|the day after tomorrow)")
    return rng.choice(
        [
            f"2026-{month:02}-{day:02}",
            f"{month}/{day}/2026",
            soon,
            soon,
            weekday,
            weekday,
            f"next {weekday}",
            f"{name} {day}",
            f"{day} {name}",
        ]
    )


def clock_value(rng: random.Random) -> str:
    hour = in_words(rng.randint(1, 12), False)
    spoken = choose(rng, f"((half past|quarter past|quarter to) {hour}|noon|midnight|{hour} o'clock|{rng.randint(1, 12)})")
    return spoken if rng.random() < 0.2 else words.clock(rng)


def number_value(rng: random.Random) -> str:
    return words.decimal(rng) if rng.random() < 0.25 else words.whole(rng)


def up_to(most: int) -> Callable[[random.Random], str]:
    return lambda rng: str(rng.randint(1, rng.choice([9, most, most])))


# What a value may be: its JSON type, how it is drawn. In Chinese, `city` means `city_zh`, and so on.
KINDS: dict[str, tuple[str, Callable[[random.Random], str]]] = {
    "city": ("string", words.city),
    "person": ("string", words.name),
    "boolean": ("boolean", lambda r: ""),
    "clock": ("string", clock_value),
    "text": ("string", text_value),
    "query": ("string", query_value),
    "title": ("string", title_value),
    "message": ("string", message_value),
    "task": ("string", task_value),
    "code": ("string", code_value),
    "date": ("string", date_value),
    "number": ("number", number_value),
    "whole": ("integer", words.whole),
    "minutes": ("integer", up_to(120)),
    "few": ("integer", up_to(20)),
    "percent": ("integer", up_to(100)),
    "thing": ("string", wording("{n}", "{n}", "{n} {n}", "{a} {n}", "{x}")),
    "place": ("string", wording("{c}", "{m} Street", "the {n}", "{n} Square", "{c} {n}", "{d}{d} {x} Road", "{x}")),
    "email": ("string", wording("{x}@{n}.(com|org|net|de)", "{n}@{x}.(com|org)", "{x}.{x}@{n}.net")),
    "phone": ("string", lambda r: r.choice(["555-{}", "0{}", "{}"]).format(r.randrange(10**4, 10**7))),
    "file": ("string", wording("{n}.(txt|pdf|csv|py|jpg)", "{x}.(txt|pdf|csv|py|jpg)", "{n}_{n}.(txt|doc)", "{n}{d}.(png|pdf)")),
    "tongue": ("string", one_of("French German Spanish English Chinese Latin Japanese Italian Russian Dutch Greek Polish Arabic")),
    "currency": ("string", one_of("euros dollars pounds yen USD EUR GBP JPY CHF francs pesos rupees yuan euro dollar CNY")),
    "food": ("string", one_of("Italian Chinese Thai Indian Greek Mexican French vegan Japanese pizza sushi burger cheap noodle")),
    "color": ("string", one_of("red blue green yellow white purple orange pink warm_white cold_white turquoise")),
    "measure": ("string", one_of("km miles meters feet kg pounds grams ounces liters gallons celsius fahrenheit inches cm hours minutes")),
    "switch": ("on|off", lambda r: r.choice(["on", "off"])),
    "lock": ("lock|unlock", lambda r: r.choice(["lock", "unlock"])),
    "unit": ("celsius|fahrenheit", lambda r: ""),
    "room": (
        "string",
        lambda r: r.choice(["kitchen", "bedroom", "living room", "bathroom", "garage", "hall", "office", "garden", words.noun(r)]),
    ),
    "tongue_zh": ("string", one_of("英语 法语 德语 日语 西班牙语 俄语 意大利语")),
    "city_zh": ("string", words.chinese_city),
    "person_zh": ("string", words.chinese_name),
    "money_zh": ("string", one_of("美元 欧元 日元 英镑 人民币 韩元 卢布")),
    "noun_zh": ("string", lambda r: r.choice(words.chinese_nouns())),
    "clock_zh": (
        "string",
        lambda r: r.choice([f"{r.randrange(24)}:{r.randrange(60):02}", f"{r.randint(1, 12)}点", f"早上{r.randint(5, 11)}点"]),
    ),
    "date_zh": (
        "string",
        lambda r: r.choice(["明天", "后天", "今天", "周六", "星期一", "下周三", f"{r.randint(1, 12)}月{r.randint(1, 28)}日"]),
    ),
    "message_zh": (
        "string",
        lambda r: choose(r, "(我晚点到|我到家了|生日快乐|{n}准备好了|带上{n}|在{n}见|别忘了{n}|我找到{n}了)").replace(
            "{n}", r.choice(words.chinese_nouns())
        ),
    ),
}
FREE = {"text", "query", "title", "message", "task", "message_zh"}  # may be any words: nothing stands behind such a value unmarked


@dataclass
class Tool:
    """`arguments`: key -> (names in the schema, kind). `questions` name them in braces, and may come with values that they
    only imply: ("double {x}", {"factor": "2"}). With `forms`, key -> how the value stands in a sentence, the questions are
    only intents, which demo_tools.compose makes sentences of; those in `optional` are said more rarely."""

    names: str
    descriptions: list[str]
    arguments: dict[str, tuple[str, str]]
    questions: list
    results: dict[str, str] = field(default_factory=dict)  # key -> kind
    topic: str = ""
    forms: dict[str, list[str]] = field(default_factory=dict)
    optional: set[str] = field(default_factory=set)
    label: str = ""  # of two tools with one label only one is offered
    section: str = ""  # tools of one section are near relatives


# How a value stands in a sentence: key | names of the argument | kind | forms
SLOTS = """
city | city town location place area region | city | in {} / in {} / in {} / in {} / in {} / at {} / near {} / for {} / around {}
from | from origin start departure source from_city | city | from {} / from {} / leaving {} / starting in {}
to | to destination target arrival to_city goal | city | to {} / to {} / going to {} / towards {}
place | place location address where destination | place | at {} / to {} / near {}
who | person name who user guest contact owner | person | for {} / with {} / of {} / under the name {}
recipient | to recipient contact person name | person | to {} / to {} / for {}
time | time at hour start when begin start_time | clock | at {} / at {} / at {} / for {} / by {} / from {}
until | until end end_time till | clock | until {} / till {} / ending at {}
date | date day when on | date | on {} / for {} / {} / {} / starting {}
title | title name label subject text | title | called {} / named {} / titled {} / called "{}" / with the title {}
topic | topic subject about query q keyword | query | about {} / on {} / for {} / about "{}" / regarding {}
item | item product name thing article | thing | of {} / for {} / of the {}
id | id code number key reference order_id | code | {} / number {} / with the id {} / with code {} / no. {}
user_id | id user_id number uid account | whole | {} / number {} / with id {} / #{}
count | count number quantity amount people guests n | few | for {} / for {} people / for {} persons / for {} of us
days | days nights duration length count | few | for {} days / for the next {} days / {} days
minutes | minutes duration length mins time | minutes | for {} minutes / of {} minutes / {} minutes / {} min / for {} min
amount | amount value sum price | number | of {} / for {}
limit | limit max_price budget max maximum | whole | under {} / below {} / up to {} / for less than {} / max {}
email | email address to mail | email | to {} / at {} / with the email {}
file | file path filename document name | file | {} / called {} / from {} / the file {}
room | room place where location zone | room | in the {} / in the {} / of the {}
level | level value percent volume brightness | percent | to {} / to {} percent / to {}% / at {}
degrees | temperature degrees value target | number | to {} / to {} degrees / at {} degrees
tongue | language lang target_language to tongue | tongue | in {} / into {} / to {}
food | cuisine food kind type style | food | with {} food / for {} food
color | color colour shade | color | in {} / in {} / to {}
unit | unit units scale | | in {} / in {} / in degrees {} / ({})
mode | mode type by | | by {} / {} mode / in {} mode / ({})
size | size | | in {} / size {} / in size {}
length | length size | | {} / kept {}
genre | genre type category | | {} / genre {}
role | role type rights | | as {} / as an {} / with the role {}
priority | priority importance level | | with {} priority / {} priority / priority {}
age | age years | few | aged {} / {} years old / age {}
rate | rate tip percent | percent | with {} percent / at {}% / {} percent
lang | language lang | tongue | in {} / in {}
currency | currency unit | currency | in {} / in {}
artist | artist singer band | person | by {} / by {} / from {}
episode | episode number nr | few | episode {} / number {}
note | note reason text | title | for {} / with the note {}
subject | subject title | title | with the subject {} / subject "{}"
km | distance km length | number | {} km / over {} km
account | account account_id iban | code | {} / of {} / for account {}
voice | voice speaker | | with a {} voice / in a {} voice / {} voice
style | style look | | in {} style / as a {}
"""

# Services that people use: label, and words of other questions that the tool is for | names | descriptions | arguments: key, `=other,names`, `:kind`, `?` if it is optional | results,
# and under it the intents, with `=>` what they imply; a line goes on where four spaces begin the next. Of one label only one is
# offered; those of a section are near relatives.
SERVICES = """
# weather and places
weather rain warm cold snow hot | get_weather weather current_weather fetchWeather lookup_weather | get the (current |)weather (in|of|for) a
    (city|place); (current |)weather (report|conditions); how warm it is and if it rains | city unit:celsius|fahrenheit? | temperature:number
    condition:word
  what is the weather( like|) / how is the weather / is it (raining|snowing|warm|cold|windy|sunny|hot|foggy) / does it (rain|snow) / weather /
    do I need (an umbrella|a coat|a hat|sunglasses) / how (warm|cold|hot) is it / the (temperature|weather) / {city} weather / weather(|:)
    {city} / weather {city} / I'd love to know the weather / I wonder (how warm|how cold) it is / {city}: (cold|warm|rain|sun) / what's it
    like outside / should I (take|pack|bring) (a jacket|an umbrella|boots) / any (rain|sun|snow|wind) / could you (look|check) (how|what) the
    weather is / what's {city} like weather-wise
forecast rain warm | get_forecast weather_forecast forecast getForecast | weather forecast for (some|the next) days; get the forecast (for|of)
    a (place|city); how the weather will be | city days:few? date? | forecast:word high:number
  the forecast / forecast / what will the weather be (like|) / the weather forecast / will it (rain|snow|be warm|be sunny) / weather forecast
    / what can I expect from the weather / I'm going to {city}, (how will the weather be|what weather can I expect) / (is it|will it be) going
    to rain / should I expect (rain|snow|sun) / (outlook|weather outlook) / weather ahead / how does the weather look
air | air_quality get_aqi pollution | (air quality|pollution) in a (city|place); how clean the air is | city | aqi:few level:word
  how (clean|bad|good) is the air / air quality / the air quality / is the air (clean|bad|ok) / can I (breathe|jog|open the windows) safely /
    I worry about (the smog|the air|pollution) / how (polluted|smoggy|dirty) is it / {city}: air ok / any (smog|pollution) / is it safe to
    breathe / pollution level
time late | get_time current_time world_clock clock getLocalTime | (get|returns) the (current|local) time (in|of) a place; what time it is
    somewhere | city=city,location,place,timezone | time:clock
  what time is it / what is the (local |)time / how late is it / the time / time / {city} time / is it (morning|night|late) (already|now) / my
    (friend|boss|aunt) lives in {city}, what time is it there / {city}: what time / (can|could) you tell me the time / I'd like to know (the
    time|what time it is) / what does the clock say / got the time / in {city}, (how late is it|what time do they have) / (I want|I have) to
    call {city}, what's the time there
sun | sunrise_sunset get_sun_times sun | (sunrise|sunset) (times |)of a place; when the sun rises and sets | city date? | sunrise:clock
    sunset:clock
  when does the sun (rise|set) / sunrise / sunset / when is (sunset|sunrise) / when does it get (dark|light) / I want to
    (see|watch|photograph) the (sunrise|sunset) / how long is it light / until when is there daylight / at what time does the sun (go
    down|come up|set|rise) / (dawn|dusk) / sun times / {city} (sunset|sunrise)
population people big large | get_population population count_people | (number of people|how many people) (who |)live in a place; population
    of a (city|place) | city | population:whole
  how many people live / population / the population / how (big|large) is {city} / how many (inhabitants|people) does {city} have / how many
    (citizens|residents|souls) / is {city} a big city, how many live there / {city} inhabitants / I'd like to know how many people there are /
    number of (inhabitants|residents|people) / how populous is {city}
distance far way | get_distance distance route how_far directions | (distance|the distance) between two (places|cities); how far it is from
    one place to another | from to mode:walking|driving|train? | kilometers:number
  how far is it / the distance / distance / how do I get / how far is {to} from {from} / the way / how many (km|miles) is it / {from} to {to}
    distance / directions / is it far / how long is the (way|road|trip) / I'm in {from}, how far is {to} / I have to get to {to} and I am in
    {from}, how far is that / km {from} - {to} / what's the best way / how many kilometers lie between {from} and {to} / between {from} and
    {to}, how far
quake earthquake | recent_earthquakes get_quakes earthquake_search seismic | (earthquakes|quakes) near a place; latest quakes | city days? |
    magnitude:number
  (were|are) there any earthquakes / did the earth shake / earthquakes / any quakes / I felt the ground move, was it a quake / how strong was
    the earthquake / the last earthquake / list quakes
# time
alarm | set_alarm alarm create_alarm wake_up add_alarm | (set|create|add) an alarm( clock|); wake the user at a time; alarm clock | time
    title? | status:word
  wake me( up|) / set an alarm / (set|make|add) (an|my) alarm / alarm / (I must|I have to|I need to|I want to) (get up|wake up|be up) / get me
    (up|out of bed) / (ring|beep) / my alarm should ring / don't let me sleep past {time} / {time} alarm / at {time} I (must|have to|need to)
    (be up|be awake|get up) / {time}: wake me / I (can't|mustn't) oversleep, wake me / my (train|bus|shift) leaves early, wake me / make sure
    I (wake up|am up|am awake) / could you be so kind and wake me / would you ring
timer | set_timer timer start_timer countdown startTimer | (start|set) a timer; countdown in minutes; rings after some minutes | minutes
    title? | status:word
  (set|start|make) a timer / timer / {minutes} (minute|min) timer / count down {minutes} minutes / (beep|ring|call me|tell me) in {minutes}
    minutes / (set|start) a {minutes} minute timer / start the countdown / {minutes} minutes( on the clock|) / I think the
    (eggs|noodles|potatoes) (need|take) {minutes} minutes / {minutes} minutes, (go|starting now) / let me know when {minutes} minutes are
    (over|up) / I'd like a timer / in {minutes} minutes I want to hear a beep / tea needs {minutes} minutes, set a timer / could you time
    {minutes} minutes / nap timer
reminder | add_reminder reminder set_reminder remind_me | (set|add|create) a reminder; reminds the user of something |
    task=text,task,what,message:task time date? | status:word
  remind me to {task} / (set|add|create) a reminder to {task} / remind me: {task} / don't let me forget to {task} / I must not forget to
    {task} / please remember to {task} / reminder: {task} / (add|set) a reminder: {task} / I keep forgetting to {task} / could you remind me
    to {task} / nudge me to {task} / make sure I {task} / I have a bad memory, remind me to {task} / I'd be glad of a reminder to {task} /
    ping me to {task} / don't let me forget: {task}
event plan | create_event add_event add_to_calendar schedule newEvent | (add|create) (an event|an appointment|a calendar entry); put something
    into the calendar | title date time? who=with,attendee,guest,person? place? | status:word
  (add|create|make|plan|schedule) an (event|appointment) / put {title} (into|in|on) (my|the) calendar / (new|add) (event|entry|appointment) /
    schedule {title} / I have {title} / (plan|add) {title} / block my calendar / there is {title}, put it (into|in) my calendar / I'd like to
    have {title} in my calendar / reserve time for {title} / could you enter {title} in the calendar / {title} should be in my calendar /
    (save|enter) the date for {title} / make room for {title}
agenda what | list_events get_calendar agenda show_schedule | (show|list|read) the (events|appointments) of a day; what is planned | date who?
    | events:few next:title
  what (is|do I have) (planned|on|in my calendar) / (show|list) my (events|appointments|meetings) / am I (free|busy) / my
    (schedule|agenda|calendar) / do I have (a meeting|anything) / do I have time / how (full|busy) is my day / anything on / what's (coming
    up|on my plate) / have I got anything planned / could you look in my calendar / which appointments do I have / how does my calendar look
stopwatch | start_stopwatch stopwatch measure_time | starts (a|the) stopwatch; measures time |  | status:word
  (start|run) (a|the) stopwatch / stopwatch / measure the time / time me / I want to know how long I take / time this / (ready, set, go|go,
    start the clock) / I'm starting to run, take my time / clock me / let the stopwatch run / could you measure how long I need
timezone | convert_timezone time_in_zone convert_time timezones | (converts|changes) a time from one (timezone|city) to another | time from to
    | time:clock
  if it is {time} in {from}, what time is it in {to} / {time} in {from}, when is that in {to} / {time} {from} time in {to} / what is {time} in
    {from} for {to} / convert {time} from {from} to {to} / our call is at {time} in {from}, when is it in {to} / at {time} in {from}, how late
    is it in {to}
holiday | get_holidays holidays public_holidays is_holiday | public holidays of a place; whether a day is a holiday | city date | name:title
  are the shops closed / is it a holiday / holidays / do people work / are the banks open / which holiday is there / is there a public holiday
    / do I have to work or is it a holiday
# messages
message tell | send_message message text_person sendSms sms whatsapp | send (a message|a text)( to a person| to somebody|); text somebody |
    recipient text=text,message,body,content:message | status:word
  (text|message|tell) {recipient}( that|:) {text} / let {recipient} know( that|) {text} / send {recipient} (a message|a text)(:| saying| that)
    {text} / (send|write) a (message|text) to {recipient}(:| saying) {text} / (write|say) to {recipient}: {text} / tell {recipient} {text} /
    (text|message) {recipient} {text} / could you let {recipient} know: {text} / {recipient} should know: {text} / drop {recipient} a line:
    {text} / a message for {recipient}: {text} / please pass on to {recipient}: {text} / {recipient} is waiting, write: {text} / ping
    {recipient}: {text} / I want to tell {recipient}: {text}
mail | send_email email sendMail mail compose_email | send (an email|a mail); write an email to an address | email=to,email,address,recipient
    subject:title? body=body,text,message:message | status:word
  (email|mail) {email}( that|:| saying) {body} / send an email to {email}(:| saying| that says) {body} / write (a mail|an email) to {email}:
    {body} / send an email to {email} with the subject {subject} / email to {email}: {body} / {email} should get this: {body} / I have to
    write to {email}: {body} / drop a mail to {email}: {body} / new mail for {email}: {body} / could you mail {email}: {body} / compose a mail
    to {email}: {body} / to {email}: {body}
call | call_person phone_call make_call dial | (call|phone) (a person|somebody|a contact); makes a phone call | who | status:word
  (call|phone|ring|dial) {who} / (get|put) {who} on the phone / I (want|need) to (talk to|speak to|call) {who} / make a call to {who} / give
    {who} a (call|ring) / could you call {who} / {who}, please, on the phone / I'd like to hear {who}'s voice / I have to speak with {who} /
    connect me with {who} / try to reach {who} by phone / phone call to {who} / I've got to talk to {who}, dial
contact number | get_contact find_number phone_book lookup_phone | (find|look up|get) the (phone number|contact) of (a person|somebody) | who
    | phone:whole
  the (phone |)number / {who}'s (phone |)number / what is {who}'s number / how can I reach {who} / (find|look up) the (phone |)number / number
    / I lost {who}'s number / I want to call {who} but don't have the number / do you have {who}'s number / under which number can I reach
    {who} / {who}: phone number / which number does {who} have / I need the phone number
add_contact | save_contact add_contact new_contact | (save|add) a (contact|phone number)( of a person|) | who number=phone,number,tel:phone |
    status:word
  (save|add|store|note) {who} with (the number|phone) {number} / (save|add) the number {number} / {who} has (a new|the) number(:|) {number} /
    (save|add) a contact {who}, {number} / {who}'s number is {number}, (save|keep|note) it / {number} is {who}'s number / new contact: {who},
    {number} / keep {who}'s number: {number} / put {who} into my contacts, {number} / {number} belongs to {who} / I got {who}'s number, it's
    {number}
read_mail | read_messages inbox check_mail unread | (read|show|list) (new|unread|the last) (mails|messages); what is in the inbox |
    who=from,sender,person? limit=count,limit,n:few? | messages:few
  (do I have|are there|show me) (new|any|unread|the last) (messages|mails|emails) / (read|check|show) my (messages|mail|inbox|emails) / did
    {who} (write|send me something|answer) / what did {who} write / anything in the inbox / have I got mail / what's new in my inbox / did I
    get (mail|messages) / any word / could you go through my mail / is there mail / I'm waiting for mail, check
# knowledge and words
search what about how why who find | search web_search lookup find google searchInternet | search the (web|internet); (look something up|find
    information)( online|) | topic | result:text
  (search|google|look) / search the (web|internet) / (search for|look up|google) {topic} / find (something|information|articles) / what can
    you find / google {topic} / I want to (know|read|learn) something / see what the internet says / I'd love to find out (more|something) /
    is there anything online / could you look something up / I need some information / do a quick search / hit the web / dig up something
define what mean | define dictionary define_word get_definition | (look up|find) (a word|the meaning of a word); definition of a word |
    word=word,term,text:text lang:tongue? | definition:text
  what does {word} mean / define {word} / the (meaning|definition) of {word} / look up the word {word} / what is the meaning of {word} /
    meaning of {word} / what is a {word} / {word}, what does that mean / I don't know the word {word} / I came across {word}, what is it /
    could you define {word} / {word} meaning / {word}: definition / I read {word} and didn't understand it / what do people mean by {word}
translate say what | translate translate_text translator | translate (a text|text|words)( into a language|) |
    text=text,sentence,phrase,input:message tongue | translation:text
  translate {text} {tongue} / translate "{text}" {tongue} / how do you say {text} {tongue} / (put|say) "{text}" {tongue} / what is {text}
    {tongue} / {text} {tongue} / how do I say "{text}" {tongue} / translate {tongue}: {text} / how would one say "{text}" {tongue} / I'd like
    to say "{text}" {tongue} / could you translate "{text}" {tongue} / "{text}" - how is that {tongue} / I need "{text}" {tongue} / {tongue},
    please: {text} / what would "{text}" be {tongue} / the word for "{text}" {tongue}
spell write | spell_check check_spelling spelling | checks (how a word is spelled|spelling) | word=word,text:text | correct:text
  how do you (spell|write) {word} / is {word} spelled right / spell {word} / check the spelling of {word} / is "{word}" correct / I never know
    how to spell {word} / {word} - is that how it's written / did I (write|spell) {word} right / how is {word} (spelled|written) / {word}:
    right or wrong / could you check if {word} is spelled correctly / I'm not sure how to write {word}
news happen new | get_news news headlines latest_news | (get|latest|current) news( about a topic|); headlines | topic limit=limit,count,n:few?
    | headline:text
  the (news|latest news|headlines) / news / what (is new|happened|is going on) / (any|is there) news / the last {limit} (news|headlines) / I'd
    love to hear the news / did anything happen / what's going on in the world / catch me up / bring me up to date / what did I miss / what do
    the papers say / anything new
summary what | summarize summarize_file shorten | (summarize|shorten) (a text|a file|a document) | file length:short|medium|long? |
    summary:text
  (summarize|sum up|shorten) {file} / (give me|write|make) a {length} summary of {file} / what (is in|does) {file}( say|) / a {length} summary
    of {file} / {file} is too long, summarize it / I don't have time to read {file} / what is {file} about / boil {file} down / the key points
    of {file} / could you sum up {file} / {file} in a few words / tl;dr {file}
wiki what who about explain | get_article wikipedia encyclopedia read_about | (get|read) an article( of an encyclopedia|); who or what
    something is | topic | article:text
  who (is|was) {topic} / what (is|are|was) {topic} / tell me (something |more |)about {topic} / (the|an|read the) article about {topic} /
    explain {topic} / I'd like to learn about {topic} / I know nothing about {topic} / what do you know about {topic} / who or what is {topic}
    / could you read me the article on {topic} / {topic}: who or what is that / fill me in on {topic}
quote wise | get_quote quote random_quote famous_quote | (a|gets a) famous quote | who=author,by,person topic? | quote:text
  a quote by {who} / give me a quote of {who} / what did {who} say that was wise / I'd love a quote from {who} / quote {who} / some wise words
    of {who} / did {who} say something clever / could you quote {who}
# money and shopping
price much cost | get_price stock_price price_of get_stock_price getQuote | (current |get the |)price of (a thing|something|a product|a stock)
    | item=item,name,product,symbol currency? | price:number
  what does {item} cost / how much (is|does) {item}( cost|) / price / the price / {item} price / how (expensive|cheap) is {item} / what do I
    pay for {item} / is {item} expensive / can I afford {item} / {item}: how much / I'd like to buy {item}, what does it cost / what do they
    want for {item} / how much would {item} be / going rate for {item} / what is {item} worth
convert_money much many | convert_currency exchange currency_converter convertMoney | convert (money|an amount) (from one currency to
    another|between currencies); currency converter | amount from=from,source,base:currency to=to,target:currency | result:number
  (convert|change|exchange|turn) {amount} {from} (to|into|in) {to} / how much (is|are) {amount} {from} in {to} / {amount} {from} (in|to) {to}
    / what (is|are) {amount} {from} in {to} / how many {to} do I get for {amount} {from} / {amount} {from} {to} / I have {amount} {from}, (how
    much is it in|I want) {to} / {amount} {from}, what is that in {to} / I'd like to have {amount} {from} in {to} / what would {amount} {from}
    be in {to} / {to}: how much is {amount} {from} / if I change {amount} {from}, how many {to} is that / it costs {amount} {from}, say that
    in {to} / {amount} {from} → {to}
convert_unit many | convert_units unit_converter convertUnit | convert (a value|a measurement) (from one unit to another|between units) |
    amount=value,amount,number from=from,from_unit,source:measure to=to,to_unit,target:measure | result:number
  (convert|turn|change) {amount} {from} (to|into) {to} / how many {to} (are|is) {amount} {from} / {amount} {from} in {to} / what (is|are)
    {amount} {from} in {to} / {amount} {from} to {to} / my (recipe|manual|map) says {amount} {from}, what is that in {to} / I need {amount}
    {from} in {to} / {to}, please: {amount} {from} / express {amount} {from} in {to} / how much is {amount} {from} in {to} / {amount} {from}
    makes how many {to} / {amount} {from} = how many {to}
pay | send_money pay transfer transfer_money | (send|transfer|pay) money( to a person|) | recipient amount currency=currency,unit:currency
    note=note,reason:title? | status:word
  (send|pay|give|transfer) {recipient} {amount} {currency} / (send|pay|transfer) {amount} {currency} to {recipient} / I owe {recipient}
    {amount} {currency} / {amount} {currency} (to|for) {recipient} / {recipient} gets {amount} {currency} from me / I'd like to give
    {recipient} {amount} {currency} / {recipient} lent me {amount} {currency}, pay it back / could you wire {recipient} {amount} {currency} /
    let {recipient} have {amount} {currency} / {recipient}: {amount} {currency} / settle my debt with {recipient}, {amount} {currency}
balance | get_balance account_balance bank | (balance|state) of (an account|a bank account) | account=account,account_id,iban:code? |
    balance:number
  (the|my) balance / how much money (do I have|is on my account) / balance of account {account} / account {account} balance / what is
    (left|on) my account / am I broke / how rich am I / do I have (money|enough money) left / can I see my balance / what's in the bank / how
    does my account look / I'd like to know what is on my account
order want need | order_item buy purchase place_order | (order|buy) (a product|something); puts an order | item count? color? | order:code
    status:word
  (order|buy|get) {count} {item} / (order|buy|get me|I'd like|I want) (a|the|some) {item} / (order|buy) {item} / I (need|want) {count} of the
    {item} / I'd like to have {count} {item} / {item}, {count} of them / could you get me {count} {item} / we've run out, order {count} {item}
    / send me {count} {item} / my order: {count} {item} / {count} {item}, please
parcel | track_package track_order parcel order_status trackShipment | (track|find) a (package|parcel|shipment); status of an order |
    id=id,number,code,tracking_number | status:word place:city
  where is (my|the) (package|parcel|order) / track (package|parcel|order|) / status of (order|package) / has {id} arrived / when does
    (parcel|package|order) {id} come / (package|order|parcel) / I'm (still waiting|waiting) for (package|parcel|order) {id} / {id}: where is
    it / what happened to (package|parcel|order) {id} / did (package|parcel) {id} get lost / is {id} on its way / my (parcel|package|order)
    hasn't come / {id}, any news of it / how long until (package|parcel) {id} is here
cart | add_to_cart cart_add basket | (add|put) (an item|a product) (to|into) the (cart|basket) | item count? size:small|medium|large? |
    items:few
  (add|put) {count} {item} (to|into) (the|my) (cart|basket) / {item} (in|into) the (cart|basket) / put (a|the|one) {item} in my (basket|cart)
    / add (a|an|the) {size} {item} to the (cart|basket) / I'll take {count} {item}, into the cart / {count} {item} for my cart / could you put
    {count} {item} in the cart / {item} goes (in|into) my basket / let me have {count} {item} in the basket / basket: {count} {item} / in my
    cart I want {count} {item}
subscription | cancel_subscription end_subscription unsubscribe stop_plan | (cancels|ends) a subscription | name=service,name,plan:thing date?
    | status:word
  cancel my {name} subscription / I don't want {name} any more, end the subscription / unsubscribe me from {name} / end the {name} plan /
    could you stop the subscription to {name} / I never use {name}, cancel it / no more {name} subscription / my {name} subscription should
    end
donation charity | donate make_donation give_money charity | (gives|donates) money to a (charity|cause) | amount currency
    to=to,charity,cause:thing | status:word
  donate {amount} {currency} to {to} / {amount} {currency} as a donation to {to} / I'd like to donate {amount} {currency} to {to} / my
    donation for {to}: {amount} {currency} / could you donate {amount} {currency} to {to} / {to} gets a donation of {amount} {currency}
# home
light | switch_light lights set_light turn_light control_lights | (turn|switch) (the lights|a light|a lamp) on or off | room
    state=state,status,power:on|off | status:word
  (turn|switch) {state} the (light|lights|lamp) / (turn|switch) the (light|lights|lamp) {state} / lights {state} / {room} (light|lights)
    {state} / (turn|switch) the {room} (light|lights) {state} / could I have the light {state} / I'd like the light {state} / {room}: light
    {state} / {state} with the light / get the light {state} / the {room}, light {state} / light goes {state} / I want the (lamp|light)
    {state}
dim | dim_light set_brightness dimmer | (set|change) the brightness of a (light|lamp|room); makes light brighter or darker | room level |
    status:word
  (dim|set) the (light|lights|lamp) {level} / brightness {level} / {room} brightness {level} / make the (light|lamp) {level} / (dim|set) the
    {room} (light|lights) {level} / it's too (bright|dark), set the light {level} / I'd like the light {level} / could you bring the lights
    {level} / lights {level}, please / bring the {room} lamp {level} / {level} percent brightness / light at {level}%
light_color | set_color light_color paint_light | (sets|changes) the (color|colour) of the (light|lamp) | room color | status:word
  (make|turn|set) the (light|lights|lamp) {color} / (change|set) the (color|colour) {color} / {color} light / I want {color} light / {room}
    {color} / I'm in the mood for {color} light / {color} would be nice as light / bathe the {room} in {color} / let the {room} glow {color} /
    could the light be {color} / {color}, please, the lamp / lamp {color}
heat | set_temperature thermostat heating | set the (temperature|heating)( of a room|); thermostat control | room degrees | status:word
  (set|turn|change) the (temperature|heating|heater) {degrees} / heat the {room} {degrees} / make it {degrees} degrees / {degrees} degrees /
    (I want|we need) {degrees} degrees / set the {room} {degrees} / {room} {degrees} degrees / I'm freezing, make it {degrees} degrees / it's
    too (cold|hot), set {degrees} degrees / I'd like {degrees} degrees / could you get the {room} to {degrees} degrees / I think the {room}
    should be {degrees} degrees warm / {degrees} degrees would be nice / thermostat {degrees} / keep it at {degrees} degrees
device | control_device set_fan switchDevice power | turns a device on or off; control of a (fan|heater|device) |
    device=device,name,thing:thing on=on,active,enabled,power:boolean | status:word
  (turn|switch) on the {device} => on=true / (turn|switch) the {device} on => on=true / (turn|switch) off the {device} => on=false /
    (turn|switch) the {device} off => on=false / (start|enable|activate) the {device} => on=true / (stop|disable|deactivate) the {device} =>
    on=false / {device} on => on=true / {device} off => on=false / I need the {device} running => on=true / could you get the {device} going
    => on=true / nobody uses the {device}, turn it off => on=false / I'm done with the {device}, switch it off => on=false / I think the
    {device} should be off => on=false / I think the {device} should run => on=true / let the {device} run => on=true / power down the
    {device} => on=false
door | lock_door door_lock set_lock | (lock|unlock)s a door | door=door,name,room:room action=action,state:lock|unlock | status:word
  {action} the {door}( door|) / please {action} the {door}( door|) / {action} {door} / the {door} door, {action} it / could you {action} the
    {door} / would you mind, {action} the {door} door / I want you to {action} the {door} / {door}: {action} / would you please {action} the
    {door} door / make sure to {action} the {door} / go and {action} the {door} door
vacuum | start_cleaning vacuum clean_room robot_clean | (cleans|vacuums) a room; starts the (cleaning robot|vacuum) | room
    mode:quiet|normal|deep? time? | status:word
  (clean|vacuum) the {room} / (start|run) the (vacuum|robot|cleaning) / clean {room} / (do|start) a {mode} cleaning / I think the {room} is
    dirty / there are crumbs all over the {room} / somebody should clean the {room} / send the robot / I think the {room} could use a {mode}
    cleaning / I spilled (sugar|flour|crumbs) in the {room} / {room}: vacuum, please / let the robot clean the {room}
blinds | set_blinds move_shutters blinds curtain | (opens|moves) the (blinds|shutters|curtains) | room level? action:open|close | status:word
  {action} the (blinds|curtains|shutters) / {action} the {room} (blinds|shutters) / {room} blinds {action} / (blinds|curtains) {action} / it's
    too bright, {action} the blinds / I want to see the sky, {action} the curtains / could you {action} the shutters / {room}: {action} the
    blinds / time to {action} the curtains / {action} them, the blinds / the {room} curtains, {action} them
oven bake | set_oven preheat_oven oven oven_control | (heat|set) the oven; oven control | degrees minutes? | status:word
  (preheat|heat|set) the oven {degrees} / oven {degrees} / I'm baking, get the oven {degrees} / I think the cake needs {degrees} degrees in
    the oven / oven: {degrees} degrees / could the oven be {degrees} degrees hot / {degrees} degrees for the oven
coffee espresso | make_coffee brew_coffee coffee_machine brew | (make|brew)s coffee; coffee machine control | count=cups,count,number
    type=type,drink,kind:espresso|latte|cappuccino|americano | minutes:few
  (make|brew) {count} {type} / I'd like {count} {type} / {count} {type}, please / I'm still sleepy, {count} {type} / could I get {count}
    {type} / {type}, {count} of them / {count} cups of {type}
washing laundry | start_washing washing_machine laundry run_washer | starts the washing machine; washes clothes |
    mode=program,mode,cycle:cotton|wool|quick|eco time? | minutes:minutes
  wash my clothes with the {mode} program / start the washing machine with {mode} / do a {mode} wash / laundry, {mode} / my shirts are dirty,
    run {mode} / {mode} wash / could you run the washer on {mode}
tv channel | change_channel tv_channel set_channel switch_tv | (changes|sets) the channel of the TV | n=channel,number,nr:few | status:word
  (put on|go to|switch to|turn to) channel {n} / channel {n} / TV on {n} / I want to watch channel {n} / what's on {n}, switch over / could
    you go to channel {n} / the TV to channel {n}
water garden | water_garden irrigate sprinkler start_watering | waters the (garden|plants|lawn); starts the sprinkler |
    zone=zone,area,where:lawn|roses|beds|pots minutes | liters:few
  water the {zone} / I think the {zone} look dry, water them / (start|run) the sprinkler for the {zone} / could you give the {zone} some water
    / {zone}: water / I think the {zone} need water / irrigate the {zone}
siren alarm | set_alarm_system alarm_system security_mode arm_house | (arms|disarms) the (house|alarm system); security of the home |
    on=armed,active,on:boolean | status:word
  arm the house => on=true / disarm the house => on=false / switch on the alarm system => on=true / we're leaving, arm the alarm system =>
    on=true / I'm back, disarm the alarm system => on=false / security on => on=true / security off => on=false / turn the alarm system off =>
    on=false
sensor | read_sensor sensor get_sensor sensor_value | (reads|gets) a sensor; last value of a sensor | id=sensor_id,id,sensor
    kind=kind,type,metric:humidity|pressure|motion|co2 | value:number
  what does the {kind} sensor {id} say / read {kind} of sensor {id} / {kind} at sensor {id} / sensor {id}, {kind} / I need the {kind} from
    sensor {id} / how is the {kind} at {id} / could you read out {id} for {kind}
flat rent house | search_homes find_flat real_estate apartments | (finds|searches) (flats|houses) in a city | city limit
    rooms=rooms,bedrooms,n:few | place:place price:whole
  a flat with {rooms} rooms / find a house with {rooms} rooms / I'm looking for a flat with {rooms} rooms / we want to move, {rooms} rooms /
    {rooms} room flat / is there a {rooms} room apartment / homes with {rooms} rooms
elevator lift | call_elevator elevator call_lift go_to_floor | calls the (elevator|lift); goes to a floor | n=floor,level,to:few | minutes:few
  take me to floor {n} / the elevator to floor {n} / I have to go up to floor {n} / floor {n}, please / call the lift to floor {n} / could you
    send the elevator to floor {n} / elevator {n}
# music and media
play | play_music play_song music start_music playTrack | play (music|a song); starts a song | song=song,title,track,query:title
    artist=artist,singer,band:person? | status:word
  play {song} / (play|put on|start) the song {song} / I want to hear {song} / play {song} by {artist} / play (some|something|music|a song) by
    {artist} / (put on|start) {song} / can I hear {song} by {artist} / I'd love to hear {song} / let's hear {song} / I'm in the mood for
    {artist}, play something / could you put on some {artist} / anything by {artist} / let me listen to {artist} / {artist}, play it / my
    favorite song is {song}, play it
volume | set_volume volume change_volume sound | (set|change) the (volume|sound); makes it louder or quieter | level room? | volume:percent
  (set|turn|change|put) the (volume|sound|music) {level} / volume {level} / make it {level} / turn (it|the music) (up|down) {level} / {level}
    percent volume / it's too (loud|quiet), go {level} / I can't hear (a thing|anything), set the volume {level} / could you put it {level} /
    sound {level}, please / volume: {level} / I'd like the sound {level} / bring the volume {level}
movie film | find_movie search_movies movies cinema | (find|search) (films|movies)( in the cinema|); what is on in the cinema | city?
    genre:comedy|drama|action|horror? date? | movie:title
  (what|which) (movies|films) are (on|there|shown) / (find|show) (a|me a) {genre} (movie|film) / what is on in the cinema / movies / a {genre}
    movie / I'd love to see a {genre} / any good {genre} (films|movies) / we want to go to the cinema / I'm in the mood for a {genre} /
    {genre}, (what's on|what is there) / recommend a {genre} film / what could we watch at the cinema
photo | take_photo camera make_picture | (takes|makes) a (photo|picture); uses the camera | count? flash:boolean? | file:file
  take (a photo|a picture|{count} photos) / (photo|picture) / take a photo with flash => flash=true / take a picture without flash =>
    flash=false / make {count} pictures / say cheese / smile, take a photo / I want a picture of this / could you snap {count} pictures / it's
    dark, use the flash for a photo => flash=true / no flash, just a photo => flash=false / {count} snapshots / capture this moment
podcast | play_podcast podcast start_episode | (play|start)s a (podcast|episode) | title episode=episode,number,nr:few? | status:word
  (play|start) the podcast {title} / play episode {episode} of {title} / (start|play) the (show|podcast) / the podcast {title}, episode
    {episode} / I'd like to listen to the podcast {title} / where were we, episode {episode} of {title} / let's hear episode {episode} of
    {title} / could you put on the podcast {title} / next up: the podcast {title} / {title} episode {episode} / I missed episode {episode} of
    {title}
playlist | create_playlist new_playlist make_playlist playlists | (creates|makes) a playlist | title genre:rock|jazz|pop|classical? | id:few
  (make|create) a playlist / a new playlist / I'd like a playlist / could you set up a playlist / playlist / we need a playlist for the party
    / a {genre} playlist / start a new {genre} playlist
speak voice | text_to_speech speak read_aloud say_text | (speaks|reads aloud) a text; turns text into speech | text=text,content,input:text
    voice=voice,speaker:male|female? | file:file
  say "{text}" aloud / read "{text}" out loud / speak "{text}" with a {voice} voice / I want to hear "{text}" spoken / could you say "{text}"
    in a {voice} voice / "{text}", read aloud / turn "{text}" into speech
draw image | generate_image draw_picture create_image text_to_image | (draws|generates) (a picture|an image) |
    text=prompt,description,text:thing style=style,look:cartoon|realistic|sketch? | file:file
  draw (a|the) {text} / an image of a {text} / I'd like a {style} picture of a {text} / paint me a {text} / a {style} drawing of a {text} /
    could you generate a picture of a {text} / {style} {text}, as an image / make a {style} image of a {text}
# travel and eating
flight | book_flight find_flights search_flights flights | (book|find|search) (a flight|flights)( between two cities|) | from to date?
    count=passengers,seats,people? | flight:code price:number
  (book|find|search) (a flight|flights|a plane) / (flight|flights) / I (want|need|have) to fly / (is there|are there) (a flight|flights) / fly
    me / a flight / when do planes leave / we're flying, find us a plane / which flights are there / get us on a plane / I'm looking for a
    flight / {from} - {to} by plane / fly from {from} to {to} / could you see what flights there are / what does flying cost
train | find_train trains train_times search_trains | (find|search) (a train|trains|train times) | from to date? time? | train:code
    departure:clock
  (when is|when goes) the (next |)train / (find|show me) (a train|trains) / train / (the|a) train / I want to (go|travel) by train / is there
    a train / I'd like to take the train / how do I get there by train / which trains (run|go|are there) / {from} - {to} by train / is there a
    train from {from} to {to} / I have to catch a train / train times / we need a train
taxi | call_taxi order_taxi ride request_ride | (call|order) a (taxi|cab|ride) | from:place to:place time? count=passengers,people? | car:code
    minutes:few
  (call|order|get|send) (me |)(a|the) (taxi|cab|ride) / (I need|we need) a (taxi|cab|ride) / taxi / take me / pick me up / (pick up|fetch)
    {count} people / I can't walk, get me a taxi / we are {count} people and need a cab / could somebody drive me / I'm stuck, send a cab / a
    cab, please / it's raining, call a taxi / get me a driver
hotel | search_hotels hotels find_hotel stay | (find|search) (a hotel|hotels|a place to sleep) | city date? days? limit? breakfast:boolean? |
    hotel:title price:number
  (find|search|show me|I need) (a hotel|hotels|a place to sleep) / hotel / where can I sleep / a hotel with breakfast => breakfast=true / a
    hotel without breakfast => breakfast=false / (a |)(bed|room) / I have nowhere to sleep / we're staying in {city}, find a hotel / I'm
    looking for a place to stay / a room for the night / could you find us a hotel / {city} hotel / breakfast included, find a hotel =>
    breakfast=true / we don't need breakfast, just a hotel => breakfast=false
eat where | find_restaurant restaurants search_restaurants places_to_eat | (find|search) restaurants( in a city|); places to eat | city food
    limit? | name:title rating:number
  (find|show|recommend) (me |)(a|some|any) {food} (restaurant|place) / where can I eat {food}( food|) / {food} food / (is there|are there)
    good {food} (food|restaurants) / (a|any) {food} (restaurant|place) / I (want|like|feel like) {food} food / {food} {city} / I'm hungry for
    {food} / could you find us a {food} place / let's eat {food} / where do they have good {food} / we'd love some {food} / {food} in {city} /
    I'm starving, {food} would be great / who makes the best {food}
recipe how | get_recipe recipes find_recipe cook | (find|get|show) a recipe; how to cook a dish | dish=dish,name,food,query:thing
    count=servings,people,persons? | recipe:text minutes:few
  (how do I|how to) (cook|make|bake) {dish} / (a|the|find a|find me a) recipe (for|of) {dish} / {dish} recipe / recipe for {dish} / I want to
    (cook|make|bake) {dish} / tonight I'm cooking {dish} / I've never made {dish}, how does it go / what do I need for {dish} / teach me to
    cook {dish} / could you find instructions for {dish} / {dish}, how is it made / I'd love to make {dish}
ticket | buy_ticket get_tickets tickets | (buy|get) (a ticket|tickets)( for an event|) | event=event,show,name:title count date? | code:code
    price:number
  (buy|get|book) {count} tickets (for|to) {event} / {count} tickets to {event} / I (want|need) {count} tickets for {event} / (buy|get) a
    ticket (for|to) {event} / I'd love to see {event}, get {count} tickets / {count} for {event} / we want to go to {event}, get us {count}
    tickets / could you reserve {count} seats for {event} / are there {count} tickets left for {event} / {event}: {count} tickets / {count}
    seats at {event}
parking car | find_parking parking search_parking park_car | (find|search) (parking|a parking space); where to leave the car | place minutes?
    | place:place price:number
  where can I park / find (a parking space|parking) / parking / I need to leave my car somewhere / is there parking / I'm looking for a place
    to park / a parking lot / any free parking spots
bus | next_bus bus_times get_bus bus_departures | (next|the next) bus; departure times of buses | line=line,route,bus_number:few place time? |
    departure:clock
  when does bus {line} (leave|come|go) / next bus {line} / bus {line} / I'm waiting for the {line} bus / has bus {line} left / line {line},
    when does it go / could you see when the {line} bus comes / did I miss bus {line}
flight_status | flight_status track_flight get_flight check_plane | status of a flight; whether a plane is late | id=flight,flight_number,code
    | status:word gate:few
  is flight {id} (late|on time|delayed) / has flight {id} landed / {id}: where is the plane / when does flight {id} arrive / track flight {id}
    / my mother is on flight {id}, is it on time / flight {id} / which gate for {id}
visa | visa_info check_visa visa_required entry_rules | whether a visa is needed; entry rules of a place | city days? | needed:word
  do I need a visa / visa rules / is a visa required / can I enter without a visa / I'm told one needs a visa, is that so / visa / what papers
    do I need / entry rules
# lists and files
list_add need | add_to_list shopping_list add_item | (add|put) (an item|something) (to|on) (a|the) (shopping |)list | item count? | items:few
  (add|put) {item} (to|on) (my|the) (shopping |)list / we need {item} / (add|put) {count} {item} on the list / {item} on the list / I am out
    of {item} / we're out of {item} / {item} is missing on the list / we've run out of {item} / don't forget {item} when shopping / next time
    I shop I need {item} / shopping: {item} / could you put {item} on the list / {count} {item} for the shopping list
todo should must | add_task todo new_task create_task | (add|create) a (task|todo); what is to do | task=task,text,title:task
    date=due,deadline,date? priority:low|medium|high? | id:few
  (add|create|new|make) (a |)(task|todo): {task} / I (must|have to|need to|should) {task} / add the task (to |){task} / todo: {task} /
    (put|note) on my todo list: {task} / new on my list: {task} / I still have to {task} / what I have to do: {task} / could you add a task:
    {task} / another task: {task} / make it a task to {task} / task: {task}
note write | save_note take_note write_note create_note | (save|write|take) a note; writes something down | text=text,content,note:message
    title? | status:word
  note( down|)(:| that) {text} / (save|make|take|write) a note(:| that says| that) {text} / write down( that|:) {text} / (new|add a) note:
    {text} / keep this in mind: {text} / jot down: {text} / I want to remember this: {text} / please write this down: {text} / let me keep a
    note: {text} / could you note that {text} / memo: {text}
open_file | open_file read_file show_file open | (opens|reads|shows) a file | file | size:whole
  (open|read|show) {file} / (open|read|show me) the file {file} / what is in {file} / let me see {file} / cat {file} / I'd like to see {file}
    / could you open {file} / what does {file} contain / let me look at {file} / {file}, open it / {file} please / I want to read {file}
delete_file | delete_file remove_file trash | (deletes|removes) a file; puts a file into the trash | file | status:word
  (delete|remove|erase) {file} / (delete|remove) the file {file} / get rid of {file} / I don't need {file} / throw {file} away / rm {file} /
    {file} can go / could you remove {file} / nobody needs {file} any more / I want {file} gone / {file}: delete / {file} is useless, throw it
    away / put {file} in the trash
copy_file | copy_file duplicate cp_file move_file | (copies|moves) a file to another (name|place) | from=from,source,src:file
    to=to,target,dest:file | status:word
  (copy|move) {from} to {to} / (copy|move) the file {from} (to|into) {to} / cp {from} {to} / make a copy of {from} (called|named) {to} /
    {from} should (go|be copied) to {to} / I need {from} also as {to} / take {from} and save it as {to} / {from} → {to} / duplicate {from} as
    {to} / could you copy {from} to {to} / save {from} as {to} / {from}, copy it to {to}
user who | get_user find_user user_info getAccount | (get|look up) (a user|an account)( by id|); information about a user | user_id |
    name:person email:email
  (who is|find|show|look up|get) user / information about user / account / what do we know about user / user / the account / I'd like to know
    who that is, user {user_id} / {user_id}: which user is that / could you pull up user {user_id} / details of user {user_id} / user
    {user_id} wrote to us, who is it / which user has the id {user_id} / open the profile of user {user_id}
new_user | create_user add_user register sign_up | (create|add|register)s a user( account|) | who=name,username,user age:few?
    email=email,mail? role:admin|editor|guest? | id:few
  (create|add|register|sign up) (a user|an account|a new user) / (create|add|make) an account / add {who} as {role} / register {who} / make
    {who} (an|a) {role} / {who} needs an account / {who} is new here, create an account / we have a new colleague, {who}, add an account / let
    {who} in as {role} / {who} should become {role} / could you sign {who} up / new account: {who}
# sums
calculate | calculate calculator calc evaluate compute math eval_expression do_math | (calculate|evaluate) (an|a mathematical|a math)
    expression; calculator; does arithmetic | e=expression,formula,input,expr,query:text a=-:number b=-:number | result:number
  (what is |calculate |){a} times {b} => e={a} * {b} / (how much is |compute |){a} (*|x) {b} => e={a} * {b} / (what's |solve |){a} plus {b} =>
    e={a} + {b} / (what is |compute |){a} + {b} => e={a} + {b} / (how much is |){a} minus {b} => e={a} - {b} / (what is |calculate |){a} - {b}
    => e={a} - {b} / (what is |){a} divided by {b} => e={a}/{b} / multiply {a} (by|with) {b} => e={a} * {b} / divide {a} by {b} => e={a}/{b} /
    add {a} and {b} => e={a} + {b} / could you work out {a} times {b} => e={a} * {b} / {a}*{b} => e={a} * {b} / {a}+{b} => e={a} + {b} / I
    need {a} plus {b} => e={a} + {b} / {a} take away {b} => e={a} - {b} / subtract {b} from {a} => e={a} - {b} / what do I get for {a} x {b}
    => e={a} * {b}
multiply | multiply product times multiply_numbers mul | multiply two numbers; (product|the product) of two numbers; returns a times b |
    a=a,x,first,num1,left:number b=b,y,second,num2,right:number | result:number
  (what is |how much is |calculate |){a} (times|multiplied by|*|x) {b} / multiply {a} (by|and|with) {b} / the product of {a} and {b} / {b}
    times {a} => a={b} b={a} / I have {a} boxes of {b} each, how many is that / {a} rows of {b} seats, how many seats / what do I get if I
    multiply {a} by {b} / take {a} times {b} / could you multiply {a} with {b} / {a} lots of {b} / {a} by {b}, multiplied
add | add sum add_numbers plus addition | add two numbers; (sum|the sum) of two numbers | a=a,x,first,num1:number b=b,y,second,num2:number |
    result:number
  (what is |how much is |calculate |){a} (plus|+|and) {b} / add {a} (to|and|with) {b} / the sum of {a} and {b} / {a} and {b} together / what
    do {a} and {b} make / I had {a} and got {b} more, how many is that / what is {b} more than {a} / sum up {a} and {b} / could you add up {a}
    and {b} / total of {a} and {b} / put {a} and {b} together, how much is it / {a} increased by {b}
subtract | subtract minus difference sub take_away | subtract two numbers; returns a minus b; difference of two numbers |
    a=a,x,first,minuend:number b=b,y,second,subtrahend:number | result:number
  (what is |how much is |calculate |){a} (minus|-|less) {b} / (subtract|take) {b} from {a} / the difference between {a} and {b} / what is left
    of {a} without {b} / I had {a} and lost {b}, how many are left / from {a} take away {b} / {a} take away {b} / reduce {a} by {b} / could
    you subtract {b} from {a} / by how much is {a} more than {b} / {a} without {b}
divide | divide quotient division div | divide two numbers; divides a by b | a=a,x,dividend,numerator:number b=b,y,divisor,denominator:number
    | result:number
  (what is |how much is |calculate |){a} (divided by|over) {b} / divide {a} by {b} / how often does {b} go into {a} / share {a}
    (among|between) {b} / {a} apples for {b} children, how many for each / {a} split {b} ways / could you divide {a} by {b} / how much is {a}
    shared by {b} / {a} cut into {b} parts / if {b} people share {a}, what does each get / what's {a} over {b}
# numbers and health
random | random_number roll random dice pick_number | (a |)random number between two numbers; draws a number | from=min,low,from,start:whole
    to=max,high,to,end:whole | number:whole
  (give me|pick|draw|roll|choose) a (random |)number between {from} and {to} / a random number from {from} to {to} / (pick|choose)
    (something|one) between {from} and {to} / random {from} {to} / a number from {from} to {to} / between {from} and {to}, pick one / I need a
    lucky number from {from} to {to} / surprise me with a number between {from} and {to} / any number from {from} to {to} / could you draw a
    number from {from} to {to} / {from} to {to}, at random / think of a number between {from} and {to}
percent | percentage percent_of calc_percent | percentage of a number; so many percent of a value | a=percent,rate,p:percent
    b=of,value,base,number:whole | result:number
  (what is|how much is|) {a}( |)(%|percent) of {b} / {a} percent of {b} / {a}% of {b} / of {b}, how much is {a} percent / I get {a} percent
    off {b}, how much is that / {a} percent discount on {b}, how much do I save / of {b} I want {a}% / take {a}% of {b} / could you work out
    {a} percent of {b} / {b}, and of that {a} percent / if I take {a} percent of {b}, what is it
tip | calculate_tip tip split_bill | (calculate|get) (a|the) tip; divides a bill | amount=bill,total,amount rate=percent,tip,rate:percent?
    count? | tip:number
  the tip {amount} / how much (do I|should I|to) tip {amount} / tip for a bill of {amount} / (split|divide) {amount} for {count} people /
    {rate} percent tip on {amount} / I think the bill is {amount} / we paid {amount}, what should I tip / I want to leave a tip of {rate}
    percent on {amount} / {amount} for the dinner, how much tip / could you work out the tip for {amount} / {amount} plus {rate}% tip /
    {amount} on the bill, {rate} percent tip / our bill was {amount}
log | log_workout track_exercise add_run log_activity | (log|save|record)s (a workout|sport|exercise) |
    sport=activity,sport,type:running|swimming|cycling|yoga minutes km=distance,km:number? | total:number
  (log|save|add|record|note) {minutes} minutes of {sport} / I (did|went) {sport} / {sport}, {km} km / (log|add) {km} km of {sport} / {sport} /
    (today I did|I just finished) {sport} / {minutes} minutes of {sport} are done / put {minutes} minutes of {sport} into my log / I've been
    {sport} / {sport} again, {minutes} minutes / could you note {minutes} minutes of {sport} / my workout: {sport} / I was out {sport}
weigh | log_weight track_weight save_weight | (saves|logs) the (weight|body weight) | kg=kg,weight,value:number | status:word
  (I weigh|my weight is|weight) {kg}( kg|) / (log|save) (my weight, |){kg} kg / (today |){kg} kg( today|) / I think the scale (says|shows)
    {kg} / I'm {kg} kilos / down to {kg} kg / I stepped on the scale: {kg} / up to {kg} kilos, note it / could you save {kg} kg as my weight /
    my weight this morning: {kg} / {kg} kilos on the scale
doctor | book_doctor make_appointment appointment | (book|make)s an appointment (with|at) a (doctor|dentist|hairdresser) |
    who=doctor,with,name date time? | status:word
  (book|make|get) (me |)an appointment / I need (an appointment|to see somebody) / appointment / (can|could) I (come|see {who}) / an
    appointment / my tooth hurts, I need to see {who} / could you get me in with {who} / I'd like to see {who} / when can {who} see me / {who}
    should have a look at me / I feel ill, make me an appointment / is {who} free for an appointment
vote | rate_item rate vote give_stars | (rates|gives stars to) (a thing|an item|a product) | item stars=stars,rating,score,points:few |
    average:number
  (rate|give) {item} {stars} stars / {stars} stars for {item} / {item} gets {stars} (stars|points) / I give {item} {stars} (points|stars) /
    {item} was great, {stars} stars / I'd give {item} {stars} / {stars} out of ten for {item} / {item}: {stars} stars / could you rate {item}
    with {stars} stars / {item} deserves {stars} stars / {stars} points go to {item}
sleep | log_sleep track_sleep save_sleep sleep_diary | (logs|saves) how long somebody slept | h=hours,duration,length:few date? |
    average:number
  I slept {h} hours / {h} hours of sleep / (log|save|note) {h} hours of sleep / only {h} hours of sleep / could you note that I slept {h}
    hours / put {h} hours in my sleep diary / my night was {h} hours long
calories food | log_calories add_meal track_food calories | (logs|saves) (calories|a meal) | food=food,meal,item:thing
    n=calories,kcal,energy:whole | total:whole
  I ate {food}, {n} calories / log {food} with {n} calories / {food}: {n} kcal / {n} calories of {food} / could you note {n} kcal for {food} /
    lunch was {food}, {n} calories / add {food}, {n} calories, to my diary
pulse heart | heart_rate log_pulse save_heart_rate pulse | (saves|logs) the (pulse|heart rate) | n=bpm,rate,value:whole time? | status:word
  my pulse is {n} / heart rate {n} / (log|save|note) a pulse of {n} / my heart beats {n} times a minute / pulse: {n} / could you save {n} as
    my heart rate / {n} beats a minute
# developer
sql rows table | run_query query_database sql_query select_rows | (runs|executes) a query on a database; reads rows of a table |
    table=table,table_name,from:thing n=limit,rows,count:few | rows:whole
  show (me |){n} rows of {table} / {n} rows from {table} / the first {n} rows of {table} / I'd like to see {n} rows of the table {table} /
    select {n} from {table} / query {table}, {n} rows / could you read {n} lines of the table {table}
issue bug | create_issue open_issue new_issue report_bug | (opens|creates) an issue; reports a bug | title priority:low|medium|high? |
    id:whole
  (open|create|file) an issue / I found a bug, open an issue / a new issue / (report|file) a bug / there should be an issue / could you report
    a bug / bug report / something is broken, make an issue
pull review | merge_pull_request merge_pr pull_request merge | merges a pull request; brings a branch in | n=number,pr,pull_number:whole
    mode=method,strategy:squash|rebase|merge? | status:word
  merge pull request {n} / merge #{n} / PR {n} can go in / I approved {n}, merge it / pull request {n}, merge / could you merge PR {n} / PR
    {n} looks good, merge it / bring in pull request {n}
commit git | git_commit commit commit_changes save_changes | commits the changes with a message | m=message,m,msg,description:task | hash:code
  commit with the message {m} / commit: {m} / (save|commit) my changes as "{m}" / git commit -m "{m}" / I'm done, commit this as "{m}" / could
    you commit my work with the message {m} / make a commit called "{m}"
run_code script | run_file execute_script run_code run_python | (runs|executes) a (script|program|file); runs code | file | output:text
  (run|execute|start) {file} / (run|execute) the script {file} / what happens if I run {file} / does {file} work, run it / python {file} / I'd
    like to see {file} run / could you execute {file} / {file}: run it
deploy release | deploy deploy_service release rollout | (deploys|releases) (a service|an app) | app=service,app,project:thing
    env=environment,env,stage:staging|production|test | status:word
  deploy {app} to {env} / {app} should go to {env} / (release|ship) {app} to {env} / {app} to {env}, please / roll {app} out on {env} / could
    you bring {app} to {env} / {app} is ready for {env}, deploy it / put {app} on {env}
server down | server_status check_server health_check is_up | whether a server runs; status of a server | server=host,server,name:thing |
    status:word load:number
  is {server} (up|down|running|alive) / status of server {server} / check the server {server} / {server} doesn't answer, is it down / how is
    the server {server} / ping the host {server} / I can't reach {server}, is it up
logs error | search_logs find_logs grep_logs log_search | (searches|finds) lines in the logs | topic level=level,severity:error|warning|info
    minutes? | lines:whole
  search the logs for {level} lines / any {level} lines in the logs / {level} in the logs / could you go through the logs for {level} entries
    / the {level} logs / show me {level} entries of the logs
flag feature | set_feature_flag toggle_flag feature_flag flags | turns a feature flag on or off | name=flag,feature,name:thing
    on=enabled,on,value:boolean | status:word
  (enable|turn on|activate) the flag {name} => on=true / (disable|turn off) the flag {name} => on=false / I think the feature {name} should be
    on => on=true / I think the feature {name} should be off => on=false / switch the flag {name} on => on=true / nobody likes the feature
    {name}, disable it => on=false / flag {name} off => on=false / flag {name} on => on=true
password secret | generate_password make_password new_password password_generator | (makes|generates) a (safe |)password |
    n=length,chars,size:few | password:code
  (make|generate|create) a password with {n} characters / a password of {n} letters / I need a safe password, {n} characters / new password,
    {n} long / could you invent a password of {n} characters / {n} character password / password with {n} signs
hash encode | encode_text hash_text encoder digest | (encodes|hashes) a text | text=text,data,input:text
    mode=method,algorithm,format:base64|md5|sha256|hex | result:code
  {mode} of "{text}" / encode "{text}" as {mode} / what is "{text}" in {mode} / {mode} "{text}" / turn "{text}" into {mode} / I need the
    {mode} of "{text}" / could you give me "{text}" as {mode} / the {mode} of "{text}"
qr | make_qr create_qr_code qr_code qrGenerator | (makes|creates) a QR code (of|for) a text | text=text,content,data:text | file:file
  (make|create|generate) a QR code for "{text}" / QR code: {text} / I need a QR code with "{text}" / turn "{text}" into a QR code / could you
    put "{text}" into a QR code / a QR code of "{text}" / "{text}" as QR code
# office and learning
support complaint | open_ticket create_support_ticket support helpdesk | (opens|creates) a ticket at the support desk | title
    priority:low|normal|urgent | id:code
  open a {priority} ticket / I need help from support, {priority} / a {priority} support ticket / could you open a {priority} ticket at the
    help desk / {priority} ticket / report a {priority} problem to the support desk
invoice bill | create_invoice send_invoice new_invoice make_invoice | (writes|creates) an invoice for a customer | who=customer,client,name
    amount currency | id:code
  (write|make|create) {who} an invoice over {amount} {currency} / invoice {who} {amount} {currency} / {who} owes us {amount} {currency}, write
    an invoice / an invoice for {who}: {amount} {currency} / could you bill {who} {amount} {currency} / {who} should get an invoice of
    {amount} {currency} / bill {who} for {amount} {currency}
grade school | get_grades grades student_grade school_marks | grades of a student in a subject | who=student,pupil,name
    sub=subject,course,class:maths|physics|history|art | grade:few
  what grade did {who} get in {sub} / {who}'s grade in {sub} / how is {who} doing in {sub} / is {who} good at {sub} / {sub} grade of {who} /
    I'd like to see {who}'s {sub} marks / did {who} pass {sub}
loan mortgage | loan_payment calculate_loan monthly_rate mortgage | monthly payment of a loan | amount=amount,principal,sum:whole
    rate=interest,rate,rate:number years=years,term,duration:few | monthly:number
  a loan of {amount} at {rate} percent for {years} years / I borrow {amount} at {rate}% over {years} years, what do I pay / {amount} for
    {years} years at {rate} percent, what is the monthly payment / what would a loan of {amount} cost for {years} years at {rate}% / monthly
    rate for {amount}, {years} years, {rate} percent / could I borrow {amount} over {years} years at {rate} percent
job work | search_jobs find_jobs jobs job_search | (finds|searches) jobs in a city | city
    role=role,title,profession:nurse|teacher|engineer|driver | title:title
  find a job as {role} / I want to work as {role} / {role} jobs / who needs a {role} / I'm a {role} looking for work / are there jobs for a
    {role} / open positions for a {role} / could I find work as a {role}
shift | swap_shift shift_swap exchange_shifts trade_shift | (swaps|exchanges) a shift with a colleague | who=colleague,with,person date |
    status:word
  swap my shift with {who} / I can't work, {who} will take my shift / {who} takes over my shift / could I trade shifts with {who} / give my
    shift to {who} / exchange shifts with {who} / {who} and I want to swap shifts
# fun
joke funny laugh | tell_joke get_joke joke random_joke | (tells|gets) a joke | topic? | joke:text
  tell me a joke / make me laugh / I'm sad, cheer me up with a joke / a joke / do you know a joke / something funny / I'd love to hear a joke
    / joke
horoscope stars | get_horoscope horoscope zodiac read_stars | horoscope of a sign | sign=sign,zodiac,star_sign:aries|leo|virgo|libra|pisces
    date? | text:text
  {sign} horoscope / what do the stars say for {sign} / I'm a {sign}, what's my horoscope / horoscope for {sign} / how will it go for {sign} /
    my sign is {sign}, read my horoscope / could you read the stars for {sign}
score game match | get_score match_result sports_score live_score | (score|result) of a team's (game|match) | team=team,club,name:city date? |
    score:code
  how did {team} play / did {team} win / {team} score / the score of {team} / what was the result of {team} / I missed the {team} match, how
    did it end / {team}: win or loss / who won, {team}
quiz question | start_quiz quiz new_quiz trivia | starts a quiz; asks questions about a subject | n=questions,count,number:few topic
    level=difficulty,level:easy|medium|hard | id:few
  a quiz with {n} {level} questions / ask me {n} {level} questions / {n} {level} questions / test me with {n} {level} questions / I'm bored,
    start a quiz with {n} {level} questions / could we do {n} {level} questions
# 中文
天气 | get_weather query_weather weather tianqi | 查询城市的天气; 获取天气; get the weather in a city | city=city,location,城市:city date:date? |
    temperature:number condition:noun
  {city}(的|)天气(怎么样|如何|好吗|) / {city}(会|)(下雨|下雪|刮风)吗 / {city}(冷|热|暖和)吗 / {city}(现在|)(多少度|几度) / (查|看看|告诉我){city}(的|)天气 / 去{city}要带(伞|外套)吗 /
    我要去{city}，(天气怎么样|冷不冷|会下雨吗) / {city}那边(热不热|冷不冷|下雨了吗) / 想知道{city}的天气 / {city}(适合|能)(出门|跑步|晒衣服)吗
闹钟 | set_alarm alarm naozhong | 设置闹钟; 定一个闹钟; set an alarm | time=time,时间,at:clock | status:word
  (设|设置|定)(一个|个|){time}的闹钟 / {time}叫我(起床|) / {time}(提醒|叫醒)我 / 我要{time}起床 / 闹钟{time} / 把闹钟(定在|设在|调到){time} / 我(不能|别)迟到，{time}叫醒我 /
    {time}得起来，定个闹钟 / 帮我{time}响个铃 / 我想睡到{time}
计时 | set_timer timer jishi | 倒计时; 设置计时器; start a timer | minutes=minutes,分钟,duration:minutes | status:word
  (设|开始|来)(一个|个|){minutes}分钟的(计时|倒计时|计时器) / {minutes}分钟(后|以后)(叫我|提醒我) / 倒计时{minutes}分钟 / 计时{minutes}分钟 / (煮面|泡茶|煮蛋)要{minutes}分钟，计时 /
    {minutes}分钟到了(说一声|告诉我) / 我要(休息|睡){minutes}分钟，计个时 / 来个{minutes}分钟的定时器
消息 | send_message fasong sms | 发送消息; 给某人发消息; send a message | who=to,name,收件人:person text=text,message,内容:message | status:word
  给{who}(发消息|发短信|发信息|写)：{text} / 告诉{who}(：|，|){text} / 发消息给{who}：{text} / 跟{who}说(：|){text} / 通知{who}，{text} / 让{who}知道：{text} /
    帮我(转告|回复){who}：{text} / {who}在等我，跟他说：{text} / 给{who}捎句话：{text}
电话 | call_person call dianhua | 打电话; 给某人打电话; call a person | who=name,person,联系人:person | status:word
  (给|跟){who}打(个|)电话 / 打(电话|)给{who} / 呼叫{who} / 我要(和|跟){who}(通话|说话) / 拨打{who}的电话 / 我想听听{who}的声音，打个电话 / 帮我(接通|联系){who} / 找{who}，打电话 /
    我有事要问{who}，拨个电话
搜索 | search web_search sousuo | 搜索网页; 上网查找; search the web | query=query,q,关键词:noun | result:noun
  (搜索|查一下|搜一下|查查){query} / (上网|在网上)(查|找|搜){query} / (查找|找)关于{query}的(信息|资料) / {query}的资料 / 我想(了解|知道){query} / 网上怎么说{query} /
    有没有{query}的(资料|消息|介绍) / {query}，帮我搜搜
价格 | get_price price jiage | 查询价格; price of a product | item=item,product,商品:noun | price:number
  {item}(多少钱|的价格是多少|卖多少钱|贵不贵) / (查|问)一下{item}的价格 / {item}价格 / 买{item}要(多少钱|花多少) / 我想买{item}，要多少钱 / 现在{item}(贵吗|什么价) / {item}什么价钱 /
    买得起{item}吗，多少钱
翻译 | translate fanyi | 翻译文字; translate a text | text=text,文字,word:noun lang=language,to,语言:tongue | translation:noun
  把{text}(翻译成|译成){lang} / {text}用{lang}怎么说 / {lang}的{text}怎么说 / (翻译|翻译一下){text}，(要|成|用){lang} / {text}的{lang}(是什么|) / {lang}里{text}怎么讲 /
    我想用{lang}说{text} / {text}，翻成{lang} / 请问{text}的{lang}怎么写
提醒 | add_reminder tixing reminder | 设置提醒; 提醒用户; reminds the user | text=text,事情,task:message time=time,时间:clock? date=date,日期:date? |
    status:word
  提醒我(：|，|){text} / (记得|到时候)提醒我{text} / 加个提醒：{text} / 别让我忘了：{text} / 我怕忘，提醒我{text} / 帮我记着：{text} / 到点说一声：{text}
火车 | search_trains trains huoche | 查询火车; 两个城市之间的火车; find trains | from=from,出发地,origin:city to=to,目的地,destination:city date=date,日期:date? |
    train:code
  从{from}到{to}的(火车|高铁|车票) / {from}到{to}(有|还有)(火车|高铁|车)吗 / 我要从{from}去{to} / (查|买)(一下|)({from}到{to}的|从{from}去{to}的)(火车票|火车|高铁) /
    我在{from}，想坐火车去{to} / 有没有{from}到{to}的火车 / {from}去{to}，坐高铁 / 想从{from}坐车到{to}
灯 | switch_light lights deng | 开灯或关灯; turn the lights on or off | room=room,房间,place:noun on=on,开,power:boolean | status:word
  (打开|开){room}的灯 => on=true / (关掉|关上|关){room}的灯 => on=false / 把{room}的灯(打开|开了) => on=true / 把{room}的灯(关掉|关了) => on=false / {room}太暗了，开灯 =>
    on=true / {room}的灯(别开了|不用开了) => on=false / {room}没人，关灯 => on=false / {room}的灯亮起来 => on=true
换算 | convert_currency exchange huansuan | 货币换算; convert money | amount=amount,金额:number from=from,原货币:money to=to,目标货币:money | result:number
  {amount}{from}(是|等于|能换|换)多少{to} / 把{amount}{from}(换成|兑换成|换算成){to} / {amount}{from}(换|兑){to} / 我有{amount}{from}，能换多少{to} /
    {amount}{from}合多少{to} / 想用{amount}{from}换{to}，能换多少 / 多少{to}等于{amount}{from}
停车 | find_parking tingche parking | 查找停车场; 附近的停车位; find parking | city=city,place,城市:city | spaces:whole
  {city}哪里能停车 / {city}(有|还有)停车位吗 / 我开车去{city}，停哪儿 / 找{city}的停车场 / {city}停车 / {city}停车方便吗 / 想在{city}停车 / {city}附近的停车场
酒店 | search_hotels jiudian hotels | 查询酒店; 预订酒店; find a hotel | city=city,城市:city date=date,入住日期:date | name:noun price:number
  {date}住{city}，找个酒店 / {city}{date}的酒店 / {date}我要在{city}过夜 / 帮我订{city}的酒店，{date}入住 / {date}，{city}，订房 / {city}有酒店吗，{date}到 /
    找{city}的酒店，{date}住 / {date}到{city}，住哪里
购物 | add_to_list shopping_list gouwu | 添加到购物清单; add to the shopping list | item=item,物品,name:noun | items:few
  把{item}加到购物清单 / {item}用完了，记到清单里 / 清单里加{item} / 要买{item}，记下来 / 购物清单：{item} / 别忘了买{item} / 家里没有{item}了 / 加上{item}
笔记 | save_note write_note biji | 写笔记; 记录文字; save a note | text=text,content,内容:message | status:word
  记下来：{text} / 写个笔记：{text} / 帮我记一下：{text} / 笔记：{text} / 请记录：{text} / 备忘：{text} / 存一条笔记：{text} / 记一笔：{text}
睡眠 | log_sleep sleep shuimian | 记录睡眠; log hours of sleep | h=hours,小时,duration:few | total:few
  我睡了{h}个小时 / 昨晚睡了{h}小时 / 记录睡眠{h}小时 / 睡眠：{h}小时 / 只睡了{h}个小时 / 帮我记{h}小时睡眠 / {h}小时的睡眠 / 一共睡{h}小时
时差 | get_time world_time shijian | 查询城市的当地时间; local time of a city | city=city,城市,location:city | time:clock
  {city}现在几点 / {city}的时间 / 想知道{city}几点了 / {city}(是白天吗|是晚上吗) / 查{city}当地时间 / 现在{city}是几点钟 / {city}几点 / 我要打到{city}，那边几点
空气 | get_air_quality kongqi air_quality | 查询空气质量; air quality of a city | city=city,城市:city | aqi:whole
  {city}空气怎么样 / {city}的空气质量 / {city}污染严重吗 / 去{city}要戴口罩吗 / {city}有雾霾吗 / 查{city}的空气 / 想知道{city}空气好不好 / {city}空气干净吗
空调 | control_ac air_conditioner kongtiao | 控制空调; 打开或关闭空调; air conditioner | on=on,开,power:boolean | status:word
  打开空调 => on=true / 关掉空调 => on=false / 太热了，开空调 => on=true / 有点冷，把空调关了 => on=false / 开一下空调 => on=true / 空调关上 => on=false / 空调开着吧 => on=true /
    不用空调了，关掉 => on=false
包裹 | track_package kuaidi parcel | 查询快递; 包裹到哪里了; track a parcel | id=id,单号,number:code | status:noun
  快递{id}到哪了 / 包裹{id}在哪里 / 查快递{id} / 单号{id}，到了吗 / 我的快递{id}怎么还没到 / {id}这个包裹什么时候到 / 查一下单号{id} / {id}的物流
餐厅 | find_restaurant canting restaurants | 查找餐厅; 附近的饭馆; find a restaurant | city=city,城市:city | name:noun
  {city}哪里好吃 / {city}有什么好餐厅 / 我在{city}，饿了，找家饭馆 / 推荐{city}的餐厅 / {city}的饭馆 / 找{city}的餐厅 / 在{city}吃什么好 / {city}好吃的地方
"""


COMMON = set(
    "get set add find list make do new of to number numbers take save start show open who people person item file name how me".split()
)
STANDING = {
    key: (names, kind, forms.split(" / ")) for key, names, kind, forms in (re.split(r" *\| *", line) for line in SLOTS.strip().splitlines())
}


def slot_of(text: str, zh: bool) -> tuple[str, tuple[str, str], list[str], bool]:
    """`key=names:kind?` -> (key, (names in the schema, kind), forms, whether it is optional); the rest comes from SLOTS."""
    text, optional = text.rstrip("?"), text.endswith("?")
    text, _, kind = text.partition(":")
    key, _, names = text.partition("=")
    standing = STANDING.get(key, (key, "text", ["{}"]))
    kind = kind or standing[1]
    names = standing[0] if not names else "" if names == "-" else names.replace(",", " ")
    return key, (names, kind + "_zh" if zh and kind + "_zh" in KINDS else kind), ["{}"] if zh else standing[2], optional


def services() -> list[Tool]:
    tools: list[Tool] = []
    section = ""
    for line in SERVICES.replace("\n    ", " ").strip().splitlines():
        if line.startswith("# "):
            section = line[2:]
        elif line.startswith("  "):
            tools[-1].questions = line.strip().split(" / ")
        else:
            label, names, descriptions, arguments, results = line.split(" | ")
            slots = [slot_of(text, words.chinese(label)) for text in arguments.split()]
            tools.append(
                Tool(
                    names,
                    descriptions.split("; "),
                    {key: argument for key, argument, _, _ in slots},
                    [],
                    dict(pair.split(":") for pair in results.split()),
                    forms={key: forms for key, _, forms, _ in slots},
                    optional={key for key, _, _, optional in slots if optional},
                    label=label.split()[0],
                    section=section,
                )
            )
            own = [word for word in re.split(r"\W|_", names.lower()) if len(word) > 2 and word not in COMMON]
            tools[-1].topic = " ".join([*label.split(), *own, "sum" * (section == "sums")])
    return tools


TOOLS = services()
