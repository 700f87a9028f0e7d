"""Groups as bytes: round trips, and everything a peer could send instead."""

import copy
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_jax.trajectories import codec
from rl_jax.trajectories.types import Group
from tests.trajectories.build import group, groups, same_group, steady, trajectory

# beartype's hook draws random items to check while a strategy builds its trajectory.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the .random. module")


@steady
@given(groups())
def test_round_trip(g: Group) -> None:
    assert same_group(g, codec.unpack_group(codec.pack_group(g)))


@steady
@given(groups())
def test_plain_form_survives_msgpack_as_it_is(g: Group) -> None:
    plain = codec.encode_group(g)
    assert msgpack.unpackb(msgpack.packb(plain)) == plain


def test_arrays_are_little_endian_of_the_declared_dtype() -> None:
    plain = codec.encode_trajectory(trajectory(versions=(258,)))
    assert plain["versions"] == {
        "dtype": "int32",
        "shape": [2],
        "data": b"\xff\xff\xff\xff\x02\x01\x00\x00",
    }
    assert plain["loss_mask"]["data"] == b"\x00\x01"
    assert plain["behavior_logprobs"]["data"] == np.array([0, -0.5], "<f4").tobytes()


def test_decoded_arrays_do_not_hold_the_message() -> None:
    decoded = codec.unpack_group(codec.pack_group(group()))
    assert all(m.tokens.base is None for m in decoded.members)


def test_encoding_refuses_another_dtype() -> None:
    wrong = trajectory()
    object.__setattr__(wrong, "tokens", wrong.tokens.astype(np.int64))
    with pytest.raises(ValueError, match=r"tokens is int64\[2\]"):
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
    ((*MEMBER, "tokens"), [1, 2, 3], "tokens"),
    ((*MEMBER, "tokens", "dtype"), "object", "tokens has dtype 'object'"),
    ((*MEMBER, "tokens", "dtype"), "int64", "tokens has dtype 'int64'"),
    ((*MEMBER, "tokens", "data"), b"123", "tokens does not hold"),
    ((*MEMBER, "tokens", "data"), "x" * 12, "tokens does not hold"),
    ((*MEMBER, "tokens", "shape"), [1 << 40], "tokens has"),
    ((*MEMBER, "tokens", "shape"), [3, 1], "tokens"),
    ((*MEMBER, "tokens", "shape"), [True], "tokens"),
    ((*MEMBER, "loss_mask", "data"), b"\x00\x01\x02", "loss_mask holds a byte"),
    ((*MEMBER, "loss_mask", "data"), b"\x00\x01\x00", "versions must be set"),
    (
        (*MEMBER, "behavior_logprobs", "data"),
        np.array([0, np.nan, 0], "<f4").tobytes(),
        "behavior_logprobs holds a number",
    ),
    (
        (*MEMBER, "behavior_logprobs"),
        {"dtype": "float32", "shape": [0], "data": b""},
        "behavior_logprobs has 0 entries for 3 tokens",
    ),
    ((*MEMBER, "key"), ["lookup", 0, 0], "key"),
    ((*MEMBER, "key", 2), 1.0, "key"),
    ((*MEMBER, "segments", 0, 1), 4, "segments"),
    ((*MEMBER, "segments", 0, 3), "guess", "segments"),
    ((*MEMBER, "temperature"), float("inf"), "temperature"),
    ((*MEMBER, "temperature"), 1, "temperature"),
    ((*MEMBER, "reward"), float("nan"), "reward"),
    ((*MEMBER, "reward"), "1.0", "reward"),
    ((*MEMBER, "status"), "dreaming", "status"),
    ((*MEMBER, "turns"), -1, "turns"),
    ((*MEMBER, "copy_of"), "0", "copy_of"),
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
