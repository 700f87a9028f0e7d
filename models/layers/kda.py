"""[P] Kimi delta attention as a layer: short convolutions, decay gate, gated output norm.

Equations: arXiv 2510.26692, sec. 3 and 4, with its softplus gate; the bounded gate is that of
arXiv 2607.24653. Gates, norms and states are in float32 whatever the activations are in.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Bool, Float

from models.layers.context import Rows, Step
from models.layers.norm import RMSNorm, exact, l2_normalise
from models.layers.parameters import matrix, parameter
from models.layers.parts import parts, summed
from models.layers.projection import project
from rl_jax.arrays import Array, Tree
from rl_jax.kernels.kda import api as kda
from rl_jax.kernels.short_conv import api as conv
from rl_jax.model import StateCache
from rl_jax.sharding import CONTEXT, degree

DECAY_RANGE = (1e-3, 0.3)
"""-log decay of a token at initialisation, log-uniform over channels, where it is bounded."""
STEP_RANGE, SMALLEST_STEP, RATE_RANGE = (1e-3, 0.1), 1e-4, (1.0, 16.0)
"""Without a bound: softplus of the bias, log-uniform, and the factor before it, uniform over heads,
as flash-linear-attention initialises them."""


HEADS_AT_ONCE = 8
"""On a device that has many tokens: what fills the rows of a TPU's register."""

Operands = tuple[Array, Array, Array, Array, Array]
"""q, k, v, g, beta as the kernel takes them."""


class HeadGate(nnx.Module):
    """x -> [heads, head_dim], through `rank` numbers or, where rank is None, directly."""

    def __init__(self, width: int, heads: int, head_dim: int, rank: int | None, rngs: nnx.Rngs):
        if rank is not None:
            self.down = matrix(rngs, (width, rank), ("embed", None), width)
        fan_in, axis = (width, "embed") if rank is None else (rank, None)
        self.up = matrix(rngs, (fan_in, heads, head_dim), (axis, "heads", None), fan_in)
        self.low_rank = rank is not None

    def __call__(self, x: Float[Array, "R L D"]) -> Float[Array, "R L H K"]:
        x = project(x, self.down[...]) if self.low_rank else x
        return project(x, self.up[...])


class KimiDeltaAttention(nnx.Module):
    """One KDA layer of `heads` heads with key and value width `head_dim`."""

    def __init__(
        self,
        width: int,
        heads: int,
        head_dim: int,
        taps: int,
        decay_rank: int | None,
        gate_rank: int | None,
        lower_bound: float | None,
        write_scale: float,
        eps: float,
        out_gain: float,
        rngs: nnx.Rngs,
    ):
        per_head = ("heads", None)
        self.qkv = matrix(rngs, (width, 3, heads, head_dim), ("embed", None, *per_head), width)
        self.conv = matrix(rngs, (taps, 3, heads, head_dim), (None, None, *per_head), taps)
        self.decay = HeadGate(width, heads, head_dim, decay_rank, rngs)
        bias, rate_log = _first_decay(heads, head_dim, lower_bound, rngs)
        self.decay_bias = parameter(bias, per_head, exact=True)
        self.decay_rate_log = parameter(rate_log, ("heads",), exact=True)
        self.beta = matrix(rngs, (width, heads), ("embed", "heads"), width)
        self.gate = HeadGate(width, heads, head_dim, gate_rank, rngs)
        self.norm = RMSNorm(head_dim, eps)
        self.out = matrix(
            rngs, (heads, head_dim, width), (*per_head, "embed"), heads * head_dim, out_gain
        )
        self.lower_bound, self.write_scale = lower_bound, write_scale

    @staticmethod
    def cache(heads: int, head_dim: int, taps: int) -> StateCache:
        """What a sequence keeps of this layer; a head's tail channels are q | k | v."""
        return StateCache(heads, (head_dim, head_dim), (taps - 1, 3 * head_dim))

    def forward(self, x: Float[Array, "R L D"], rows: Rows) -> Float[Array, "R L D"]:
        count = parts(self.beta[...].shape[1], HEADS_AT_ONCE)
        return summed(self, "heads", count, lambda own, x: own._heads(x, rows), x)

    def _heads(self, x: Float[Array, "R L D"], rows: Rows) -> Float[Array, "R L D"]:
        if degree(CONTEXT) > 1:
            mixed = [self._mixed_alone(x, i, rows) for i in range(3)]
        else:
            both = conv.short_conv(self._project(x), self.conv[...], segments=rows.segments)
            mixed = [both[:, :, i] for i in range(3)]
        operands = self._operands(x, mixed, rows.segments >= 0)
        out, _ = kda.chunked(*operands, reset=rows.reset, lower_bound=self.lower_bound)
        return self._finish(x, out)

    def extend(
        self, x: Float[Array, "R n D"], step: Step, pool: Tree, layer: int
    ) -> tuple[Float[Array, "R n D"], Tree]:
        before = _from_tail(step.fresh(step.io.read_tail(pool, step.pages, layer)))
        inputs = self._project(x)
        before = before.astype(x.dtype)
        mixed = conv.short_conv(inputs, self.conv[...], before)
        operands = self._operands(x, [mixed[:, :, i] for i in range(3)], step.valid(x.shape[1]))
        out, pool = self._advance(operands, step, pool, layer)
        tail = exact(_to_tail(conv.next_tail(inputs, before, step.n_valid)))
        pool = step.io.write_tail(pool, step.pages, layer, step.n_valid, tail)
        return self._finish(x, out), pool

    def _advance(
        self, operands: Operands, step: Step, pool: Tree, layer: int
    ) -> tuple[Float[Array, "R n H V"], Tree]:
        """A few tokens in place on the states that are kept; chunks from a copy and back."""
        io, pages = step.io, step.pages
        if operands[0].shape[1] <= kda.SHORT:
            return io.advance(pool, pages, layer, step.positions, step.n_valid, operands)
        state = step.fresh(io.read_state(pool, pages, layer))
        out, state = kda.chunked(*operands, state, lower_bound=self.lower_bound)
        return out, io.write_state(pool, pages, layer, step.n_valid, state)

    def _mixed_alone(self, x: Array, i: int, rows: Rows) -> Float[Array, "R L H K"]:
        """Queries, keys or values: a third of what is there at once."""
        inputs = project(x, self.qkv[...][:, i])
        return conv.short_conv(inputs, self.conv[...][:, i], segments=rows.segments)

    def _project(self, x: Array) -> Float[Array, "R L 3 H K"]:
        return project(x, self.qkv[...])

    def _operands(
        self, x: Array, mixed: Sequence[Float[Array, "R L H K"]], valid: Bool[Array, "R L"]
    ) -> Operands:
        """Padding neither decays nor writes the state."""
        q, k, v = mixed
        g = self._log_decay(x)
        beta = jax.nn.sigmoid(exact(project(x, self.beta[...])))
        if self.write_scale != 1.0:
            beta = self.write_scale * beta
        keep = valid[..., None]
        k, v, g = (jnp.where(keep[..., None], a, 0.0) for a in (l2_normalise(k), v, g))
        return l2_normalise(q), k, v, g, jnp.where(keep, beta, 0.0)

    def _log_decay(self, x: Array) -> Float[Array, "R L H K"]:
        operands = exact(self.decay(x)), self.decay_rate_log[...], self.decay_bias[...]
        if self.lower_bound is None:
            return kda.softplus_gate(*operands)
        return kda.bounded_gate(*operands, self.lower_bound)

    def _finish(self, x: Array, out: Array) -> Float[Array, "R L D"]:
        gated = jax.nn.sigmoid(exact(self.gate(x))) * self.norm(exact(out))
        return project(gated.astype(x.dtype), self.out[...], 2)


def _first_decay(
    heads: int, head_dim: int, lower_bound: float | None, rngs: nnx.Rngs
) -> tuple[Float[Array, "H K"], Float[Array, " H"]]:
    """Bias and log of the factor of either gate, for decays spread evenly over their logarithms."""
    span = STEP_RANGE if lower_bound is None else DECAY_RANGE
    low, high = jnp.log(jnp.array(span))
    rate = jnp.exp(jax.random.uniform(rngs.params(), (heads, head_dim), minval=low, maxval=high))
    if lower_bound is not None:
        return jnp.log(rate / (-lower_bound - rate)), jnp.zeros(heads)
    rate = jnp.maximum(rate, SMALLEST_STEP)
    low, high = RATE_RANGE
    factor = jax.random.uniform(rngs.params(), (heads,), minval=low, maxval=high)
    return rate + jnp.log(-jnp.expm1(-rate)), jnp.log(factor)


def _from_tail(tail: Float[Array, "R H taps ch"]) -> Float[Array, "R taps 3 H K"]:
    rows, heads, taps, channels = tail.shape
    return tail.reshape(rows, heads, taps, 3, channels // 3).transpose(0, 2, 3, 1, 4)


def _to_tail(inputs: Float[Array, "R taps 3 H K"]) -> Float[Array, "R H taps ch"]:
    rows, taps, _, heads, width = inputs.shape
    return inputs.transpose(0, 3, 1, 2, 4).reshape(rows, heads, taps, 3 * width)
