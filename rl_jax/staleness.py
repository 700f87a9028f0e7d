"""[N] How stale is too stale: the lag of a group, and policies that admit it to a batch.

A policy is a function `admit(group, published_version) -> decision`, asked at consumption, so time
spent in the queue counts. Whichever is chosen, no token of a lag above tau is trained on:

- drop: `drop_stale`; what is too old is lost.
- wait: `wait_for_stragglers`; the trainer waits for a group that the next push would make too old.
- mask: `take_all`; the loss masks the tokens that are too old (`losses.ratios.mask_stale`).
- pace: `drop_stale`, which finds nothing to drop, since the orchestrator starts no group that could
  become too old (`orchestrator.decide`).
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rl_jax.trajectories.types import NOT_SAMPLED, Group


@dataclass(frozen=True)
class Take:
    """Train on it."""


@dataclass(frozen=True)
class Drop:
    """Never train on it."""

    reason: str


@dataclass(frozen=True)
class Wait:
    """Not yet: leave it in the queue and ask again when something changes.

    `deadline` seconds after the first `Wait` for this group the queue stops asking and does
    `then`, so no policy can hold a consumer for ever.
    """

    deadline: float
    then: Take | Drop


Decision = Take | Drop | Wait
Admit = Callable[[Group, int], Decision]


def lag(group: Group, published_version: int) -> int:
    """Newest published version minus the oldest that sampled a token; 0 where none was sampled."""
    oldest = group.oldest_version
    return 0 if oldest == NOT_SAMPLED else published_version - oldest


def drop_stale(tau: int) -> Admit:
    """Takes lags up to `tau` >= 1, drops the rest."""
    _check_tau(tau)

    def admit(group: Group, published_version: int) -> Decision:
        behind = lag(group, published_version)
        return Take() if behind <= tau else Drop(f"lag {behind} above {tau}")

    return admit


def take_all(group: Group, published_version: int) -> Decision:
    """Takes every lag; for a loss that masks the tokens it must not train on."""
    return Take()


def wait_for_stragglers(tau: int, in_flight: Callable[[], Iterable[int]], patience: float) -> Admit:
    """Takes lags up to `tau` >= 1, but holds younger groups back while a straggler is at the edge.

    `in_flight()` gives, for each group still being rolled out, the oldest version that sampled a
    token of it. While one of them is exactly `tau` behind, the next push would make it untrainable,
    so groups with a smaller lag wait: the trainer, which publishes only after it consumed, waits
    with them. A group is held for at most `patience` seconds, then taken. A straggler further
    behind is lost already and holds nobody back; a group above `tau` is dropped.
    """
    _check_tau(tau)
    if not 0 < patience < math.inf:
        raise ValueError(f"patience is {patience}; a positive number of seconds expected")
    drop = drop_stale(tau)

    def admit(group: Group, published_version: int) -> Decision:
        at_edge = any(published_version - version == tau for version in in_flight())
        if at_edge and lag(group, published_version) < tau:
            return Wait(patience, Take())
        return drop(group, published_version)

    return admit


def _check_tau(tau: int) -> None:
    if tau < 1:
        raise ValueError(f"tau is {tau}; at least 1, or nothing that a push overtook could train")
