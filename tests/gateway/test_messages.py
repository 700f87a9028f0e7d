"""Requests, completions and segments over the wire: every bit arrives, nothing else is taken."""

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_jax.gateway import messages
from rl_jax.gateway.protocol import Completion, Finish, Request
from rl_jax.trajectories.types import Origin, Segment
from tests.trajectories.build import INT32, steady

IDS = st.lists(INT32, max_size=8)
LOGPROB = st.floats(max_value=0, width=32, allow_nan=False, allow_infinity=False)


@st.composite
def completions(draw: st.DrawFn) -> Completion:
    n = draw(st.integers(0, 8))
    floats, ids = st.lists(LOGPROB, min_size=n, max_size=n), st.lists(INT32, min_size=n, max_size=n)
    columns = (tuple(draw(kind)) for kind in (ids, floats, floats, ids))
    return Completion(*columns, draw(st.sampled_from(Finish)))


REQUESTS = st.tuples(IDS.map(tuple), st.integers(1, 2**40), IDS.map(frozenset), st.floats(0.1, 4.0))
SEGMENTS = st.lists(st.builds(Segment, INT32, INT32, INT32, st.sampled_from(Origin))).map(tuple)


def sent(value: object) -> object:
    return msgpack.unpackb(msgpack.packb(value))


@steady
@given(REQUESTS, st.booleans(), completions(), SEGMENTS)
def test_what_is_sent_arrives(
    asked: tuple, training: bool, completion: Completion, segments: tuple[Segment, ...]
) -> None:
    request = Request(*asked, training=training)
    assert messages.decode_request(sent(messages.encode_request(request))) == request
    assert messages.decode_completion(sent(messages.encode_completion(completion))) == completion
    assert messages.decode_segments(sent(messages.encode_segments(segments))) == segments


def test_arrays_travel_as_their_bytes() -> None:
    completion = Completion((1, 258), (-0.5, -2.0), (-1.0, -1.0), (7, 7), Finish.STOP)
    plain = messages.encode_completion(completion)
    assert plain[0] == ["int32", b"\1\0\0\0\2\1\0\0"]
    assert plain[1] == ["float32", np.float32([-0.5, -2.0]).tobytes()]


def test_choices_travel_only_where_they_are_recorded() -> None:
    bare = Completion((1,), (-0.5,), (-1.0,), (7,), Finish.LENGTH)
    full = bare._replace(choices=np.uint8([[[3, 1]], [[0, 2]]]))
    plain = messages.encode_completion(full)
    assert plain[:5] == messages.encode_completion(bare)
    assert plain[5:] == [[1, 1, 2, b"\3\1\0\2"]]
    arrived = messages.decode_completion(sent(plain))
    assert arrived[:5] == bare[:5]
    assert arrived.choices is not None and arrived.choices.dtype == np.uint8
    assert arrived.choices.tolist() == [[[3, 1]], [[0, 2]]]


def changed(plain: list, place: int, value: object) -> list:
    return [*plain[:place], value, *plain[place + 1 :]]


REQUEST = messages.encode_request(Request((1, 2), 3, frozenset({4}), 1.0))
COMPLETION = messages.encode_completion(Completion((1,), (-1.0,), (-1.0,), (0,), Finish.STOP))
ONE = ["int32", b"\0\0\0\0"]


@pytest.mark.parametrize(
    ("decode", "plain", "said"),
    [
        (messages.decode_request, None, "request: a list of 6"),
        (messages.decode_request, REQUEST[:5], "request: a list of 6"),
        (messages.decode_request, changed(REQUEST, 0, [1, 2]), "new_tokens: no bytes of int32"),
        (messages.decode_request, changed(REQUEST, 0, ["int32", b"123"]), "new_tokens: no bytes"),
        (messages.decode_request, changed(REQUEST, 0, ["int64", b""]), "new_tokens: no bytes"),
        (messages.decode_request, changed(REQUEST, 1, 0), "max_new_tokens must be at least 1"),
        (messages.decode_request, changed(REQUEST, 1, "3"), "max_new_tokens: '3'"),
        (messages.decode_request, changed(REQUEST, 3, float("nan")), "temperature: nan"),
        (messages.decode_request, changed(REQUEST, 4, 0.5), "top_p must be 1.0"),
        (messages.decode_request, changed(REQUEST, 5, 1), "training: 1 is neither"),
        (messages.decode_completion, changed(COMPLETION, 3, ["int32", b""]), "do not fit together"),
        (messages.decode_completion, changed(COMPLETION, 4, "bored"), "'bored' is not a valid"),
        (messages.decode_completion, [*COMPLETION, None], "choices: a list of at most 4"),
        (messages.decode_completion, [*COMPLETION, [], []], "completion: a list of 5"),
        (messages.decode_segments, [ONE, ONE, ONE, ["uint8", b""]], "do not fit together"),
        (messages.decode_segments, [ONE, ONE, ONE, ["uint8", b"\3"]], "do not fit together"),
    ],
)
def test_anything_else_is_refused(decode: object, plain: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        decode(plain)  # type: ignore[operator]
