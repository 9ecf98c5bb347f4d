"""Questions about countries: capitals, continents, languages, currencies, both ways round and as yes or no."""

import random

import words
from turns import Book, Turn, ask, language
from words import capital

ADJECTIVES = {"Europe": "European", "Asia": "Asian", "Africa": "African", "North America": "North American",
              "South America": "South American", "Oceania": "Oceanian"}


def joined(names: list[str], zh: bool) -> str:
    return "和".join(names) if zh else " and ".join(names)


def country_name(rng: random.Random, country: words.Country, zh: bool) -> str:
    """The name as somebody writes it: often an alias where there is one, sometimes without its article."""
    name = country.name[zh]
    if country.aliases[zh] and rng.random() < 0.4:
        name = rng.choice(country.aliases[zh])
    return name.removeprefix("the ") if rng.random() < 0.3 else name


def facts_of(country: words.Country, zh: bool) -> dict[str, tuple[str, str]]:
    """attribute -> (what is to be said, the sentence that says it)"""
    c, tongues = country.name[zh], joined([tongue[zh] for tongue in country.languages], zh)
    if zh:
        return {"capital": (country.capital[1], f"{c}的首都是{country.capital[1]}。"),
                "continent": (country.continent[1], f"{c}在{country.continent[1]}。"),
                "language": (tongues, f"{c}人说{tongues}。"),
                "currency": (country.currency[1], f"{c}的货币是{country.currency[1]}。")}
    return {"capital": (country.capital[0], f"The capital of {c} is {country.capital[0]}."),
            "continent": (country.continent[0], f"{capital(c)} is in {country.continent[0]}."),
            "language": (tongues, f"People in {c} speak {tongues}."),
            "currency": (country.currency[0], f"The currency of {c} is the {country.currency[0]}.")}


def plain_fact(rng: random.Random, book: Book, lang: str, attribute: str, key: str | None = None) -> Turn:
    """`key` asks in other words than the attribute's own: "And in Spain?" after a question about France."""
    zh, country = lang == "_zh", words.country(rng)
    value, says = facts_of(country, zh)[attribute]
    c = country_name(rng, country, zh)
    if attribute in ("language", "currency") and key is None and rng.random() < 0.05:
        c = country.capital[zh]  # "What do people speak in Paris?"
    question = ask(rng, book, (key or attribute) + lang, c=c)
    return Turn("facts", question, says, f"{country.name[zh]}: {value}", [value])


def fact_and_more(rng: random.Random, book: Book) -> list[Turn]:
    """The same of one country and of others."""
    lang, attribute = language(rng), rng.choice(["capital", "capital", "continent", "language", "currency"])
    return [plain_fact(rng, book, lang, attribute),
            *(plain_fact(rng, book, lang, attribute, "more") for _ in range(rng.choice([1, 1, 2])))]


def about(rng: random.Random, book: Book, lang: str) -> Turn:
    zh, country = lang == "_zh", words.country(rng)
    facts = facts_of(country, zh)
    c, (city, money) = country.name[zh], (facts["capital"][0], facts["currency"][0])
    answer = (f"{c}在{country.continent[1]}，首都是{city}。"
              f"人们说{facts['language'][0]}，用{money}。") if zh else (
        f"{capital(c)} is a country in {country.continent[0]}. Its capital is {city}. "
        f"People speak {facts['language'][0]} and pay with the {money}.")
    return Turn("facts", ask(rng, book, "about" + lang, c=country_name(rng, country, zh)), answer,
                f"{c}: {country.continent[zh]}", [city])


def by_capital(rng: random.Random, book: Book, lang: str) -> Turn:
    """The country of a capital, if no other country has one of that name. Where a country is called like its capital
    (Singapore), "Where is ...?" asks for the continent."""
    zh, country = lang == "_zh", words.country(rng)
    v, c = country.capital[zh], country.name[zh]
    if sum(other.capital[zh] == v for other in words.countries()) > 1:
        return by_capital(rng, book, lang)
    key = "capital_of" if v == c else rng.choice(["capital_of", "capital_of", "where_city"])
    return Turn("facts", ask(rng, book, key + lang, v=v),
                f"{v}是{c}的首都。" if zh else f"{v} is the capital of {c}.", f"{v}: {c}", [c])


def yes_no(rng: random.Random, book: Book, lang: str) -> Turn:
    zh, country, attribute = \
        lang == "_zh", words.country(rng), rng.choice(["capital", "continent", "continent", "language", "currency"])
    other = rng.choice(words.countries())
    own = {"capital": [country.capital], "continent": [country.continent], "language": list(country.languages),
           "currency": [country.currency]}[attribute]
    theirs = {"capital": other.capital, "continent": other.continent, "language": other.languages[0],
              "currency": other.currency}[attribute]
    right = rng.random() < 0.5 or theirs in own or theirs[0] in country.spoken
    v = rng.choice(own) if right else theirs
    asked = v[zh]
    if attribute == "currency" and not zh and country.currency[0].split()[-1] != other.currency[0].split()[-1] \
            and rng.random() < 0.5:
        asked = v[0].split()[-1]
    question = ask(rng, book, f"yes_{attribute}{lang}", c=country_name(rng, country, zh), v=asked,
                   j=ADJECTIVES.get(v[0], ""))
    value, says = facts_of(country, zh)[attribute]
    # The fact comes before yes or no, and in the thought the value asked for before both: then they can be compared.
    so = ("，所以是的。" if right else "，所以不是。") if zh else (", so yes." if right else ", so no.")
    return Turn("facts", question, says[:-1] + so, f"{asked}? {country.name[zh]}: {value}{so}", [value + so])


def countries_in(rng: random.Random, book: Book, lang: str) -> Turn:
    """Answers with the continent's largest countries, which are what people think of."""
    zh, name = lang == "_zh", rng.choice(list(ADJECTIVES))
    largest = sorted((c for c in words.countries() if c.continent[0] == name), key=lambda c: -c.population)
    continent = largest[0].continent
    v, several = continent[zh], rng.random() < 0.4
    question = ask(rng, book, ("name_countries" if several else "name_country") + lang, v=v, j=ADJECTIVES[continent[0]])
    if several:
        a, b, c = (country.name[zh] for country in largest[:3])
        answer = f"{a}、{b}和{c}在{v}。" if zh else f"{capital(a)}, {b} and {c} are in {v}."
        return Turn("facts", question, answer, f"{v}: {a}", [a.removeprefix("the ")])
    a = rng.choice(largest[:4]).name[zh]
    names = [c.name[zh].removeprefix("the ") for c in largest]
    return Turn("facts", question, f"{a}在{v}。" if zh else f"{capital(a)} is in {v}.", f"{v}: {a}", names)


def by_property(rng: random.Random, book: Book, lang: str) -> Turn:
    """The largest country with a language or a currency."""
    zh, country = lang == "_zh", words.country(rng)
    if rng.random() < 0.5:
        v = rng.choice(country.languages)
        having = [c for c in words.countries() if v in c.languages]
        c = max(having, key=lambda c: c.population * (c.languages[0] == v) + 1).name[zh]
        answer, key = (f"{c}人说{v[1]}。" if zh else f"People in {c} speak {v[0]}."), "speaks"
    else:
        v = country.currency
        having = [c for c in words.countries() if v == c.currency]
        c = max(having, key=lambda c: c.population).name[zh]
        answer, key = (f"{c}用{v[1]}。" if zh else f"{capital(c)} uses the {v[0]}."), "uses"
    return Turn("facts", ask(rng, book, key + lang, v=v[zh]), answer, f"{v[zh]}: {c}",
                [c.name[zh].removeprefix("the ") for c in having])


def fact(rng: random.Random, book: Book, lang: str | None = None) -> Turn:
    kinds = {"capital": 20, "continent": 9, "language": 9, "currency": 9, about: 8, by_capital: 14, yes_no: 20,
             countries_in: 4, by_property: 8}
    kind = rng.choices([*kinds], [*kinds.values()])[0]
    lang = language(rng) if lang is None else lang
    return plain_fact(rng, book, lang, kind) if isinstance(kind, str) else kind(rng, book, lang)
