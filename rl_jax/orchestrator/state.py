"""[N] What the orchestrator knows: a frozen value, changed only by `decide`."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from rl_jax.trajectories.types import Group, RolloutKey, Trajectory


class Pace(NamedTuple):
    """The staleness bound that no group may outgrow, and the updates between two pushes."""

    tau: int
    push_every: int


class Limits(NamedTuple):
    """How much may be under way at once."""

    group_size: int
    groups_per_update: int
    in_flight: int
    """Rollouts under way."""
    ahead: float
    """Batches that may be under way or queued beyond the one the trainer works on. 0: groups of the
    next batch start only when this one is settled, which is the synchronous order."""
    over_sample: float = 0.0
    """With ahead = 0: share of a batch's groups that is started on top. When the batch is trained
    on, groups still under way are cancelled; those complete and not taken stay on the queue for
    the next batch, which starts so many fewer."""
    pace: Pace | None = None
    """Where set, no group starts that could become too old to train on."""
    retry_pause_s: float = 0.0
    """No group starts for so long after one that the environment broke. Doubles while that goes on;
    0 is no pause."""

    @property
    def outstanding(self) -> int:
        """Groups that may be started and not settled."""
        if self.over_sample:
            return math.ceil((1 + self.over_sample) * self.groups_per_update)
        return int((1 + self.ahead) * self.groups_per_update)


@dataclass(frozen=True)
class OpenGroup:
    """A prompt whose rollouts are under way."""

    attempt: int = 0
    """Of its first rollouts."""
    done: tuple[Trajectory, ...] = ()


class Resume(NamedTuple):
    """Where another orchestrator of the same run stopped; prompts are numbers in its order."""

    next_prompt: int
    """The first that was never issued."""
    reissue: tuple[tuple[int, int], ...]
    """(prompt, attempt): groups to be issued before it, whole, their rollouts of that attempt."""
    queued: tuple[tuple[int, int], ...]
    """(prompt, start version) of groups on the queue. In place of the version a group started
    under, the oldest that sampled a token of it will do."""
    started: int
    """Groups ever started, given up ones not counted: trained, queued and to be issued again. Where
    version numbers skip some, G x K more for each, G groups an update, K updates a push."""
    published: int = 0
    """Newest version."""


@dataclass(frozen=True)
class State:
    limits: Limits
    task: str
    next_prompt: int = 0
    """Index in the task's endless stream of prompts."""
    reissue: tuple[tuple[int, int], ...] = ()
    """(prompt, attempt) of groups to start before that."""
    published: int = 0
    """Newest version that samplers sample under."""
    running: int = 0
    """Rollouts."""
    trained: int = 0
    """Groups settled as trained."""
    unsettled: dict[int, int] = field(default_factory=dict)
    """Prompts of groups started and not yet settled, with the version published at their start."""
    open: dict[int, OpenGroup] = field(default_factory=dict)
    """Those of them with rollouts under way, by prompt."""
    pauses: int = 0
    """Taken in a row since a group last came about."""
    paused: bool = False

    @property
    def outstanding(self) -> int:
        """Groups started and not yet settled."""
        return len(self.unsettled)


def initial(limits: Limits, task: str, resume: Resume | None = None) -> State:
    """The state before `Begin`."""
    if resume is None:
        return State(limits, task)
    return State(
        limits,
        task,
        next_prompt=resume.next_prompt,
        reissue=resume.reissue,
        published=resume.published,
        trained=resume.started - len(resume.queued) - len(resume.reissue),
        unsettled=dict(resume.queued),
    )


class Begin(NamedTuple):
    """Time to start."""


class RolloutDone(NamedTuple):
    """A rollout ended, however it ended."""

    trajectory: Trajectory


class RolloutLost(NamedTuple):
    """A rollout ended with its sampler, by no fault of its own."""

    key: RolloutKey


class Settled(NamedTuple):
    """A batch of these groups was trained on."""

    prompts: tuple[int, ...]


class Dropped(NamedTuple):
    """The queue dropped this group."""

    prompt: int


class Published(NamedTuple):
    """Samplers take the weights of this version from now on."""

    version: int


class Woken(NamedTuple):
    """A pause is over."""


Event = Begin | RolloutDone | RolloutLost | Settled | Dropped | Published | Woken


class StartRollout(NamedTuple):
    key: RolloutKey


class Submit(NamedTuple):
    """Put the complete group on the queue."""

    group: Group


class Cancel(NamedTuple):
    """End the rollouts of this group where they are; nothing more is heard of them."""

    prompt: int


class Discard(NamedTuple):
    """The group ends here, with its reason."""

    task: str
    prompt: int
    reason: str
    members: tuple[Trajectory, ...]
    """Rollouts that nothing was wrong with, lost with the group."""


class Wake(NamedTuple):
    """Say `Woken` after so many seconds."""

    seconds: float


Command = StartRollout | Submit | Cancel | Discard | Wake
