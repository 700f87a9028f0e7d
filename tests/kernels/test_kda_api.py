"""What KDA refuses, which backend it takes, and its gates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.kernels.kda import api, triton_launch
from tests.fakes.compiling import QUICK
from tests.kernels.kda_cases import case

NAMES = ("q", "k", "v", "g", "beta", "state")


def operands():
    made = map(jnp.asarray, case(((64,),), length=64).operands)
    return dict(zip(NAMES, made, strict=True))


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("q", lambda x: x.astype(np.float16), "q: float16 must be float32 or bfloat16 or float64"),
        ("k", lambda x: x.astype(jnp.bfloat16), "k: bfloat16 must be float32"),
        ("g", lambda x: x.astype(jnp.bfloat16), "g: bfloat16 must be float32"),
        ("beta", lambda x: x.astype(np.float16), "beta: float16 must be float32"),
        ("state", lambda x: x.astype(jnp.bfloat16), "state: bfloat16 must be float32"),
        ("state", lambda x: jnp.full_like(x, jnp.inf), "state: has a value that is not finite"),
        ("state", lambda x: x.at[0, 0, 0, 0].set(jnp.nan), "state: has a value that is not finite"),
    ],
)
def test_wrong_values_are_named(name, wrong, message):
    given = operands()
    given[name] = wrong(given[name])
    with pytest.raises(ValueError, match=message):
        api.chunked(**given)


@pytest.mark.parametrize(
    ("names", "wrong", "message"),
    [
        (NAMES[:5], lambda x: x[:, :63], "q: 63 tokens per row must be a multiple of 64"),
        (NAMES[:5], lambda x: x[:, :0], "q: 0 tokens per row must be a multiple of 64"),
    ],
)
def test_rows_are_whole_chunks(names, wrong, message):
    given = {name: wrong(x) if name in names else x for name, x in operands().items()}
    with pytest.raises(ValueError, match=message):
        api.chunked(**given)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("q", lambda x: x[0], r"q: needs rows, tokens, heads and width, not shape \(64, 2, 16\)"),
        ("k", lambda x: x[..., :8], r"k: shape \(1, 64, 2, 8\) must be \(1, 64, 2, 16\)"),
        ("v", lambda x: x[:, :, :1], r"v: shape \(1, 64, 1, 24\) must be \(1, 64, 2, 24\)"),
        ("beta", lambda x: x[..., None], r"beta: shape \(1, 64, 2, 1\) must be \(1, 64, 2\)"),
        ("state", lambda x: x.swapaxes(2, 3), r"state: shape \(1, 2, 24, 16\) must be"),
    ],
)
def test_wrong_shapes_are_named(name, wrong, message):
    """Without the test session's own check of shapes, which would speak first."""
    given = operands()
    given[name] = wrong(given[name])
    with pytest.raises(ValueError, match=message):
        api.chunked.__wrapped__(**given)


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("q", lambda x: x[:0], r"q: rows, heads and width of shape \(0, 64, 2, 16\) must be at"),
        ("q", lambda x: x[:, :, :0], r"q: rows, heads and width of shape \(1, 64, 0, 16\) must"),
        ("q", lambda x: x[..., :0], r"q: rows, heads and width of shape \(1, 64, 2, 0\) must be"),
        ("v", lambda x: x[..., :0], "v: width 0 must be at least 1"),
    ],
)
def test_nothing_to_do_is_named(name, wrong, message):
    given = operands()
    given[name] = wrong(given[name])
    with pytest.raises(ValueError, match=message):
        api.chunked.__wrapped__(**given)


def test_a_state_from_outside_a_trace_is_checked_inside_it():
    """Its values are there; those of a traced one are not."""
    *tokens, state = operands().values()
    bad = np.asarray(state.at[0, 1, 2, 3].set(jnp.inf))
    jax.eval_shape(lambda *tokens: api.chunked(*tokens, state), *tokens)
    for outside in (bad, jnp.asarray(bad)):
        run = functools.partial(api.chunked.__wrapped__, state=outside)
        with pytest.raises(ValueError, match="state: has a value that is not finite"):
            jax.eval_shape(run, *tokens)
    jax.eval_shape(api.chunked, *tokens, jnp.asarray(bad))


@pytest.mark.parametrize("lower_bound", [-5.82, -6.0, 0.0, 1.0, float("nan")])
def test_bounds_out_of_range(lower_bound):
    with pytest.raises(ValueError, match=r"lower_bound: .* must be above -5.82 and below 0, or"):
        api.chunked(**operands(), lower_bound=lower_bound)


def test_a_reset_per_chunk():
    with pytest.raises(ValueError, match=r"reset: float32 must be bool"):
        api.chunked.__wrapped__(**operands(), reset=jnp.zeros((1, 1)))


def test_backends_by_name(monkeypatch):
    """One that cannot run is an error by name, passed over by default."""
    asked = []

    def obstacle(*operands):
        asked.append(operands)
        return "needs a chip that is not here"

    broken = api.BACKENDS["xla"]._replace(obstacle=obstacle)
    monkeypatch.setattr(api, "BACKENDS", {"chip": broken, **api.BACKENDS})
    with pytest.raises(ValueError, match="backend: chip cannot run here: needs a chip"):
        api.chunked(**operands(), backend="chip")
    with pytest.raises(ValueError, match="backend: 'cuda' is not one of chip, "):
        api.chunked(**operands(), backend="cuda")
    assert asked == [(16, 24, jnp.float32)] * 2
    runs = (functools.partial(api.chunked, backend=name) for name in (None, "xla"))
    default, named = (jax.jit(run, compiler_options=QUICK)(**operands()) for run in runs)
    assert all(np.array_equal(a, b) for a, b in zip(default, named, strict=True))
    found = api.backends(128, 128, jnp.bfloat16)
    assert found["chip"] and found["xla"] == ""


@pytest.mark.parametrize(
    ("key_width", "value_width", "dtype", "said"),
    [
        (24, 32, jnp.float32, "key width 24 is not one of 16, 32, 64, 128"),
        (16, 24, jnp.float32, "value width 24 is not a multiple of 16"),
        (16, 0, jnp.bfloat16, "value width 0 is not a multiple of 16"),
        (16, 32, jnp.float64, "float64 is not float32 or bfloat16"),
        (128, 48, jnp.bfloat16, ""),
    ],
)
def test_what_no_triton_kernel_takes_is_named(key_width, value_width, dtype, said):
    assert triton_launch.unsupported(key_width, value_width, dtype) == said


def test_the_bounded_gate_has_the_slope_of_its_formula():
    x = jnp.array([[[-100.0, 0.0, 1.0, 100.0]]])
    rate, bias = jnp.array([np.log(2.0)]), jnp.array([[0.0, 0.0, -1.0, 0.0]])
    g = api.bounded_gate(x, rate, bias, -5.0)
    np.testing.assert_allclose(g[0, 0], [0, -2.5, -2.5, -5], atol=1e-6)
    slope = jax.grad(lambda x: api.bounded_gate(x, rate, bias, -5.0).sum())(x)
    np.testing.assert_allclose(slope[0, 0], [0, -2.5, -2.5, 0], atol=1e-6)


def test_the_softplus_gate_has_the_slope_of_its_formula():
    """-2 log(1 + e^(x + bias)), whose slope is -2 sigmoid."""
    x = jnp.array([[[-100.0, 0.0, 1.0, 100.0]]])
    rate, bias = jnp.array([np.log(2.0)]), jnp.array([[0.0, 0.0, -1.0, 0.0]])
    g = api.softplus_gate(x, rate, bias)
    np.testing.assert_allclose(g[0, 0], [0, -2 * np.log(2), -2 * np.log(2), -200], atol=1e-6)
    slope = jax.grad(lambda x: api.softplus_gate(x, rate, bias).sum())(x)
    np.testing.assert_allclose(slope[0, 0], [0, -1, -1, -2], atol=1e-6)
