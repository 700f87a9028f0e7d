"""The lookup world: facts known by hand, and each relation against another way to compute it."""

import airportsdata
import numpy as np
import pytest

from rl_jax.tasks.lookup.data import AIRPORTS, load_world
from rl_jax.tasks.lookup.world import Airport, Country, build_world, lookup

WORLD = load_world()

TOY = build_world(
    {
        "AAA": Airport("X", 0.0, 179.0),
        "BBB": Airport("X", 1.0, -179.0),
        "CCC": Airport("Y", 2.0, 150.0),
    },
    {"X": Country(("Z", "Y"), 10.0, "XXD"), "Y": Country((), 20.0, "YYD")},
)


@pytest.mark.parametrize(
    ("relation", "entity", "value"),
    [
        ("country", "FRA", "DE"),
        ("country", "HND", "JP"),
        ("country", "JFK", "US"),
        ("near", "SIN", "KUL"),
        ("near", "LHR", "CDG"),
        ("near", "PEK", "ICN"),
        ("border", "DE", "AT"),
        ("border", "IE", "GB"),
        ("border", "GB", "IE"),
        ("border", "PT", "ES"),
        ("border", "KR", None),
        ("bigger", "US", "CN"),
        ("bigger", "CA", "RU"),
        ("bigger", "RU", None),
        ("hub", "DE", "FRA"),
        ("hub", "TH", "BKK"),
        ("currency", "DE", "EUR"),
        ("currency", "CH", "CHF"),
        ("currency", "GB", "GBP"),
        ("currency", "US", "USD"),
        ("currency", "FRA", None),
        ("capital", "DE", None),
        ("country", "XXX", None),
    ],
)
def test_known_facts(relation: str, entity: str, value: str | None):
    assert lookup(WORLD, relation, entity) == value


def test_toy_world_by_hand():
    assert TOY.relations == {
        "country": {"AAA": "X", "BBB": "X", "CCC": "Y"},
        "near": {"AAA": "BBB", "BBB": "AAA", "CCC": "AAA"},  # across the date line
        "east": {"BBB": "CCC", "CCC": "AAA", "AAA": "BBB"},
        "north": {"AAA": "BBB", "BBB": "CCC"},
        "border": {"X": "Y"},  # Z is outside
        "bigger": {"X": "Y"},
        "hub": {"X": "AAA", "Y": "CCC"},
        "currency": {"X": "XXD", "Y": "YYD"},
    }


def test_nearest_agrees_with_straight_lines_through_the_earth():
    records = airportsdata.load("IATA")
    north, east = np.radians([[records[c]["lat"], records[c]["lon"]] for c in AIRPORTS]).T
    places = np.stack([np.cos(north) * np.cos(east), np.cos(north) * np.sin(east), np.sin(north)])
    chords = np.linalg.norm(places[:, :, None] - places[:, None, :], axis=0)
    np.fill_diagonal(chords, np.inf)
    nearest = {code: AIRPORTS[i] for code, i in zip(AIRPORTS, chords.argmin(0), strict=True)}
    assert WORLD.relations["near"] == nearest


def test_codes_are_unambiguous_and_relations_stay_inside():
    assert 60 <= len(WORLD.airports) <= 100 and 40 <= len(WORLD.countries) <= 60
    assert len(set(WORLD.entities)) == len(WORLD.entities)
    for relation, table in WORLD.relations.items():
        assert not set(WORLD.relations) & set(WORLD.entities)
        kinds = {"near": WORLD.airports, "east": WORLD.airports, "north": WORLD.airports}
        allowed = kinds.get(relation, WORLD.entities)
        assert set(table) <= set(WORLD.entities) and set(table.values()) <= set(allowed)
        assert all(entity != value for entity, value in table.items())


def test_east_goes_once_round_the_world():
    at, seen = "FRA", []
    for _ in WORLD.airports:
        at = WORLD.relations["east"][at]
        seen.append(at)
    assert sorted(seen) == list(WORLD.airports) and at == "FRA"
