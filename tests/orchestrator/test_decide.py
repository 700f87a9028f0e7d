"""`decide` by hand, and that its limits hold whatever happens in whatever order."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rl_jax.orchestrator.decide import decide
from rl_jax.orchestrator.state import (
    Begin,
    Cancel,
    Command,
    Discard,
    Dropped,
    Event,
    Limits,
    Resume,
    RolloutDone,
    RolloutLost,
    Settled,
    StartRollout,
    State,
    Submit,
    Wake,
    Woken,
    initial,
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
    state, commands = follow(state, Settled((0, 1)))
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
    assert isinstance(commands[0], Discard)
    assert commands[0][:3] == ("t", 0, "2 of 4 rollouts valid: a; b")
    assert [m.key.sample for m in commands[0].members] == [0, 3]
    assert started(commands[1:]) == [(1, 0), (1, 1), (1, 2), (1, 3)]
    assert state.outstanding == 1


def test_what_the_queue_dropped_makes_room() -> None:
    state, _ = follow(State(limits(ahead=0), "t"), Begin(), done(key(1, 0)), done(key(1, 1)))
    state, commands = follow(state, Dropped(1))
    assert started(commands) == [(2, 0), (2, 1)]
    assert (state.outstanding, state.trained) == (2, 0)


# --- a sampler that goes away --------------------------------------------------------------------


def test_a_lost_rollout_is_issued_again_and_the_rest_of_its_group_is_not() -> None:
    state, _ = follow(State(limits(groups=1, ahead=0), "t"), Begin(), done(key(0, 1)))
    state, commands = follow(state, RolloutLost(key(0, 0)))
    assert commands == [StartRollout(RolloutKey("t", 0, 0, 1))]
    assert state.running == 1
    state, (submitted,) = follow(state, done(RolloutKey("t", 0, 0, 1)))
    assert isinstance(submitted, Submit)
    assert [m.key[2:] for m in submitted.group.members] == [(0, 1), (1, 0)]


@pytest.mark.parametrize("first", [0, 7])
def test_a_rollout_lost_five_times_has_failed(first: int) -> None:
    """Five times since its group was issued, whatever attempt that was."""
    resume = Resume(1, ((0, first),), (), 1)
    state = initial(limits(group_size=3, groups=1, ahead=0), "t", resume)
    state, _ = follow(state, Begin())
    for attempt in range(first, first + 4):
        state, (again,) = follow(state, RolloutLost(RolloutKey("t", 0, 0, attempt)))
        assert again == StartRollout(RolloutKey("t", 0, 0, attempt + 1))
    state, commands = follow(state, RolloutLost(RolloutKey("t", 0, 0, first + 4)))
    assert commands == [] and state.running == 2
    state, (submitted,) = follow(state, done(key(0, 1)), done(key(0, 2)))
    assert isinstance(submitted, Submit)
    assert submitted.group.failures == ((0, "sampler lost 5 times"),)


# --- over-sampling -------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "outstanding"), [(0.25, 5), (0.3, 6), (1.0, 8), (0.01, 5)])
def test_groups_started_for_one_batch(share: float, outstanding: int) -> None:
    over = limits(groups=4, ahead=0)._replace(over_sample=share)
    assert over.outstanding == outstanding


def test_what_is_still_under_way_when_the_batch_is_trained_on_is_cancelled() -> None:
    """Of four groups for a batch of two: 1 and 3 are trained on, 2 is complete, 0 is cancelled."""
    over = limits(ahead=0)._replace(over_sample=1.0)
    state, commands = follow(State(over, "t"), Begin())
    assert started(commands) == [(p, s) for p in range(4) for s in range(2)]
    ended = [done(key(p, s)) for p, s in ((1, 0), (1, 1), (3, 0), (0, 1), (3, 1), (2, 0), (2, 1))]
    state, commands = follow(state, *ended)
    assert [type(c) for c in commands] == [Submit] * 3, "nothing starts before it is trained on"
    state, commands = follow(state, Settled((1, 3)))
    cancel, discard = commands[:2]
    assert cancel == Cancel(0) and isinstance(discard, Discard)
    assert discard[:3] == ("t", 0, "over-sampled")
    assert [m.key for m in discard.members] == [key(0, 1)]
    assert started(commands[2:]) == [(p, s) for p in (4, 5, 6) for s in range(2)]
    assert state.unsettled.keys() == {2, 4, 5, 6}, "2 waits for the next batch and counts"
    assert state.running == 6
    assert follow(state, Settled((1, 3))) == (state, []), "a batch that is told of twice"
    late = done(key(0, 0)), RolloutLost(key(0, 0))
    assert follow(state, *late) == (state, []), "nothing more is heard of a cancelled group"


# --- going on where another stopped --------------------------------------------------------------


def test_a_resumed_one_repeats_and_skips_nothing() -> None:
    """Groups 2 and 5 are queued, 3 and 4 are issued again, 6 is the next; 0 and 1 are trained."""
    resume = Resume(6, ((3, 1), (4, 2)), ((2, 0), (5, 1)), started=6, published=1)
    state, commands = follow(initial(limits(ahead=1.5), "t", resume), Begin())
    assert [c.key for c in commands if isinstance(c, StartRollout)] == [
        RolloutKey("t", prompt, sample, attempt)
        for prompt, attempt in ((3, 1), (4, 2), (6, 0))
        for sample in (0, 1)
    ]
    assert (state.next_prompt, state.trained, state.outstanding) == (7, 2, 5)
    assert state.unsettled == {2: 0, 5: 1, 3: 1, 4: 1, 6: 1}
    state, commands = follow(state, Settled((2, 5)))
    assert started(commands) == [(7, 0), (7, 1), (8, 0), (8, 1)]


def test_what_is_issued_again_waits_for_room_as_everything_does() -> None:
    resume = Resume(3, ((0, 1), (1, 1)), ((2, 0),), started=3)
    state, commands = follow(initial(limits(ahead=0), "t", resume), Begin())
    assert started(commands) == [(0, 0), (0, 1)]
    state, commands = follow(state, Settled((2, 0)))
    assert started(commands) == [(1, 0), (1, 1), (3, 0), (3, 1)]


# --- pauses --------------------------------------------------------------------------------------


def test_after_a_group_that_the_environment_broke_the_next_start_waits() -> None:
    slow = limits(groups=1, ahead=0)._replace(retry_pause_s=1.5)
    state, _ = follow(State(slow, "t"), Begin())
    for prompt, seconds in enumerate((1.5, 3.0, 6.0, 12.0, 24.0, 48.0, 60.0, 60.0)):
        ends = (done(key(prompt, sample), "gone") for sample in (0, 1))
        state, commands = follow(state, *ends)
        assert [type(c) for c in commands] == [Discard, Wake]
        assert commands[1] == Wake(seconds) and state.running == 0
        state, commands = follow(state, Woken())
        assert started(commands) == [(prompt + 1, 0), (prompt + 1, 1)]


def test_a_success_ends_the_doubling_and_a_pause_goes_on_to_its_end() -> None:
    slow = limits(ahead=1)._replace(retry_pause_s=1.0)
    state, _ = follow(State(slow, "t"), Begin())

    def group(prompt: int, reason: str = "") -> list[Event]:
        return [done(key(prompt, sample), reason) for sample in (0, 1)]

    state, commands = follow(state, *group(0, "gone"), *group(1, "gone"))
    assert [c for c in commands if isinstance(c, Wake)] == [Wake(1.0)], "one pause at a time"
    state, commands = follow(state, *group(2))
    assert [type(c) for c in commands] == [Submit]
    state, commands = follow(state, Woken())
    assert started(commands) == [(4, 0), (4, 1), (5, 0), (5, 1)]
    state, commands = follow(state, *group(3, "gone"))
    assert Wake(1.0) in commands


class Orchestration(RuleBasedStateMachine):
    @initialize(
        group_size=st.integers(2, 5),
        groups=st.integers(1, 3),
        spare=st.integers(0, 12),
        ahead=st.sampled_from([0, 0.5, 1, 2.5]),
        over_sample=st.sampled_from([0, 0, 0.5, 1.5]),
    )
    def begin(
        self, group_size: int, groups: int, spare: int, ahead: float, over_sample: float
    ) -> None:
        ahead = 0 if over_sample else ahead
        self.limits = Limits(group_size, groups, group_size + spare, ahead, over_sample)
        self.state = State(self.limits, "t")
        self.running: dict[RolloutKey, None] = {}
        self.valid: dict[int, list[bool]] = {}
        self.ever: set[RolloutKey] = set()
        self.submitted: list[int] = []
        self.gone: list[RolloutKey] = []
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
                    self.submitted.append(group.prompt)
                case Cancel(prompt):
                    own = [key for key in self.running if key.prompt == prompt]
                    assert own
                    self.gone += own
                    for key in own:
                        del self.running[key]
                case Discard(_, prompt, "over-sampled", members):
                    assert len(members) == sum(self.valid.pop(prompt, ()))
                case Discard(_, prompt, _, members):
                    valid = self.valid.pop(prompt)
                    assert 2 * sum(valid) <= len(valid) == self.limits.group_size
                    assert len(members) == sum(valid) and all(m.valid for m in members)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 999), fails=st.booleans())
    def end(self, which: int, fails: bool) -> None:
        key = list(self.running)[which % len(self.running)]
        del self.running[key]
        self.valid.setdefault(key.prompt, []).append(not fails)
        self.apply(done(key, "broken" if fails else ""))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 999))
    def lose(self, which: int) -> None:
        key = list(self.running)[which % len(self.running)]
        del self.running[key]
        if key.attempt == 4:
            self.valid.setdefault(key.prompt, []).append(False)
        self.apply(RolloutLost(key))

    @precondition(lambda self: self.gone)
    @rule(which=st.integers(0, 999))
    def end_too_late(self, which: int) -> None:
        before = self.state
        self.apply(done(self.gone[which % len(self.gone)]))
        assert self.state == before

    @precondition(lambda self: self.submitted)
    @rule(which=st.integers(0, 99), count=st.integers(1, 3))
    def settle(self, which: int, count: int) -> None:
        start = which % len(self.submitted)
        prompts = tuple(self.submitted[start : start + count])
        del self.submitted[start : start + count]
        self.apply(Settled(prompts))

    @precondition(lambda self: self.submitted)
    @rule(which=st.integers(0, 99))
    def drop(self, which: int) -> None:
        self.apply(Dropped(self.submitted.pop(which % len(self.submitted))))

    @invariant()
    def limits_hold(self) -> None:
        state = self.state
        assert state.running == len(self.running) <= self.limits.in_flight
        assert state.outstanding <= self.limits.outstanding
        assert state.unsettled.keys() == state.open.keys() | set(self.submitted)
        collected = sum(len(group.done) for group in state.open.values())
        assert collected + state.running == self.limits.group_size * len(state.open)
        first = [key for key in self.ever if key.attempt == 0]
        assert len(first) == self.limits.group_size * state.next_prompt

    @invariant()
    def nothing_is_left_undone(self) -> None:
        """Room for a whole group, of rollouts and of groups, is always used."""
        full = self.state.outstanding == self.limits.outstanding
        assert full or self.state.running + self.limits.group_size > self.limits.in_flight


TestOrchestration = Orchestration.TestCase
TestOrchestration.settings = settings(steady, max_examples=40)
