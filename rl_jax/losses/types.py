"""[P] The contract of the loss library: scores in, per-token terms through a chain, metrics out.

A loss transform never sees a model. It reads `Scores`, rewrites `Terms`, and reports metrics as
(sum, count) pairs, so a result does not depend on how a batch was split.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rl_jax.metrics.states import Mean
from rl_jax.trajectories.types import Trajectory

CURRENT, BEHAVIOR = "current", "behavior"
"""Scores that are always there."""
PROXIMAL = "proximal"
"""Log-probabilities under the policy as it was when the newest version was published."""
REFERENCE = "reference"
"""Log-probabilities under version 0, where RL started."""
ENTROPY = "entropy"
"""Entropy in nats of the current policy's distribution at each token; carries a gradient."""
VALUE = "value"
"""The critic's estimate before each token; its gradient is the critic's: a policy's loss gets none
of it."""


def ema(decay: float, reset_below: float = 0.0) -> str:
    """Log-probabilities under a moving average of the policy: decay x average + rest x policy.

    Once an update kept less than `reset_below` of its tokens, the average starts at the policy.
    """
    if not 0.0 < decay < 1.0:
        raise ValueError(f"ema: decay must lie in (0, 1), got {decay}")
    if not 0.0 <= reset_below <= 1.0:
        raise ValueError(f"ema: reset_below must lie in [0, 1], got {reset_below}")
    return f"ema({decay!r}, {reset_below!r})"


def teacher(name: str) -> str:
    """Log-probabilities under the weights that the run knows as the teacher `name`."""
    if not name.isidentifier():
        raise ValueError(f"teacher: needs a name of letters, digits and _, got {name!r}")
    return f"teacher({name})"


_MENU = re.compile(
    rf"{CURRENT}|{BEHAVIOR}|{PROXIMAL}|{REFERENCE}|{ENTROPY}|{VALUE}"
    r"|ema\([\d.e-]+, [\d.e-]+\)|teacher\(\w+\)"
)


def check_score(name: str, asked_by: str) -> str:
    """`name`, if it is on the menu of scores; else a ValueError that names who asked for it."""
    if not _MENU.fullmatch(name):
        raise ValueError(
            f"{asked_by}: there is no score {name!r}; there are {CURRENT}, {BEHAVIOR}, {PROXIMAL}, "
            f"{REFERENCE}, {ENTROPY}, {VALUE}, ema(decay) and teacher(name)"
        )
    return name


def task_id(task: str) -> int:
    """The int32 that stands for a task's name in `Scores.tasks`."""
    return crc32(task.encode()) & 0x7FFFFFFF


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
    segments: Int[Array, "R L"]
    """Number of the token's trajectory, -1 on padding; a trajectory is one run within a row."""
    tasks: Int[Array, "R L"]
    """`task_id` of the trajectory's task."""
    returns: Float[Array, "R L"]
    """What the critic shall predict before each token."""
    others: Mapping[str, Float[Array, "R L"]]
    """The rest of the menu, as far as the chain needs it; without gradient but for entropy and
    value."""

    def score(self, name: str, asked_by: str) -> Float[Array, "R L"]:
        """The score `name`; a ValueError names the transform that asks where it is lacking."""
        if name in (CURRENT, BEHAVIOR):
            return self.current if name == CURRENT else self.behavior
        if name not in self.others:
            there = ", ".join((CURRENT, BEHAVIOR, *self.others))
            raise ValueError(f"{asked_by}: the batch lacks the score {name!r}; it has {there}")
        return self.others[name]


class Terms(NamedTuple):
    """What a chain carries from transform to transform, per token."""

    log_ratio: Float[Array, "R L"]
    """The ratio that bounds and masks look at and surrogates differentiate, in log space; zeros at
    the start and wherever no token was sampled."""
    factor: Float[Array, "R L"]
    """Multiplies the surrogate and carries no gradient; ones at the start."""
    kept: Bool[Array, "R L"]
    """Tokens whose surrogate counts; `Scores.mask` at the start, masks clear it. They stand before
    the objective, which has left its term by then."""
    advantages: Float[Array, "R L"]
    """`Scores.advantages` at the start; a teacher may replace them."""
    weight: Float[Array, "R L"]
    """What multiplies advantage x gradient of log p in the surrogate: -d loss / d log p for an
    advantage of 1 where it is linear in it; zeros at the start, no gradient."""
    loss: Float[Array, "R L"]
    """The term of each token; zeros at the start. The traced loss is sum(weight * loss)."""


Metrics = dict[str, Mean]


class LossTransform(NamedTuple):
    """One composable piece of a loss (the shape of optax's gradient transformations)."""

    name: str
    """What errors call it."""
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
    name: str,
    apply: Callable[[Scores, Terms], tuple[Terms, Metrics]],
    needs: Iterable[str] = (),
) -> LossTransform:
    """A transform without state and statistics. `needs` may name current and behavior too."""
    asked = frozenset(check_score(score, name) for score in needs)
    return LossTransform(
        name=name,
        needs=asked - {CURRENT, BEHAVIOR},
        init=lambda: (),
        stats=None,
        apply=lambda scores, terms, stats, state: apply(scores, terms),
        advance=lambda state, stats: state,
    )


def sampled(scores: Scores) -> Float[Array, "R L"]:
    """1.0 on sampled tokens: the weights of every metric."""
    return scores.mask.astype(jnp.float32)


def drop(
    name: str, scores: Scores, terms: Terms, where: Bool[Array, "R L"]
) -> tuple[Terms, Metrics]:
    """Clears `kept` at `where`; reports as NAME/dropped the share that was still kept before.

    For masks, which stand before the objective: a term that is there already stays. So the
    shares that a chain's masks report and the kept share add up to 1.
    """
    newly = (terms.kept & where).astype(jnp.float32)
    metrics = {f"{name}/dropped": Mean.of(newly, sampled(scores))}
    return terms._replace(kept=terms.kept & ~where), metrics
