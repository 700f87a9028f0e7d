"""Groups as bytes: round trips, and everything a peer could send instead."""

import copy
import dataclasses
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_jax.trajectories import codec
from rl_jax.trajectories.types import (
    NOT_SAMPLED,
    Group,
    Origin,
    RolloutKey,
    Segment,
    Status,
    Trajectory,
    copy_of,
)
from tests.trajectories.build import (
    group,
    groups,
    same_group,
    same_trajectory,
    steady,
    trajectories,
    trajectory,
)

# beartype's hook draws random items to check while a strategy builds its trajectory.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the .random. module")


@steady
@given(groups())
def test_round_trip(g: Group) -> None:
    assert same_group(g, codec.unpack_group(codec.pack_group(g)))


@steady
@given(trajectories(), st.none() | st.integers(0, 99))
def test_round_trip_of_one(t: Trajectory, original: int | None) -> None:
    t = dataclasses.replace(t, copy_of=original)
    packed = msgpack.packb(codec.encode_trajectory(t))
    assert same_trajectory(codec.decode_trajectory(msgpack.unpackb(packed)), t)


@steady
@given(groups())
def test_plain_form_survives_msgpack_as_it_is(g: Group) -> None:
    plain = codec.encode_group(g)
    assert msgpack.unpackb(msgpack.packb(plain)) == plain


def test_golden_form() -> None:
    assert codec.encode_trajectory(trajectory(3, 0.25, (258, 258, 7), prompt=9)) == [
        ["lookup", 9, 3, 0],
        b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0",
        [1, -1, 2, 258, 1, 7],
        b"\0\0\0\xbf" * 3,  # -0.5
        [[0, 4, 258, 0]],
        1.0,
        0.25,
        0,
        "",
        1,
        None,
    ]


def test_a_copy_is_its_sample() -> None:
    members = trajectory(0), trajectory(2, 0.0)
    g = Group("lookup", 0, (*members, copy_of(members[1])))
    assert codec.encode_group(g)["members"][2] == 2
    assert same_group(g, codec.unpack_group(codec.pack_group(g)))


@pytest.mark.parametrize(
    "members",
    [
        (trajectory(0), copy_of(trajectory(1))),
        (copy_of(trajectory(0)), trajectory(0)),
        (trajectory(0, 1.0), copy_of(trajectory(0, 0.5))),
    ],
    ids=["missing", "later", "different"],
)
def test_a_copy_of_nothing_is_refused(members: tuple[Trajectory, ...]) -> None:
    with pytest.raises(ValueError, match="repeats no member before it"):
        codec.encode_group(Group("lookup", 0, members))


def agent(n: int, turns: int) -> Trajectory:
    """A typical agent's stream: n tokens, of each turn the first half a tool's and the rest
    sampled, a push in the middle; a segment for each prefill and each decode of a turn."""
    half = n // turns // 2
    versions = np.where(np.arange(n) // half % 2, np.int32(12), np.int32(NOT_SAMPLED))
    versions[n // 2 :][versions[n // 2 :] == 12] = 13
    mask = versions != NOT_SAMPLED
    return Trajectory(
        key=RolloutKey("lookup", 123456, 7, 0),
        tokens=np.arange(n, dtype=np.int32) % 200,
        loss_mask=mask,
        behavior_logprobs=np.where(mask, np.float32(-0.123), np.float32(0)),
        versions=versions,
        segments=tuple(
            Segment(t * half, (t + 1) * half, 12, (Origin.PREFILL, Origin.DECODE)[t % 2])
            for t in range(2 * turns)
        ),
        temperature=1.0,
        reward=1.0,
        status=Status.COMPLETED,
        turns=turns,
    )


@pytest.mark.parametrize(
    ("n", "turns", "most"), [(40, 2, 9.0), (500, 10, 7.0), (100_000, 200, 6.2)]
)
def test_bytes_per_token(n: int, turns: int, most: float) -> None:
    t = agent(n, turns)
    assert n > 40 or len(t.segments) == 4
    packed = msgpack.packb(codec.encode_trajectory(t))
    assert len(packed) <= most * n
    assert same_trajectory(codec.decode_trajectory(msgpack.unpackb(packed)), t)


def test_decoded_arrays_do_not_hold_the_message() -> None:
    decoded = codec.unpack_group(codec.pack_group(group()))
    assert all(m.tokens.base is None for m in decoded.members)


def test_encoding_refuses_another_dtype() -> None:
    wrong = trajectory()
    object.__setattr__(wrong, "tokens", wrong.tokens.astype(np.int64))
    with pytest.raises(ValueError, match=r"tokens is int64\[2\]"):
        codec.encode_trajectory(wrong)


def test_encoding_refuses_what_decoding_could_not_restore() -> None:
    wrong = trajectory()
    wrong.behavior_logprobs[0] = -1
    with pytest.raises(ValueError, match="behavior_logprobs: not 0 where"):
        codec.encode_trajectory(wrong)


def at(plain: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of `plain` with `value` at `path`, or without that key where value is ..."""
    changed = copy.deepcopy(plain)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return changed


MEMBER = ("members", 0)
KEY, TOKENS, VERSIONS, LOGPROBS, SEGMENTS, TEMPERATURE, REWARD, STATUS, REASON, TURNS, COPY_OF = (
    range(11)
)
FAULTS = [
    (("prompt",), ..., "group"),
    (("extra",), 1, "group"),
    (("prompt",), True, "prompt"),
    (("prompt",), -1, "prompt"),
    (("task",), b"x", "task"),
    (("task",), "x" * 20_000, "task"),
    (("task",), "other", "no rollout of this group"),
    (("members",), {}, "members"),
    (("members",), [0] * 5_000, "members"),
    (("failures",), [[0]], "failures"),
    (("failures",), [["0", "x"]], "failures"),
    (MEMBER, 0, "members: a copy of sample 0"),
    (MEMBER, True, "trajectory: a list"),
    (MEMBER, [0] * 10, "trajectory: a list of 11"),
    (MEMBER, {}, "trajectory: a list"),
    ((*MEMBER, KEY), ["lookup", 0, 0], "key"),
    ((*MEMBER, KEY, 2), 1.0, "key"),
    ((*MEMBER, TOKENS), [1, 2, 3], "tokens does not hold"),
    ((*MEMBER, TOKENS), "x" * 12, "tokens does not hold"),
    ((*MEMBER, TOKENS), b"12345", "tokens does not hold"),
    ((*MEMBER, TOKENS), b"1234", "versions"),
    ((*MEMBER, VERSIONS), {}, "versions: a list"),
    ((*MEMBER, VERSIONS), [1, -1, 2], "versions: a list of length, version"),
    ((*MEMBER, VERSIONS), [1, -1, 2.0, 0], "versions: a list of length, version"),
    ((*MEMBER, VERSIONS), [True, -1, 2, 0], "versions: a list of length, version"),
    ((*MEMBER, VERSIONS), [1, -1, 1, 0], "versions: runs of 2 tokens for 3"),
    ((*MEMBER, VERSIONS), [4, -1, -1, 0], "versions: runs of 3 tokens for 3"),
    ((*MEMBER, VERSIONS), [1, -1, 1 << 62, 0], "versions: runs of"),
    ((*MEMBER, VERSIONS), [1, -2, 2, 0], "versions: one is outside"),
    ((*MEMBER, VERSIONS), [1, -1, 2, 1 << 31], "versions: one is outside"),
    ((*MEMBER, VERSIONS), [1, -1, 1, 0, 1, 0], "versions: two runs of one"),
    ((*MEMBER, VERSIONS), [1, 0] * 9, "versions: a list of at most 6"),
    ((*MEMBER, LOGPROBS), b"", "behavior_logprobs has 0 entries for 2 sampled"),
    ((*MEMBER, LOGPROBS), np.array([0, np.nan], "<f4").tobytes(), "behavior_logprobs holds"),
    ((*MEMBER, SEGMENTS, 0, 1), 4, "segments"),
    ((*MEMBER, SEGMENTS, 0, 3), 3, "segments: 3 is none of the 3 kinds"),
    ((*MEMBER, SEGMENTS, 0, 3), "prefill", "segments"),
    ((*MEMBER, TEMPERATURE), float("inf"), "temperature"),
    ((*MEMBER, TEMPERATURE), 1, "temperature"),
    ((*MEMBER, REWARD), float("nan"), "reward"),
    ((*MEMBER, REWARD), "1.0", "reward"),
    ((*MEMBER, STATUS), 3, "status: 3 is none"),
    ((*MEMBER, REASON), None, "reason"),
    ((*MEMBER, TURNS), -1, "turns"),
    ((*MEMBER, COPY_OF), "0", "copy_of"),
    ((*MEMBER, COPY_OF), 0, "is a copy; its sample alone"),
]


@pytest.mark.parametrize(("path", "value", "said"), FAULTS)
def test_one_line_names_what_is_wrong(path: tuple[Any, ...], value: Any, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        codec.decode_group(at(codec.encode_group(group()), path, value))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@steady
@given(st.data())
def test_damaged_bytes_decode_or_raise_value_error(data: st.DataObject) -> None:
    packed = bytearray(codec.pack_group(group()))
    for _ in range(data.draw(st.integers(1, 3))):
        packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        codec.unpack_group(bytes(packed))
    except ValueError:
        return


@pytest.mark.parametrize("n", range(0, 40, 3))
def test_cut_bytes_are_refused(n: int) -> None:
    with pytest.raises(ValueError, match="group"):
        codec.unpack_group(codec.pack_group(group())[:-1][:n])


def test_nested_bombs_are_refused() -> None:
    with pytest.raises(ValueError, match="group is not msgpack"):
        codec.unpack_group(b"\x91" * 100_000)


def routed(member: Trajectory, dtype: type = np.uint8) -> Trajectory:
    """Experts 0, 1, 2, ... for all tokens but the last, in two layers of three."""
    n = len(member.tokens) - 1
    return dataclasses.replace(member, choices=np.arange(6 * n).reshape(n, 2, 3).astype(dtype))


def test_golden_form_of_choices() -> None:
    own = trajectory(3, 0.25, (258,), prompt=9)
    encoded = codec.encode_trajectory(routed(own))
    assert encoded[:11] == codec.encode_trajectory(own)
    assert encoded[11:] == [[1, 2, 3, b"\0\1\2\3\4\5"]]
    wide = codec.encode_trajectory(routed(own, np.uint16))
    assert wide[11] == [2, 2, 3, b"\0\0\1\0\2\0\3\0\4\0\5\0"]


def test_choices_take_a_byte_each_and_nothing_where_there_are_none() -> None:
    own = trajectory(0, versions=(0,) * 20)
    bare, full = (Group("lookup", 0, (m,)) for m in (own, routed(own)))
    more = len(codec.pack_group(full)) - len(codec.pack_group(bare))
    assert more == 20 * 6 + 6  # a list of 4, three small numbers, bytes with their length


@pytest.mark.parametrize(
    ("recorded", "said"),
    [
        (None, "choices: a list of at most 4"),
        ([3, 1, 1, b""], "choices: no bytes of 3"),
        ([True, 1, 1, b""], "choices: no bytes of True"),
        ([1, 0, 1, b""], "choices: no bytes of 1 for 0 x 1"),
        ([1, -1, 1, b""], "choices: -1"),
        ([1, 2, 2, b"123"], "choices: no bytes of 1 for 2 x 2"),
        ([1, 1, 1, "1"], "choices: no bytes"),
        ([1, 1, 1, b"123"], "choices of 3 tokens; at most 2"),
    ],
)
def test_other_choices_are_refused(recorded: Any, said: str) -> None:
    plain = codec.encode_trajectory(trajectory())
    with pytest.raises(ValueError, match=said):
        codec.decode_trajectory([*plain, recorded])


def test_choices_of_another_form_are_not_written() -> None:
    with pytest.raises(ValueError, match=r"choices are int64\[1, 2, 3\]"):
        codec.encode_trajectory(routed(trajectory(), np.int64))


def test_a_copy_has_its_samples_choices() -> None:
    own = routed(trajectory(1))
    g = Group("lookup", 0, (own, copy_of(own)))
    assert same_group(g, codec.unpack_group(codec.pack_group(g)))
