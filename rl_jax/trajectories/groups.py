"""[N] From the finished rollouts of one prompt to a group: who counts, who is padded, who is not.

Does not retry: a rollout arrives here with the outcome of its last attempt.
"""

from collections.abc import Sequence
from itertools import cycle, islice
from typing import NamedTuple

from rl_jax.trajectories.types import Group, Trajectory, copy_of


class Assembly(NamedTuple):
    """What became of a prompt's rollouts."""

    group: Group | None
    """None where too few rollouts were valid."""
    reason: str = ""
    """Why there is no group."""


def assemble(
    task: str, prompt: int, trajectories: Sequence[Trajectory], group_size: int
) -> Assembly:
    """The group of `group_size` members, if more than half of that many rollouts are valid.

    Members are the valid rollouts in order of `key.sample`, then copies of them in the same order,
    around and around. Rollouts that the environment broke become `failures` with their reasons. A
    ValueError names a rollout of another prompt, or a sample that appears twice.
    """
    ordered = sorted(trajectories, key=lambda t: t.key.sample)
    _check(task, prompt, ordered, group_size)
    valid = [t for t in ordered if t.valid]
    failures = tuple((t.key.sample, t.reason) for t in ordered if not t.valid)
    if 2 * len(valid) <= group_size:
        reasons = "; ".join(sorted({reason for _, reason in failures}))
        return Assembly(None, f"{len(valid)} of {group_size} rollouts valid: {reasons}")
    copies = islice(cycle(valid), group_size - len(valid))
    return Assembly(Group(task, prompt, (*valid, *map(copy_of, copies)), failures))


def _check(task: str, prompt: int, ordered: Sequence[Trajectory], group_size: int) -> None:
    samples = [t.key.sample for t in ordered]
    if len(set(samples)) != len(samples):
        raise ValueError(f"group of {task} {prompt}: a sample appears twice in {samples}")
    if len(samples) > group_size:
        raise ValueError(f"group of {task} {prompt}: {len(samples)} rollouts for {group_size}")
    for t in ordered:
        if t.key[:2] != (task, prompt):
            raise ValueError(f"group of {task} {prompt}: {t.key} is no rollout of it")
        if t.copy_of is not None:
            raise ValueError(f"group of {task} {prompt}: {t.key} is itself a padding copy")
