"""[P] Mixture of experts: a sigmoid router whose correction bias only chooses, experts all shared
tokens go to, and a step of that bias towards even load.

Equations: arXiv 2412.19437, sec. 2.1.2; arXiv 2408.15664 for the bias.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Bool, Float, Int

from models.layers.norm import exact, fold_sum
from models.layers.parameters import matrix, parameter
from models.layers.projection import project
from models.layers.swiglu import SwiGLU
from rl_jax.arrays import Array
from rl_jax.kernels.experts import api as kernel

TINY = 1e-20
"""Added to a sum of scores that is divided by, as the released models do."""


class MixtureOfExperts(nnx.Module):
    """`chosen` of `experts` SwiGLUs for each token, and one of `shared` times their width for all.

    A token's weights are its experts' scores, those of the router without the bias, divided by
    their sum where `renormalise` is set, times `scale`.
    """

    def __init__(
        self,
        width: int,
        experts: int,
        chosen: int,
        hidden: int,
        shared: int,
        scale: float,
        renormalise: bool,
        out_gain: float,
        rngs: nnx.Rngs,
    ):
        self.router = matrix(rngs, (width, experts), ("embed", None), width, exact=True)
        self.router_bias = parameter(jnp.zeros(experts), (None,), exact=True)
        into = (experts, width, hidden), ("experts", "embed", "expert_mlp")
        self.gate = matrix(rngs, *into, width)
        self.up = matrix(rngs, *into, width)
        back = (experts, hidden, width), ("experts", "expert_mlp", "embed")
        self.down = matrix(rngs, *back, hidden, out_gain)
        self.shared = SwiGLU(width, shared * hidden, out_gain, rngs) if shared else None
        self.chosen, self.scale, self.renormalise = chosen, scale, renormalise

    def __call__(
        self,
        x: Float[Array, "R L D"],
        valid: Bool[Array, "R L"],
        replayed: Int[Array, "R L k"] | None,
    ) -> tuple[Float[Array, "R L D"], Int[Array, "R L k"]]:
        """Also the router's own choices, best first and of equal scores the lower number; -1 for
        what is not valid. Rows of `replayed` with a -1 use the router's own."""
        scores = jax.nn.sigmoid(project(exact(x), self.router[...]))
        ranks = jax.lax.stop_gradient(scores) + self.router_bias[...]
        own = jnp.where(valid[..., None], jax.lax.top_k(ranks, self.chosen)[1], -1)
        used = own
        if replayed is not None:
            there = jnp.all(replayed >= 0, -1) & valid
            used = jnp.where(there[..., None], replayed, own)
        matrices = (w[...].astype(x.dtype) for w in (self.gate, self.up, self.down))
        out = kernel.mix(x, used, self._weights(scores, used), *matrices)
        return (out if self.shared is None else out + self.shared(x)), own

    def _weights(
        self, scores: Float[Array, "R L E"], used: Int[Array, "R L k"]
    ) -> Float[Array, "R L k"]:
        weights = jnp.take_along_axis(scores, jnp.maximum(used, 0), -1)
        if self.renormalise:
            weights = weights / (fold_sum(weights) + TINY)
        return weights * self.scale


def balanced(
    bias: Float[Array, " E"],
    load: Float[Array, " E"] | Int[Array, " E"],
    rate: float | Float[Array, ""],
) -> Float[Array, " E"]:
    """The correction bias moved by `rate` up where `load` is below its mean, down where above."""
    return bias + rate * jnp.sign(jnp.mean(load) - load)
