"""The pace over random schedules: nothing it starts gets too old, and the trainer never starves."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from rl_jax.orchestrator.decide import decide
from rl_jax.orchestrator.state import (
    Begin,
    Discard,
    Event,
    Limits,
    Pace,
    Published,
    Resume,
    Settled,
    StartRollout,
    State,
    Submit,
    initial,
)
from rl_jax.trajectories.types import RolloutKey
from tests.orchestrator.test_decide import done, follow, key, started
from tests.trajectories.build import steady


def paced(tau: int, push_every: int, groups: int = 1, ahead: float = 99.0) -> Limits:
    return Limits(2, groups, 1000, ahead, pace=Pace(tau, push_every))


def test_by_hand() -> None:
    """A group an update, a push every 2, tau 1: while a group of version 0 is there, four start."""
    state, commands = follow(State(paced(1, 2), "t"), Begin())
    assert [p for p, s in started(commands) if s == 0] == [0, 1, 2, 3]
    ends = [done(key(prompt, sample)) for prompt in (1, 2, 3) for sample in (0, 1)]
    state, commands = follow(state, *ends, Settled((1,)))
    assert started(commands) == [], "0 is under way"
    state, commands = follow(state, Published(1), Settled((2,)), Settled((3,)))
    assert started(commands) == []
    state, commands = follow(state, done(key(0, 0)), done(key(0, 1)))
    assert [type(c) for c in commands] == [Submit], "it is the fourth update's, under version 1"
    state, commands = follow(state, Published(2), Settled((0,)))
    assert [p for p, s in started(commands) if s == 0] == [4, 5, 6, 7]


def test_a_group_that_was_given_up_does_not_count() -> None:
    state, _ = follow(State(paced(1, 1), "t"), Begin())
    state, commands = follow(state, done(key(0, 0), "gone"), done(key(0, 1), "gone"))
    assert isinstance(commands[0], Discard) and started(commands) == [(2, 0), (2, 1)]


@pytest.mark.parametrize(("started_before", "room"), [(3, 1), (4, 0), (1, 3)])
def test_counts_go_on_after_a_resume(started_before: int, room: int) -> None:
    """Two groups an update, a push each, tau 1: with one of version 0 there, four are started."""
    resume = Resume(9, (), ((5, 0),), started_before, published=1)
    _, commands = follow(initial(paced(1, 1, groups=2), "t", resume), Begin())
    assert len(started(commands)) == 2 * room


class Pacing(RuleBasedStateMachine):
    """A trainer that takes any complete groups, whichever it likes, and pushes every K updates."""

    @initialize(
        tau=st.integers(1, 3),
        push_every=st.integers(1, 3),
        groups=st.integers(1, 3),
        ahead=st.sampled_from([0, 1, 20]),
    )
    def begin(self, tau: int, push_every: int, groups: int, ahead: float) -> None:
        self.limits = Limits(2, groups, 1000, ahead, pace=Pace(tau, push_every))
        self.state = initial(self.limits, "t")
        self.running: list[RolloutKey] = []
        self.queued: dict[int, int] = {}
        self.taken: tuple[int, ...] = ()
        self.start: dict[int, int] = {}
        self.unheard: list[Event] = []
        self.updates = self.skipped = 0
        self.apply(Begin())

    @property
    def published(self) -> int:
        return self.skipped + self.updates // self.limits.pace.push_every

    def apply(self, event: Event) -> None:
        self.state, commands = decide(self.state, event)
        for command in commands:
            match command:
                case StartRollout(own):
                    self.running.append(own)
                    self.start[own.prompt] = self.state.published
                case Submit(group):
                    self.queued[group.prompt] = self.start[group.prompt]

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 999), fails=st.sampled_from([False, False, False, True]))
    def end(self, which: int, fails: bool) -> None:
        own = self.running.pop(which % len(self.running))
        self.apply(done(own, "broken" if fails else ""))

    @property
    def batch_there(self) -> bool:
        return not self.taken and len(self.queued) >= self.limits.groups_per_update

    @precondition(lambda self: self.batch_there)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        self.consume(data.draw(st.permutations(sorted(self.queued))))

    def consume(self, order: list[int]) -> None:
        self.taken = tuple(order[: self.limits.groups_per_update])
        for prompt in self.taken:
            assert self.published - self.queued.pop(prompt) <= self.limits.pace.tau

    @precondition(lambda self: self.taken)
    @rule(late=st.booleans())
    def update(self, late: bool) -> None:
        """Trains, pushes when it is time; others hear of both at once or later."""
        self.updates += 1
        if self.updates % self.limits.pace.push_every == 0:
            self.unheard.append(Published(self.published))
        self.unheard.append(Settled(self.taken))
        self.taken = ()
        if not late:
            self.hear()

    @rule()
    def hear(self) -> None:
        for event in self.unheard:
            self.apply(event)
        self.unheard = []

    @rule()
    def come_to_rest(self) -> None:
        """All rollouts end well: there is a batch, or the trainer is at one."""
        self.hear()
        while self.running:
            self.apply(done(self.running.pop()))
        assert self.taken or len(self.queued) >= self.limits.groups_per_update

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 999))
    def leave_one_to_the_last(self, which: int) -> None:
        """All rollouts but one group's go on and the trainer with them, newest first, as long as
        anything goes."""
        last = self.running[which % len(self.running)].prompt
        while self.taken or self.batch_there or any(k.prompt != last for k in self.running):
            for own in [own for own in self.running if own.prompt != last][:2]:
                self.running.remove(own)
                self.apply(done(own))
            if self.batch_there:
                self.consume(sorted(self.queued, reverse=True))
            if self.taken:
                self.update(late=False)

    @rule(skip=st.sampled_from([0, 0, 1, 5]))
    def resume(self, skip: int) -> None:
        """Another orchestrator; where versions were taken back, numbers go on above them and what
        was queued is lost with them."""
        self.hear()
        if skip:
            self.queued.clear()
            self.taken = ()
            self.skipped += skip
        again = tuple((prompt, 1 + group.attempt) for prompt, group in self.state.open.items())
        queued = self.queued | {prompt: self.start[prompt] for prompt in self.taken}
        trained = self.limits.groups_per_update * (
            self.updates + self.skipped * self.limits.pace.push_every
        )
        started = trained + len(queued) + len(again)
        self.state = initial(
            self.limits,
            "t",
            Resume(
                self.state.next_prompt,
                self.state.reissue + again,
                tuple(queued.items()),
                started + len(self.state.reissue),
                self.published,
            ),
        )
        self.running.clear()
        self.apply(Begin())


TestPacing = Pacing.TestCase
TestPacing.settings = settings(steady, max_examples=60, stateful_step_count=40)
