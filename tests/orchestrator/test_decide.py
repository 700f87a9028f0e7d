"""`decide` by hand, and that its limits hold whatever happens in whatever order."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rl_jax.orchestrator.decide import decide
from rl_jax.orchestrator.state import (
    Begin,
    Command,
    Discard,
    Event,
    Limits,
    RolloutDone,
    Settled,
    StartRollout,
    State,
    Submit,
)
from rl_jax.trajectories.types import NOT_SAMPLED, RolloutKey, Status, Trajectory
from tests.trajectories.build import steady


def done(key: RolloutKey, reason: str = "") -> RolloutDone:
    """The rollout ended; with a reason, because the environment broke."""
    return RolloutDone(
        Trajectory(
            key=key,
            tokens=np.array([1, 2], np.int32),
            loss_mask=np.array([False, True]),
            behavior_logprobs=np.array([0, -1], np.float32),
            versions=np.array([NOT_SAMPLED, 0], np.int32),
            segments=(),
            temperature=1.0,
            reward=None if reason else 1.0,
            status=Status.FAILED if reason else Status.COMPLETED,
            reason=reason,
        )
    )


def limits(
    group_size: int = 2, groups: int = 2, in_flight: int = 100, ahead: float = 1.0
) -> Limits:
    return Limits(group_size, groups, in_flight, ahead)


def follow(state: State, *events: Event) -> tuple[State, list[Command]]:
    """The state after all events and every command on the way."""
    commands: list[Command] = []
    for event in events:
        state, more = decide(state, event)
        commands += more
    return state, commands


def started(commands: list[Command]) -> list[tuple[int, int]]:
    return [(c.key.prompt, c.key.sample) for c in commands if isinstance(c, StartRollout)]


def key(prompt: int, sample: int) -> RolloutKey:
    return RolloutKey("t", prompt, sample)


@pytest.mark.parametrize(("ahead", "outstanding"), [(0, 4), (0.5, 6), (1, 8), (2.0, 12), (0.3, 5)])
def test_groups_that_may_be_outstanding(ahead: float, outstanding: int) -> None:
    assert limits(groups=4, ahead=ahead).outstanding == outstanding


def test_it_begins_with_as_many_groups_as_may_be_outstanding() -> None:
    state, commands = follow(State(limits(), "t"), Begin())
    assert started(commands) == [(p, s) for p in range(4) for s in range(2)]
    assert (state.running, state.outstanding, state.next_prompt) == (8, 4, 4)


def test_whole_groups_only_within_the_rollouts_in_flight() -> None:
    state, commands = follow(State(limits(in_flight=5), "t"), Begin())
    assert started(commands) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    state, commands = follow(state, done(key(1, 0)))
    assert started(commands) == [(2, 0), (2, 1)], "three run, two more make five"
    assert state.running == 5


def test_a_complete_group_is_submitted_in_order_of_samples() -> None:
    state, _ = follow(State(limits(group_size=3, groups=1, ahead=0), "t"), Begin())
    state, commands = follow(state, done(key(0, 2)), done(key(0, 0)), done(key(0, 1)))
    (submitted,) = commands
    assert isinstance(submitted, Submit)
    assert (submitted.group.task, submitted.group.prompt) == ("t", 0)
    assert [m.key.sample for m in submitted.group.members] == [0, 1, 2]
    assert (state.open, state.running, state.outstanding) == ({}, 0, 1)


def test_ahead_0_starts_the_next_groups_only_when_the_batch_is_settled() -> None:
    """The synchronous order: nothing samples while the trainer works."""
    state, _ = follow(State(limits(ahead=0), "t"), Begin())
    state, commands = follow(state, *(done(key(p, s)) for p in (0, 1) for s in (0, 1)))
    assert [type(c) for c in commands] == [Submit, Submit]
    assert state.running == 0
    state, commands = follow(state, Settled(2))
    assert started(commands) == [(2, 0), (2, 1), (3, 0), (3, 1)]


def test_a_group_with_one_failure_of_four_is_padded_by_a_copy() -> None:
    state, _ = follow(State(limits(group_size=4, groups=1, ahead=0), "t"), Begin())
    events = [done(key(0, 0)), done(key(0, 1), "tool: gone"), done(key(0, 2)), done(key(0, 3))]
    state, (submitted,) = follow(state, *events)
    assert isinstance(submitted, Submit)
    members = [(m.key.sample, m.copy_of) for m in submitted.group.members]
    assert members == [(0, None), (2, None), (3, None), (0, 0)]
    assert submitted.group.failures == ((1, "tool: gone"),)
    assert state.outstanding == 1, "until the trainer is done with it"


def test_a_group_with_half_of_its_rollouts_broken_makes_room_for_another() -> None:
    state, _ = follow(State(limits(group_size=4, groups=1, ahead=0), "t"), Begin())
    events = [done(key(0, 0)), done(key(0, 1), "b"), done(key(0, 2), "a"), done(key(0, 3))]
    state, commands = follow(state, *events)
    assert commands[0] == Discard("t", 0, "2 of 4 rollouts valid: a; b", 2)
    assert started(commands[1:]) == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert state.outstanding == 1


class Orchestration(RuleBasedStateMachine):
    @initialize(
        group_size=st.integers(2, 5),
        groups=st.integers(1, 3),
        spare=st.integers(0, 12),
        ahead=st.sampled_from([0, 0.5, 1, 2.5]),
    )
    def begin(self, group_size: int, groups: int, spare: int, ahead: float) -> None:
        self.limits = Limits(group_size, groups, group_size + spare, ahead)
        self.state = State(self.limits, "t")
        self.running: dict[RolloutKey, None] = {}
        self.valid: dict[int, list[bool]] = {}
        self.ever: set[RolloutKey] = set()
        self.submitted = self.settled = 0
        self.apply(Begin())

    def apply(self, event: Event) -> None:
        self.state, commands = decide(self.state, event)
        for command in commands:
            match command:
                case StartRollout(key):
                    assert key not in self.ever, "started twice"
                    self.ever.add(key)
                    self.running[key] = None
                case Submit(group):
                    valid = self.valid.pop(group.prompt)
                    assert 2 * sum(valid) > len(valid) == self.limits.group_size
                    assert len(group.members) == self.limits.group_size
                    originals = [m for m in group.members if m.copy_of is None]
                    assert len(originals) == sum(valid)
                    assert len(group.failures) == len(valid) - sum(valid)
                    self.submitted += 1
                case Discard(_, prompt, _, count):
                    valid = self.valid.pop(prompt)
                    assert 2 * sum(valid) <= len(valid) == self.limits.group_size
                    assert count == sum(valid)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 999), fails=st.booleans())
    def end(self, which: int, fails: bool) -> None:
        key = list(self.running)[which % len(self.running)]
        del self.running[key]
        self.valid.setdefault(key.prompt, []).append(not fails)
        self.apply(done(key, "broken" if fails else ""))

    @precondition(lambda self: self.submitted > self.settled)
    @rule(which=st.integers(0, 99))
    def settle(self, which: int) -> None:
        groups = 1 + which % (self.submitted - self.settled)
        self.settled += groups
        self.apply(Settled(groups))

    @invariant()
    def limits_hold(self) -> None:
        state = self.state
        assert state.running == len(self.running) <= self.limits.in_flight
        assert state.outstanding <= self.limits.outstanding
        assert state.outstanding == len(state.open) + self.submitted - self.settled
        collected = sum(len(group.done) for group in state.open.values())
        assert collected + state.running == self.limits.group_size * len(state.open)
        assert len(self.ever) == self.limits.group_size * state.next_prompt

    @invariant()
    def nothing_is_left_undone(self) -> None:
        """Room for a whole group, of rollouts and of groups, is always used."""
        full = self.state.outstanding == self.limits.outstanding
        assert full or self.state.running + self.limits.group_size > self.limits.in_flight


TestOrchestration = Orchestration.TestCase
TestOrchestration.settings = settings(steady, max_examples=40)
