"""Events as plain values: round trips of every kind, how small they are, and what is refused."""

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_jax.replay.events import (
    BatchTaken,
    CheckpointSaved,
    Evaluated,
    Event,
    GroupDiscarded,
    GroupDropped,
    GroupId,
    GroupPut,
    ProcessEnded,
    ProcessStarted,
    RolloutDone,
    RolloutLost,
    RolloutStarted,
    RunEnded,
    RunStarted,
    UpdateDone,
    VersionApplied,
    VersionPublished,
    decode,
    encode,
    group_id,
)
from rl_jax.replay.log import Entry, encode_entry
from rl_jax.replay.records import encode_record
from rl_jax.trajectories.types import RolloutKey
from tests.trajectories.build import group, steady

# beartype's hook draws random items to check while a strategy builds its values.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the .random. module")

SHA = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
TEXT = st.text(max_size=9) | st.binary(min_size=31, max_size=33).map(bytes.hex)
COUNT = st.integers(0, 2**40)
REAL = st.floats(allow_nan=False)
RATE = st.floats(0, 1) | st.fractions(0, 1, max_denominator=5000).map(float)
KEYS = st.builds(RolloutKey, TEXT, COUNT, COUNT, COUNT)
IDS = st.builds(GroupId, st.sampled_from("ab"), COUNT)
FIELDS: dict[Any, st.SearchStrategy] = {
    int: COUNT,
    float: REAL,
    str: TEXT,
    RolloutKey: KEYS,
    GroupId: IDS,
    tuple[GroupId, ...]: st.lists(IDS, max_size=5).map(tuple),
    Mapping[str, float]: st.dictionaries(TEXT, RATE),
}


def of(kind: type[Event]) -> st.SearchStrategy[Event]:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, *(FIELDS[hints[f.name]] for f in dataclasses.fields(kind)))


EVENTS = st.one_of(*map(of, typing.get_args(Event)))


@steady
@given(EVENTS)
def test_round_trip(event: Event) -> None:
    assert decode(msgpack.unpackb(msgpack.packb(encode(event)))) == event


KEY = RolloutKey("lookup", 812_345, 15, 1)
REALISTIC: list[Event] = [
    RunStarted(1234, SHA, 99_000),
    RunEnded("finished"),
    RolloutStarted(KEY),
    RolloutDone(KEY, "completed", 100_000),
    RolloutLost(KEY, "the sampler died: process 31245 ended with code -9"),
    GroupPut(GroupId("lookup", 812_345), 12_345, 1_600_000),
    GroupDropped(GroupId("lookup", 812_345), "oldest token 5 pushes old, at most 4"),
    GroupDiscarded(GroupId("lookup", 812_345), "7 of 16 rollouts valid: tool: no answer in 30 s"),
    BatchTaken(50_000, 12_345, tuple(GroupId("lookup", 812_345 - 17 * i * i) for i in range(16))),
    UpdateDone(50_000, -0.0123456789, 1.23456789),
    VersionPublished(12_345, SHA, 50_000),
    VersionApplied(12_345, 0.123456789),
    CheckpointSaved(50_000, 12_345),
    Evaluated(
        "before", 12_345, {"all": 239 / 288} | {f"hops={n}": (31 + n) / 48 for n in range(1, 7)}
    ),
    ProcessStarted("orchestrator", 4_000_000),
    ProcessEnded("orchestrator", 4_000_000, -9),
]


@pytest.mark.parametrize("event", REALISTIC, ids=lambda e: e.kind)
def test_at_most_150_bytes_on_disk(event: Event) -> None:
    assert {type(e) for e in REALISTIC} == set(typing.get_args(Event))
    record = encode_record(encode_entry(Entry(5_000_000, "trainer", 400_000, event)))
    assert len(record) <= 150
    assert decode(encode(event)) == event


def test_a_batch_keeps_its_order_over_tasks() -> None:
    ids = (GroupId("a", 7), GroupId("a", 3), GroupId("b", 3), GroupId("a", 1))
    assert encode(BatchTaken(2, 1, ids)) == {
        "kind": "batch_taken",
        "v": [2, 1, [["a", [7, 3]], ["b", [3]], ["a", [1]]]],
    }
    assert decode(encode(BatchTaken(2, 1, ids))) == BatchTaken(2, 1, ids)


def test_a_digest_is_its_bytes() -> None:
    assert encode(VersionPublished(3, SHA, 12))["v"] == [3, bytes.fromhex(SHA), 12]
    assert encode(VersionPublished(3, SHA.upper(), 12))["v"] == [3, SHA.upper(), 12]


def test_a_group_is_known_by_its_prompt() -> None:
    assert group_id(group(7)) == GroupId("lookup", 7)


def batch(*values: Any) -> dict[str, Any]:
    return {"kind": "batch_taken", "v": list(values)}


FAULTS: list[tuple[Any, str]] = [
    (None, "no event"),
    ([], "no event"),
    ({"v": [3]}, "no event: kind is none of"),
    ({"kind": "guess", "v": []}, "no event: kind is none of"),
    ({"kind": [], "v": []}, "no event: kind is none of"),
    ({"kind": "batch_taken"}, "batch_taken: v is no list of step, published_version, groups"),
    ({**batch(1, 0, []), "more": 1}, "batch_taken: v is no list"),
    (batch(1, 0), "batch_taken: v is no list"),
    (batch("1", 0, []), "batch_taken: step: '1' is no int"),
    (batch(True, 0, []), "batch_taken: step: True is no int"),
    (batch(1, 0, 7), "batch_taken: groups: 7 is no list"),
    (batch(1, 0, [["t"]]), "batch_taken: groups: ['t'] is not [task, prompts]"),
    (batch(1, 0, [[3, [1]]]), "batch_taken: groups: 3 is no str"),
    (batch(1, 0, [["t", ["1"]]]), "batch_taken: groups: '1' is no int"),
    (batch(1, 0, [["t", []]]), "batch_taken: [1, 0, [['t', []]]] is not as encoding makes it"),
    (batch(1, 0, [["t", [1]], ["t", [2]]]), "batch_taken: "),
    ({"kind": "group_dropped", "v": [["t"], ""]}, "group_dropped: group: ['t'] is not [task, "),
    ({"kind": "rollout_started", "v": [["t", 0, 0]]}, "rollout_started: key: key"),
    ({"kind": "update_done", "v": [1, 1, 0.5]}, "update_done: loss: 1 is no float"),
    ({"kind": "version_published", "v": [1, b"ab", 0]}, "version_published: digest: b'ab' is no"),
    ({"kind": "version_published", "v": [1, SHA, 0]}, "version_published: "),
    ({"kind": "evaluated", "v": ["after", 1, [1]]}, "evaluated: rates: [1] is no dict"),
    ({"kind": "evaluated", "v": ["after", 1, {"all": 1}]}, "evaluated: rates: 1 is no float"),
    ({"kind": "evaluated", "v": ["after", 1, {"all": [1, 0]}]}, "evaluated: rates: [1, 0] is not"),
    ({"kind": "evaluated", "v": ["after", 1, {"all": [2, 4]}]}, "evaluated: "),
]


@pytest.mark.parametrize(("value", "said"), FAULTS)
def test_one_line_names_what_is_wrong(value: Any, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        decode(value)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


def test_events_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(RolloutStarted(RolloutKey("t", 0, 0)), "key", RolloutKey("t", 1, 0))  # noqa: B010
