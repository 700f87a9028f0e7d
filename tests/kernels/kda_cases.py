"""Operands of Kimi delta attention and its float64 oracle, with packed rows and every gate."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from rl_jax.kernels.kda import reference

H, K, V = 2, 16, 24
LENGTH = 17 * 64
NAMES = ("q", "k", "v", "g", "beta", "state")
BOUNDED = ("mixed", "saturated", "open", "blocks")
UNBOUNDED = "steep"
NEAR = {"out": 1e-5, "final": 1e-5, **{f"d{name}": 1e-4 for name in NAMES}}
ROUNDED = {"out": 5e-3, "final": 5e-3, **{f"d{name}": 8e-3 for name in NAMES}}
CORRELATED = dict.fromkeys(NEAR, 3e-2)


def gates(kind, shape, rng):
    """Log-decays: mixed in (-5, 0), all at -5, all near 0, in turns; and softplus with A = 16."""
    match kind:
        case "mixed":
            return -5 / (1 + np.exp(2 - 3 * rng.standard_normal(shape)))
        case "saturated":
            return np.full(shape, -5.0)
        case "open":
            return np.full(shape, -1e-6)
        case "blocks":
            turn = np.arange(shape[1])[None, :, None, None] // 15 % 2
            return np.where(turn, -5.0, -1e-3) * np.ones(shape)
        case "steep":
            return -16 * np.logaddexp(0, 3 * rng.standard_normal(shape) - 4)
    raise ValueError(kind)


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@dataclass(frozen=True)
class Case:
    """One call: float32 q, k, v, g, beta [R, L, ...], the state [R, H, K, V], reset [R, L / 64]."""

    operands: tuple[np.ndarray, ...]
    reset: np.ndarray

    def rounded(self, dtype):
        """q, k and v as values of `dtype`."""
        rounded = [np.asarray(x, dtype) for x in self.operands[:3]]
        return Case((*rounded, *self.operands[3:]), self.reset)


def case(
    packs=((1000,), (65, 0, 1, 300, 128)),
    *,
    gate="mixed",
    beta=None,
    cosine=0.0,
    length=LENGTH,
    seed=0,
):
    """Rows of sequences at multiples of 64; an empty one takes a chunk of padding.

    Keys have `cosine` with each other. The first sequence of a row goes on from a random state
    where the row has no other; elsewhere the state is garbage that the reset takes away.
    """
    rng = np.random.default_rng(seed)
    shape = (len(packs), length, H)
    q, k = unit(rng.standard_normal((2, *shape, K)))
    k = unit(np.sqrt(cosine) * unit(np.ones(K)) + np.sqrt(1 - cosine) * k)
    v, g = rng.standard_normal((*shape, V)), gates(gate, (*shape, K), rng)
    b = 1 / (1 + np.exp(-rng.standard_normal(shape))) if beta is None else np.full(shape, beta)
    state = rng.standard_normal((len(packs), H, K, V))
    valid, reset = np.zeros(shape[:2], bool), np.zeros((len(packs), length // 64), bool)
    for row, lengths in enumerate(packs):
        start = 0
        for n in lengths:
            valid[row, start : start + n] = True
            reset[row, start // 64] = len(lengths) > 1
            start += 64 * max(1, -(-n // 64))
    k, v, g = (np.where(valid[..., None, None], x, 0.0) for x in (k, v, g))
    b = np.where(valid[..., None], b, 0.0)
    return Case(tuple(np.float32(x) for x in (q, k, v, g, b, state)), reset)


def cotangents(of, dtype=np.float32, seed=7):
    """Random float32 weights on the outputs, values of `dtype`, and on the final state."""
    rng = np.random.default_rng(seed)
    outputs, final = (rng.standard_normal(of.operands[i].shape) for i in (2, 5))
    return outputs.astype(dtype).astype(np.float32), final.astype(np.float32)


@jax.jit
def _exact(operands, weights):
    def objective(*operands):
        out, final = jax.vmap(reference.recurrent)(*operands)
        return jnp.sum(out * weights[0]) + jnp.sum(final * weights[1]), (out, final)

    grads, out = jax.grad(objective, argnums=tuple(range(6)), has_aux=True)(*operands)
    return (*out, *grads)


def oracle(of, weights):
    """Outputs, final state and six gradients of the recurrence in float64.

    A reset is a decay of exp(-inf) in front of the chunk's first token.
    """
    q, k, v, g, beta, state = (np.asarray(x, np.float64) for x in of.operands)
    g = np.where(
        (np.repeat(of.reset, 64, 1) & (np.arange(g.shape[1]) % 64 == 0))[..., None, None],
        -np.inf,
        g,
    )
    with jax.enable_x64(True):
        exact = _exact((q, k, v, g, beta, state), [np.float64(x) for x in weights])
        return [np.asarray(x) for x in exact]


def distance(got, want):
    """Relative L2; where nothing is wanted, what there is."""
    norm = np.linalg.norm(want)
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / (norm if norm else 1.0))


def values_and_gradients(run: Callable, operands, weights):
    """Outputs, final state and six gradients of `run`, a function of the operands."""
    (out, final), pull = jax.vjp(run, *operands)
    return out, final, *pull((weights[0].astype(out.dtype), weights[1]))


def errors(run: Callable, of: Case, dtype=jnp.float32) -> dict[str, float]:
    """The relative L2 of each tensor against the oracle on the same rounded inputs.

    `run` takes operands, reset and weights; outputs come in the dtype of v, gradients in that of
    what they are of.
    """
    of, weights = of.rounded(dtype), cotangents(of, dtype)
    got = run(of.operands, of.reset, weights)
    operands = of.operands[2], of.operands[5], *of.operands
    assert [x.dtype for x in got] == [x.dtype for x in operands]
    return dict(zip(NEAR, map(distance, got, oracle(of, weights)), strict=True))


def assert_within(found: dict[str, float], bounds: dict[str, float]) -> None:
    assert all(found[name] <= bound for name, bound in bounds.items()), found
