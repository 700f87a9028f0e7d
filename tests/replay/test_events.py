"""Events as plain values: round trips of every kind, and what is refused."""

import dataclasses
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_jax.replay.events import (
    BatchTaken,
    Event,
    GroupDropped,
    GroupId,
    GroupPut,
    RolloutFailed,
    RolloutStarted,
    RunStarted,
    UpdateDone,
    VersionPublished,
    decode,
    encode,
    group_id,
)
from rl_jax.replay.journal import encode_record
from rl_jax.trajectories.types import Group, RolloutKey, copy_of
from tests.trajectories.build import group, groups, same_group, steady, trajectory

# beartype's hook draws random items to check while a strategy builds its trajectory.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the .random. module")

TEXT = st.text(max_size=9)
COUNT = st.integers(0, 2**40)
KEYS = st.builds(RolloutKey, TEXT, COUNT, COUNT, COUNT)
IDS = st.builds(GroupId, TEXT, COUNT, st.lists(st.tuples(COUNT, COUNT), max_size=3).map(tuple))
EVENTS = st.one_of(
    st.builds(RunStarted, COUNT, TEXT, TEXT),
    st.builds(RolloutStarted, KEYS),
    st.builds(RolloutFailed, KEYS, TEXT),
    st.builds(GroupDropped, IDS, TEXT),
    st.builds(BatchTaken, COUNT, COUNT, st.lists(IDS, max_size=3).map(tuple)),
    st.builds(UpdateDone, COUNT, st.dictionaries(TEXT, st.floats(allow_nan=False)), TEXT),
    st.builds(VersionPublished, COUNT, TEXT, COUNT),
)


def through_msgpack(event: Event) -> Event:
    return decode(msgpack.unpackb(msgpack.packb(encode(event))))


@steady
@given(EVENTS)
def test_round_trip(event: Event) -> None:
    assert through_msgpack(event) == event


@steady
@given(groups())
def test_round_trip_of_trajectories(g: Group) -> None:
    again = through_msgpack(GroupPut(g))
    assert isinstance(again, GroupPut) and same_group(again.group, g)


@steady
@given(EVENTS)
def test_kind_comes_first(event: Event) -> None:
    assert next(iter(encode(event))) == "kind"
    encode_record(encode(event))


def test_a_group_is_known_by_its_rollouts() -> None:
    members = (trajectory(0, 1.0), trajectory(2, 0.0, attempt=1))
    g = Group("lookup", 0, (*members, copy_of(members[0])), ((1, "died"),))
    assert group_id(g) == GroupId("lookup", 0, ((0, 0), (2, 1)))


TAKEN = encode(BatchTaken(3, 1, (group_id(group(4)), group_id(group(5)))))
DONE = encode(UpdateDone(3, {"loss": 0.5}))
FAULTS: list[tuple[Any, str]] = [
    (None, "no event"),
    ([], "no event"),
    ({"step": 3}, "no event: kind is none of"),
    ({"kind": "guess"}, "no event: kind is none of"),
    ({**TAKEN, "more": 1}, "batch_taken: "),
    ({k: v for k, v in TAKEN.items() if k != "step"}, "batch_taken: "),
    ({**TAKEN, "step": "3"}, "batch_taken: '3' is not int"),
    ({**TAKEN, "step": True}, "batch_taken: True is not int"),
    ({**TAKEN, "groups": 7}, "batch_taken: 7 is not a list"),
    ({**TAKEN, "groups": [["lookup", 1]]}, "batch_taken: "),
    ({**TAKEN, "groups": [["lookup", 1, [[0]]]]}, "batch_taken: key"),
    ({**TAKEN, "groups": [[3, 1, []]]}, "batch_taken: key"),
    ({**DONE, "metrics": [1]}, "update_done: "),
    ({**DONE, "metrics": {"loss": 1}}, "update_done: 1 is not float"),
    ({"kind": "rollout_started", "key": ["t", 0, 0]}, "rollout_started: key"),
    ({"kind": "group_put", "group": {}}, "group_put: group"),
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
