"""Places in packed rows: aligned, whole, apart, and always the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_jax.arrays import CHUNK, round_up
from rl_jax.trajectories.packing import Place, pack
from tests.trajectories.build import steady

ROW = 4 * CHUNK
lengths = st.lists(st.integers(0, ROW), max_size=30)


def test_by_hand() -> None:
    # Longest first: 200 fills a row, then 130 takes three chunks and leaves one for 64.
    assert pack([10, 200, 64, 130], ROW) == [Place(2, 0), Place(0, 0), Place(1, 192), Place(1, 0)]


def test_equal_lengths_keep_their_order() -> None:
    assert pack([128] * 3, ROW) == [Place(0, 0), Place(0, 128), Place(1, 0)]


def test_nothing_to_pack() -> None:
    assert pack([], ROW) == []


@steady
@given(lengths)
def test_aligned_whole_and_apart(wanted: list[int]) -> None:
    places = pack(wanted, ROW)
    taken = set()
    for place, length in zip(places, wanted, strict=True):
        assert place.start % CHUNK == 0
        assert place.start + length <= ROW
        own = {(place.row, c) for c in range(place.start, place.start + round_up(length, CHUNK))}
        assert not own & taken
        taken |= own


@steady
@given(lengths)
def test_deterministic_and_by_length_alone(wanted: list[int]) -> None:
    assert pack(wanted, ROW) == pack(tuple(wanted), ROW)
    # Only a length's number of chunks and the order of lengths matter to the rows used.
    assert sorted(pack(wanted, ROW)) == sorted(pack(wanted[::-1], ROW))


@steady
@given(lengths.filter(any))
def test_no_row_is_opened_while_another_has_room(wanted: list[int]) -> None:
    places = pack(wanted, ROW)
    filled: dict[int, int] = {}
    for place, length in zip(places, wanted, strict=True):
        filled[place.row] = filled.get(place.row, 0) + round_up(length, CHUNK)
    rows = sorted(filled)
    assert rows == list(range(len(rows)))
    assert all(filled[a] + filled[b] > ROW for a in rows for b in rows if a < b)


def test_a_trajectory_longer_than_a_row() -> None:
    with pytest.raises(ValueError, match="a trajectory of 257 tokens exceeds a row of 256"):
        pack([3, 257], ROW)


def test_a_row_is_whole_chunks() -> None:
    with pytest.raises(ValueError, match="row_length must be a multiple of 64, got 100"):
        pack([3], 100)
