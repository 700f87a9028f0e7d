"""Parameters, masters and moments in dtypes of choice: what is rounded, what is not."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rl_jax.losses.recipes import dis
from rl_jax.losses.types import PROXIMAL, ema
from rl_jax.precision import kept_in, taking_any, widened
from rl_jax.snapshots.manifest import build_manifest
from rl_jax.snapshots.publisher import served_copy
from rl_jax.trainer.anchors import kept
from rl_jax.trainer.batches import Shape
from rl_jax.trainer.state import Storage, TrainState, adam, after_push, init_state, moments_in
from rl_jax.trainer.step import make_train_step
from tests.fakes.bigram import bigram, table
from tests.trainer.build import VOCAB, batch_of, descent, random_trajectories, start

DIS, DESCENT, MODEL = dis(), descent(), taking_any(bigram(VOCAB))
OWN = random_trajectories((100, 70, 64, 50))
BATCH = batch_of(OWN, Shape(2, 2, 128), DIS, [1.0, -1.0, 0.5, -0.5])
BF16 = Storage("bfloat16")
TABLE = table(VOCAB)


def stepped(params, storage: Storage, optimizer=DESCENT) -> TrainState:
    made = make_train_step(MODEL, DIS, {"policy": optimizer}, vocab_chunk=4, storage=storage)
    state = start(DIS, optimizer, kept_in(params, storage.trained))
    return jax.block_until_ready(jax.jit(made)(state, BATCH)[0])


def test_masters_take_the_gradient_of_the_rounded_parameters() -> None:
    """Of each microbatch in bfloat16, summed in float32: the masters' low bits stay."""
    rounded = widened(kept_in(TABLE, "bfloat16"))
    assert (rounded["table"] != TABLE["table"]).any()
    got = stepped(TABLE, BF16).params["policy"]["table"]
    want = stepped(rounded, Storage()).params["policy"]["table"] - rounded["table"]
    assert got.dtype == jnp.float32
    gradient = np.asarray(got - TABLE["table"])
    np.testing.assert_allclose(gradient, want, rtol=2**-7, atol=2**-9 * float(abs(want).max()))


def test_without_masters_a_small_step_is_lost_and_with_them_it_is_not() -> None:
    small = DESCENT._replace(learning_rate=lambda step: jnp.float32(1e-3))
    bare = stepped(TABLE, Storage("bfloat16", masters=False), small).params["policy"]["table"]
    assert bare.dtype == jnp.bfloat16
    moved = bare != TABLE["table"].astype(jnp.bfloat16)
    assert float(moved.mean()) < 0.1
    with_masters = stepped(TABLE, BF16, small).params["policy"]["table"]
    assert float((with_masters != TABLE["table"]).mean()) > 5 * float(moved.mean())


def test_moments_are_kept_in_their_dtype_and_computed_in_float32() -> None:
    """Each step is float32 Adam's from the rounded state; the count stays whole."""
    plain, stored = (
        optax.scale_by_adam(0.9, 0.95),
        moments_in(optax.scale_by_adam(0.9, 0.95), jnp.bfloat16),
    )
    draws = np.random.default_rng(0)
    state = stored.init(TABLE)
    for _ in range(3):
        gradient = {"table": jnp.asarray(draws.normal(size=(VOCAB, VOCAB)), jnp.float32)}
        want, exact = plain.update(gradient, widened(state))
        got, state = stored.update(gradient, state)
        np.testing.assert_array_equal(got["table"], want["table"])
        np.testing.assert_array_equal(state.nu["table"], exact.nu["table"].astype(jnp.bfloat16))
        assert state.mu["table"].dtype == jnp.bfloat16
    assert int(state.count) == 3


def test_averages_stay_in_float32_and_other_trees_are_rounded() -> None:
    average = ema(0.9)
    trees = kept({average: TABLE, PROXIMAL: TABLE}, BF16)
    np.testing.assert_array_equal(trees[average]["table"], TABLE["table"])
    assert trees[PROXIMAL]["table"].dtype == jnp.bfloat16


def test_a_push_rounds_the_proximal_policy_and_keeps_the_masters() -> None:
    own = {"policy": TABLE} | kept({PROXIMAL: {"table": jnp.zeros((VOCAB, VOCAB))}}, BF16)
    optimizers = {"policy": adam(1e-3)}
    pushed = after_push(init_state(own, optimizers, {"policy": ()}), optimizers)
    np.testing.assert_array_equal(
        pushed.params[PROXIMAL]["table"], TABLE["table"].astype(jnp.bfloat16)
    )
    np.testing.assert_array_equal(pushed.params["policy"]["table"], TABLE["table"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_published_is_what_training_would_begin_with_again(dtype: str) -> None:
    """A version has the digest of what samplers hold; widened and published again it is equal."""
    params = TABLE | {"bias": jnp.float32([1e-3, 1 / 3])}
    served = served_copy(params, dtype)
    assert served["table"].dtype == dtype and served["bias"].dtype == jnp.float32
    np.testing.assert_array_equal(served["bias"], params["bias"])
    again = served_copy(widened(served), dtype)
    digests = {build_manifest(tree, 0, 0, "").digest for tree in (served, again)}
    assert len(digests) == 1


def test_a_policy_of_rounded_weights_is_the_policy_of_their_widened_ones() -> None:
    rounded = kept_in(TABLE, "bfloat16")
    tokens = jnp.asarray(OWN[0].tokens)[None]
    got = MODEL.forward(rounded, tokens, tokens, tokens)
    np.testing.assert_array_equal(got, rounded["table"].astype(jnp.float32)[tokens])
    assert got.dtype == jnp.float32
