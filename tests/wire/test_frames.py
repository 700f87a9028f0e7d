"""Frames: what is sent arrives, and nothing else does."""

import math

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_jax.wire import frames
from rl_jax.wire.frames import Call, Cancel, Failure, Frame, RemoteError, Result
from tests.trajectories.build import steady

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
COUNT = st.integers(0, 2**62 - 1)
FRAMES = st.one_of(
    st.builds(Call, COUNT, st.none() | COUNT, st.text(), st.lists(PLAIN, max_size=3)),
    st.builds(Result, COUNT, COUNT, PLAIN),
    st.builds(Failure, COUNT, COUNT, st.text(), st.text()),
    st.builds(Cancel, COUNT, COUNT),
)


def received(data: bytes) -> object:
    length = frames.size(data[:4], frames.MAX_FRAME)
    assert length == len(data) - 4
    return frames.unpack(data[4:])


@steady
@given(FRAMES)
def test_what_is_sent_arrives(frame: Frame) -> None:
    again = frames.decode(received(frames.encode(frame)))
    assert again == frame and type(again) is type(frame)


@steady
@given(st.binary(max_size=40) | PLAIN.map(msgpack.packb))
def test_anything_else_is_one_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        frames.decode(frames.unpack(data))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (["call", 1, 2, "put"], "no call, result, error or cancel"),
        (["shout", 1, 2], "no call, result, error or cancel"),
        ([["call"], 1, 2], "no call, result, error or cancel"),
        (["call", 1, 2, b"put", []], "call: method is no str"),
        (["call", 1, 2, "put", {}], "call: arguments is no list"),
        (["result", 1, None, 3], "result: id is no int"),
        (["cancel", True, 3], "cancel: clock is no int"),
        (["cancel", -1, 3], "cancel: clock -1"),
        (["cancel", 2**62, 3], "cancel: clock"),
    ],
)
def test_what_is_wrong_with_a_frame_is_said(value: list, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        frames.decode(value)


@pytest.mark.parametrize("value", [object(), 2**70, {"x": {1, 2}}])
def test_what_msgpack_has_not_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        frames.pack(value)


def test_a_length_above_the_bound_is_refused() -> None:
    assert frames.size(b"\0\0\1\0", 256) == 256
    with pytest.raises(ValueError, match="a frame of 257 bytes; at most 256"):
        frames.size(b"\0\0\1\1", 256)


@pytest.mark.parametrize(
    ("hello", "refused"),
    [
        ({"protocol": "rl_jax", "version": 1, "token": "key"}, ""),
        ({"protocol": "rl_jax", "version": 1, "token": "other"}, "wrong token"),
        ({"protocol": "rl_jax", "version": 1, "token": b"key"}, "wrong token"),
        ({"protocol": "rl_jax", "version": 1}, "wrong token"),
        (
            {"protocol": "rl_jax", "version": 2, "token": "key"},
            "peer speaks protocol 2, this is 1",
        ),
        ({"version": 1, "token": "key"}, "peer does not speak rl_jax; this is rl_jax protocol 1"),
        ("GET / HTTP/1.1", "peer does not speak rl_jax; this is rl_jax protocol 1"),
    ],
)
def test_who_is_let_in(hello: object, refused: str) -> None:
    assert frames.check_hello(hello, "key") == refused


def test_the_two_sides_understand_each_other() -> None:
    assert frames.check_hello(received(frames.hello("schlüssel")), "schlüssel") == ""
    assert frames.check_welcome(received(frames.welcome())) == ""
    assert frames.check_welcome(received(frames.welcome("wrong token"))) == "wrong token"
    later = {"protocol": "rl_jax", "version": 2, "refused": ""}
    assert frames.check_welcome(later) == "peer speaks protocol 2, this is 1"


class Odd(Exception):
    pass


def test_errors_travel_by_name_from_a_closed_table() -> None:
    table = (ValueError, Odd)
    for error in (ValueError("no\nroom"), Odd("x")):
        again = frames.decode_error(*frames.encode_error(error), table)
        assert type(again) is type(error) and again.args == error.args
    again = frames.decode_error(*frames.encode_error(KeyError("x")), table)
    assert type(again) is RemoteError and str(again) == "KeyError: 'x'"
    assert len(frames.encode_error(ValueError("x" * 10**6))[1]) == frames.MAX_TEXT


def test_numbers_that_are_not_finite_travel() -> None:
    assert received(frames.pack([math.inf, -math.inf])) == [math.inf, -math.inf]
