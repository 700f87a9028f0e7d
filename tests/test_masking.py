"""Segments and the shift by one, on rows written out."""

import jax.numpy as jnp

from rl_jax.masking import align_to_predicted, first_of_segment, next_token

TOKENS = jnp.array([[10, 11, 12, 13], [20, 21, 22, 23]], jnp.int32)


def test_next_token_stays_in_its_row() -> None:
    assert next_token(TOKENS)[:, :-1].tolist() == [[11, 12, 13], [21, 22, 23]]


def test_what_is_predicted_at_one_position_lands_on_the_next() -> None:
    assert align_to_predicted(TOKENS)[:, 1:].tolist() == [[10, 11, 12], [20, 21, 22]]


def test_the_shifts_undo_each_other() -> None:
    assert (align_to_predicted(next_token(TOKENS)) == TOKENS).all()


def test_first_of_segment_marks_starts_of_segments_and_of_padding() -> None:
    segments = jnp.array([[0, 0, 1, -1], [-1, -1, 2, 2]], jnp.int32)
    want = [[True, False, True, True], [True, False, True, False]]
    assert first_of_segment(segments).tolist() == want
