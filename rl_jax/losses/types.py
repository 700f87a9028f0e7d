"""[P] The contract of the loss library: scores in, per-token terms through a chain, metrics out.

A loss transform never sees a model. It reads `Scores`, rewrites `Terms`, and reports metrics as
(sum, count) pairs, so a result does not depend on how a batch was split.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rl_jax.metrics.states import Mean
from rl_jax.trajectories.types import Trajectory


class Scores(NamedTuple):
    """What a transform may read, per token of a microbatch [R, L].

    Log-probabilities are natural, in float32, under the trajectory's recorded temperature.
    """

    current: Float[Array, "R L"]
    """Under the parameters that are differentiated."""
    behavior: Float[Array, "R L"]
    """Recorded by the sampler: the denominator of every ratio to the sampling policy."""
    mask: Bool[Array, "R L"]
    """True on sampled tokens."""
    advantages: Float[Array, "R L"]
    lag: Int[Array, "R L"]
    """Newest published version minus the token's version."""


class Terms(NamedTuple):
    """What a chain carries from transform to transform, per token."""

    log_ratio: Float[Array, "R L"]
    """The ratio that masks and clips look at, in log space; zeros at the start."""
    factor: Float[Array, "R L"]
    """Multiplies the surrogate and carries no gradient; ones at the start."""
    loss: Float[Array, "R L"]
    """The term of each token; zeros at the start. The traced loss is sum(weight * loss)."""


Metrics = dict[str, Mean]


class LossTransform(NamedTuple):
    """One composable piece of a loss (the shape of optax's gradient transformations)."""

    needs: frozenset[str]
    """Names of score menu entries beyond current and behavior."""
    init: Callable[[], Any]
    """() -> state."""
    stats: Callable[[Scores], Any] | None
    """Summed over microbatches, rows and devices in a first pass; None where not needed."""
    apply: Callable[[Scores, Terms, Any, Any], tuple[Terms, Metrics]]
    """(scores, terms, stats, state) -> (terms, metrics), pure, per microbatch."""
    advance: Callable[[Any, Any], Any]
    """(state, stats) -> state, once per optimizer step."""


Reduction = Callable[[Sequence[Trajectory]], list[np.ndarray]]
"""(all trajectories of a batch) -> one float32[T] of per-token weights for each, on the host."""


class Loss(NamedTuple):
    """A chain of transforms and the reduction that weighs its terms."""

    transform: LossTransform
    reduction: Reduction


def stateless(
    apply: Callable[[Scores, Terms], tuple[Terms, Metrics]], needs: frozenset[str] = frozenset()
) -> LossTransform:
    """A transform without state and statistics."""
    return LossTransform(
        needs=needs,
        init=lambda: (),
        stats=None,
        apply=lambda scores, terms, stats, state: apply(scores, terms),
        advance=lambda state, stats: state,
    )
