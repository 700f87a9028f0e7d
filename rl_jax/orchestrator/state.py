"""[N] What the orchestrator knows: a frozen value, changed only by `decide`."""

from dataclasses import dataclass, field
from typing import NamedTuple

from rl_jax.trajectories.types import Group, RolloutKey, Trajectory


class Limits(NamedTuple):
    """How much may be under way at once."""

    group_size: int
    groups_per_update: int
    in_flight: int
    """Rollouts under way."""
    ahead: float
    """Batches that may be under way or queued beyond the one the trainer works on. 0: groups of the
    next batch start only when this one is settled, which is the synchronous order."""

    @property
    def outstanding(self) -> int:
        """Groups that may be started and not settled."""
        return int((1 + self.ahead) * self.groups_per_update)


@dataclass(frozen=True)
class OpenGroup:
    """A prompt whose rollouts are under way."""

    done: tuple[Trajectory, ...] = ()


@dataclass(frozen=True)
class State:
    limits: Limits
    task: str
    next_prompt: int = 0
    """Index in the task's endless stream of prompts."""
    running: int = 0
    """Rollouts."""
    outstanding: int = 0
    """Groups started and not yet settled."""
    open: dict[int, OpenGroup] = field(default_factory=dict)


class RolloutDone(NamedTuple):
    """A rollout ended, however it ended."""

    trajectory: Trajectory


class Settled(NamedTuple):
    """`groups` submitted groups were trained, or dropped at the queue."""

    groups: int


class Begin(NamedTuple):
    """Time to start."""


Event = Begin | RolloutDone | Settled


class StartRollout(NamedTuple):
    key: RolloutKey


class Submit(NamedTuple):
    """Put the complete group on the queue."""

    group: Group


class Discard(NamedTuple):
    """Too few members are valid: the group ends here, with its reason."""

    task: str
    prompt: int
    reason: str
    valid: int
    """Rollouts that nothing was wrong with, lost with the group."""


Command = StartRollout | Submit | Discard
