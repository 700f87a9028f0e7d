"""Units of a trajectory log as plain values."""

from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_jax.replay.fates import OPEN, Fate, Kind, Unit, decode_unit, encode_unit, with_fate
from rl_jax.trajectories.types import Group, Trajectory
from tests.trajectories.build import (
    group,
    groups,
    same_group,
    same_trajectory,
    steady,
    trajectories,
    trajectory,
)

# beartype's hook draws random items to check while a strategy builds its values.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the .random. module")

FATES = st.builds(Fate, st.sampled_from(Kind), st.integers(-1, 2**40), st.text(max_size=9))


@steady
@given(groups() | trajectories(), FATES)
def test_round_trip(body: Group | Trajectory, fate: Fate) -> None:
    for plain in (encode_unit(Unit(body, fate)), with_fate(encode_unit(Unit(body, OPEN)), fate)):
        again = decode_unit(msgpack.unpackb(msgpack.packb(plain)))
        assert again.fate == fate
        if isinstance(body, Group):
            assert isinstance(again.body, Group) and same_group(again.body, body)
        else:
            assert isinstance(again.body, Trajectory) and same_trajectory(again.body, body)


GROUP = encode_unit(Unit(group(), OPEN))
ONE = encode_unit(Unit(trajectory(), Fate(Kind.EVALUATED, 3)))


def fated(fate: Any) -> dict[str, Any]:
    return {"kind": "group", "v": [fate, GROUP["v"][1]]}


FAULTS: list[tuple[Any, str]] = [
    (None, "unit: a map"),
    ({"kind": "group"}, "unit: a map"),
    ({**GROUP, "more": 1}, "unit: a map"),
    ({**GROUP, "v": []}, "unit: v is no list"),
    ({**GROUP, "kind": "rollout"}, "unit: kind 'rollout' is neither"),
    ({**GROUP, "kind": ["group"]}, "unit: kind ['group'] is neither"),
    ({**GROUP, "kind": "trajectory"}, "trajectory: "),
    ({**ONE, "kind": "group"}, "group: "),
    (fated(["lost", 1, ""]), "fate: ['lost', 1, ''] is not"),
    (fated(["trained", True, ""]), "fate: "),
    (fated(["trained", -2, ""]), "fate: "),
    (fated(["trained", 1, None]), "fate: "),
    (fated(["trained", 1, "x" * 20_000]), "fate: "),
    (fated("trained"), "fate: "),
]


@pytest.mark.parametrize(("value", "said"), FAULTS)
def test_one_line_names_what_is_wrong(value: Any, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        decode_unit(value)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)
