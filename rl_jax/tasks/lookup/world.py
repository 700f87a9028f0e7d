"""[N] The world of the lookup task: real airports and countries, joined by eight functions.

Entities are IATA airport codes, ISO 3166 alpha-2 country codes and ISO 4217 currency codes, so the
kind of an entity shows in its code. A relation is a partial function: where the data has no answer
inside the chosen set (no neighbour, nothing further north) the entity is absent from its table.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

NOTHING = "none"
"""The service's answer where the relation, the entity or a value for the two does not exist."""


class Airport(NamedTuple):
    country: str
    latitude: float
    """Degrees north."""
    longitude: float
    """Degrees east."""


class Country(NamedTuple):
    borders: tuple[str, ...]
    """Alpha-2 codes, inside the chosen set or not."""
    area: float
    """Square kilometres."""
    currency: str


class World(NamedTuple):
    airports: tuple[str, ...]
    countries: tuple[str, ...]
    relations: Mapping[str, Mapping[str, str]]
    """relation -> entity -> entity."""

    @property
    def entities(self) -> tuple[str, ...]:
        """Everything a question may start from or ask for, each once, in a fixed order."""
        currencies = sorted(set(self.relations["currency"].values()))
        return (*self.airports, *self.countries, *currencies)


def lookup(world: World, relation: str, entity: str) -> str | None:
    """`relation` of `entity`, None where there is no such relation, entity or value."""
    return world.relations.get(relation, {}).get(entity)


def build_world(airports: Mapping[str, Airport], countries: Mapping[str, Country]) -> World:
    """Joins the two tables; every airport's country must be among `countries`."""
    relations = {
        "country": {code: airport.country for code, airport in airports.items()},
        "near": {code: _nearest(airports, code) for code in airports},
        "east": _next(airports, lambda code: airports[code].longitude, wrap=True),
        "north": _next(airports, lambda code: airports[code].latitude, wrap=False),
        "border": _first_neighbour(countries),
        "bigger": _next(countries, lambda code: countries[code].area, wrap=False),
        "hub": _first_airport(airports),
        "currency": {code: country.currency for code, country in countries.items()},
    }
    return World(tuple(sorted(airports)), tuple(sorted(countries)), relations)


def great_circle(a: Airport, b: Airport) -> float:
    """The angle between two places in radians (haversine)."""
    north_a, north_b = math.radians(a.latitude), math.radians(b.latitude)
    half_north = (north_b - north_a) / 2
    half_east = math.radians(b.longitude - a.longitude) / 2
    chord = math.sin(half_north) ** 2
    chord += math.cos(north_a) * math.cos(north_b) * math.sin(half_east) ** 2
    return 2 * math.asin(math.sqrt(min(1.0, chord)))


def _nearest(airports: Mapping[str, Airport], code: str) -> str:
    others = (other for other in airports if other != code)
    return min(others, key=lambda other: (great_circle(airports[code], airports[other]), other))


def _next(codes: Iterable[str], value: Callable[[str], float], *, wrap: bool) -> dict[str, str]:
    """Each code to the one with the next larger value; `wrap` joins the last to the first."""
    ordered = sorted(codes, key=lambda code: (value(code), code))
    following = ordered[1:] + ordered[:1] if wrap else ordered[1:]
    return dict(zip(ordered, following, strict=wrap))


def _first_neighbour(countries: Mapping[str, Country]) -> dict[str, str]:
    inside = {
        code: [border for border in country.borders if border in countries]
        for code, country in countries.items()
    }
    return {code: min(borders) for code, borders in inside.items() if borders}


def _first_airport(airports: Mapping[str, Airport]) -> dict[str, str]:
    """Each country to the alphabetically first of its airports."""
    return {airports[code].country: code for code in sorted(airports, reverse=True)}
