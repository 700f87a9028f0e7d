"""[H] Reads the world from what the packages airportsdata and countryinfo ship."""

from pathlib import Path

import airportsdata
from countryinfo import CountryInfo, all_countries

from rl_jax.tasks.lookup.world import Airport, Country, World, build_world

TOKENIZER_DIRECTORY = Path(__file__).parent
"""Holds tokenizer.json, tokenizer_config.json and chat_template.jinja."""

AIRPORTS = tuple(
    """ADD AKL AMS ARN ATH ATL BCN BKK BOG BOM BRU BUD CAI CDG CGK CMN CPH DEL DUB DXB EDI EZE
    FCO FRA GIG GRU HAN HEL HND ICN IST JFK JNB KBP KHI KIX KUL LAX LED LHR LIM LIS LOS MEX
    MNL MUC MXP NBO NCE ORD OSL OTP PEK PER PMI PRG PVG RUH SCL SIN SVO SYD TLV VIE WAW YVR
    YYZ ZRH""".split()
)
"""One or two airports of each country; none whose code is also a currency (MAD)."""

UNITS_OF_ACCOUNT = frozenset({"CHE", "CHW", "CLF", "USN", "USS"})
"""Codes that the data lists beside a country's currency and nobody pays with."""


def load_world() -> World:
    """The world of AIRPORTS and their countries."""
    records = airportsdata.load("IATA")
    airports = {
        code: Airport(records[code]["country"], records[code]["lat"], records[code]["lon"])
        for code in AIRPORTS
    }
    alpha2 = {
        info["ISO"]["alpha3"]: info["ISO"]["alpha2"]
        for info in (country.info() for country in all_countries())
        if "borders" in info
    }
    codes = sorted({airport.country for airport in airports.values()})
    return build_world(airports, {code: _country(code, alpha2) for code in codes})


def _country(code: str, alpha2: dict[str, str]) -> Country:
    info = CountryInfo(code).info()
    borders = tuple(alpha2[border] for border in info["borders"] if border in alpha2)
    (currency,) = (unit for unit in info["currencies"] if unit not in UNITS_OF_ACCOUNT)
    return Country(borders, float(info["area"]), currency)
