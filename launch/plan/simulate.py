"""[N] A run as discrete events: rollouts in groups, tools, queue, trainer, pushes, drops, losses.

What the orchestrator and the staleness policy do is not modelled: their own pure functions are
called. Everything random follows from the seed; there is no clock but the simulated one.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from launch.plan.forecast import Forecast
from launch.plan.inputs import Job, Rates, turns_of
from launch.plan.replica import Replica, Sampling
from rl_jax.orchestrator.decide import decide
from rl_jax.orchestrator.state import (
    Begin,
    Cancel,
    Command,
    Discard,
    Dropped,
    Event,
    Published,
    RolloutDone,
    RolloutLost,
    Settled,
    StartRollout,
    Submit,
    Wake,
    Woken,
    initial,
)
from rl_jax.staleness import Admit, Drop, Wait, drop_stale, take_all, wait_for_stragglers
from rl_jax.trajectories.types import Group, RolloutKey, Status, Trajectory

TASK = "planned"
BARREN = 1000
"""Groups given up between two updates from which on nothing is expected any more."""
_TOKEN, _LOGPROB, _SAMPLED = np.zeros(1, np.int32), np.zeros(1, np.float32), np.ones(1, np.bool_)


class Update(NamedTuple):
    """One update of a simulated run; times in seconds since the first rollout."""

    taken: float
    ended: float
    tokens: float
    """Sampled tokens trained on."""
    lag_mean: float
    """Of them, in pushes."""
    lag_max: float
    queued: int
    """Groups left on the queue."""
    in_flight: int


class Trace(NamedTuple):
    """A simulated run."""

    updates: tuple[Update, ...]
    forecast: Forecast


@dataclass(eq=False)
class _Rollout:
    key: RolloutKey
    sampling: Sampling
    replica: Replica
    started_under: int
    tokens: float
    turns_left: int
    per_turn: float
    rng: np.random.Generator


@dataclass(eq=False)
class _Queued:
    group: Group
    oldest: int
    wait_until: float | None = None


class _Done(NamedTuple):
    """A rollout that ended well."""

    tokens: float
    context: float
    started_under: int
    spans: tuple[tuple[int, float], ...]


@dataclass
class _Counts:
    """From `since` on."""

    since: float = 0.0
    tokens: float = 0.0
    lagging: float = 0.0
    """Sum of lag over tokens."""
    start_lags: list[float] = field(default_factory=list)
    start_weights: list[float] = field(default_factory=list)
    trainer_busy: float = 0.0
    pushing: float = 0.0
    running: float = 0.0
    """Integral of the rollouts under way over time."""
    put: int = 0
    dropped: int = 0


def simulate(job: Job, rates: Rates, *, seed: int, updates: int, skip: int = 0) -> Trace:
    """`updates` updates from the first rollout on; the forecast leaves out the first `skip`.

    Raises ValueError where the run gets stuck: nothing more can happen, or every group fails.
    """
    return _Run(job, rates, seed).run(updates, skip)


class _Run:
    def __init__(self, job: Job, rates: Rates, seed: int) -> None:
        self._job, self._rates, self._seed = job, rates, seed
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._state = initial(job.limits, TASK)
        self._replicas = [
            Replica(rates.sampler, job.slots, job.on_push) for _ in range(job.samplers)
        ]
        self._rollouts: dict[Sampling, _Rollout] = {}
        self._of_prompt: dict[int, list[_Rollout]] = {}
        self._done: dict[RolloutKey, _Done] = {}
        self._queue: list[_Queued] = []
        self._admit = self._policy()
        self._published = self._looked_under = 0
        self._pushed = 0
        self._publishing_until = 0.0
        self._training = False
        self._barren = 0
        self._updates: list[Update] = []
        self._counts = _Counts()
        self._losses = np.random.default_rng([seed, 1 << 40])

    def run(self, updates: int, skip: int) -> Trace:
        for replica in self._replicas:
            self._schedule_loss(replica)
        self._tell(Begin())
        while len(self._updates) < updates:
            self._next()
            if skip and len(self._updates) == skip:
                skip, self._counts = 0, _Counts(self._now)
                for replica in self._replicas:
                    replica.busy_s = replica.recomputed = 0.0
        return Trace(tuple(self._updates), self._forecast())

    def _next(self) -> None:
        due = min(self._replicas, key=lambda replica: replica.next_event)
        at = self._events[0][0] if self._events else math.inf
        now = min(at, due.next_event)
        if now == math.inf:
            raise ValueError("the simulated run is stuck: nothing more can happen")
        assert now >= self._now, "time does not run backwards"
        self._counts.running += (now - self._now) * self._state.running
        self._now = now
        if due.next_event <= now:
            self._advance(due)
        else:
            heapq.heappop(self._events)[2]()

    def _advance(self, replica: Replica) -> None:
        for sampling in replica.advance(self._now):
            self._turn_ended(self._rollouts[sampling])

    def _at(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._count), act))

    # Rollouts.

    def _tell(self, event: Event) -> None:
        self._state, commands = decide(self._state, event)
        for command in commands:
            self._perform(command)

    def _perform(self, command: Command) -> None:
        match command:
            case StartRollout(key):
                self._start(key)
            case Submit(group):
                self._of_prompt.pop(group.prompt)
                self._queue.append(_Queued(group, group.oldest_version))
                self._counts.put += 1
                self._take()
            case Cancel(prompt):
                for rollout in self._of_prompt[prompt]:
                    rollout.replica.advance(self._now)
                    rollout.replica.cancel(rollout.sampling)
            case Discard() as discard:
                self._failed()
                self._of_prompt.pop(discard.prompt)
                self._take()
            case Wake(seconds):
                self._at(seconds, lambda: self._tell(Woken()))

    def _start(self, key: RolloutKey) -> None:
        own, alone = self._rates.rollout, np.random.default_rng([self._seed, *key[1:]])
        common = np.random.default_rng([self._seed, key.prompt]).standard_normal()
        z = math.sqrt(own.same_in_group) * common
        z += math.sqrt(1 - own.same_in_group) * alone.standard_normal()
        length = own.sampled_tokens * math.exp(own.sigma * z - own.sigma**2 / 2)
        tokens = min(max(length, 1.0), self._job.max_tokens)
        turns = turns_of(own, tokens)
        up = [replica for replica in self._replicas if replica.up] or self._replicas
        replica = min(up, key=lambda replica: len(replica.rollouts))
        sampling = Sampling(next(self._count))
        rollout = _Rollout(
            key, sampling, replica, self._published, tokens, turns, tokens / turns, alone
        )
        self._rollouts[sampling] = rollout
        self._of_prompt.setdefault(key.prompt, []).append(rollout)
        replica.rollouts.add(sampling)
        self._submit(rollout, own.prompt_tokens)

    def _submit(self, rollout: _Rollout, new: float) -> None:
        if rollout.sampling.ended:
            return
        self._advance(rollout.replica)
        rollout.replica.submit(rollout.sampling, new, rollout.per_turn)

    def _turn_ended(self, rollout: _Rollout) -> None:
        own = self._rates.rollout
        rollout.turns_left -= 1
        if not rollout.turns_left:
            return self._ended(rollout)
        seconds = own.tool_median_s * math.exp(own.tool_sigma * rollout.rng.standard_normal())
        self._at(seconds, lambda: self._submit(rollout, own.answer_tokens))

    def _ended(self, rollout: _Rollout) -> None:
        sampling, key = rollout.sampling, rollout.key
        rollout.replica.rollouts.discard(sampling)
        del self._rollouts[sampling]
        failed = rollout.rng.random() < self._rates.rollout.failed_share
        if not failed:
            self._done[key] = _Done(
                rollout.tokens, sampling.context, rollout.started_under, tuple(sampling.spans)
            )
        oldest = min(version for version, _ in sampling.spans)
        self._tell(RolloutDone(_trajectory(key, oldest, failed)))

    def _schedule_loss(self, replica: Replica) -> None:
        if rate := self._rates.sampler.losses_per_hour:
            self._at(self._losses.exponential(3600 / rate), lambda: self._lose(replica))

    def _lose(self, replica: Replica) -> None:
        self._advance(replica)
        for sampling in sorted(replica.lose(), key=lambda own: own.order):
            rollout = self._rollouts.pop(sampling)
            self._of_prompt[rollout.key.prompt].remove(rollout)
            self._tell(RolloutLost(rollout.key))
        self._at(self._rates.sampler.restart_s, lambda: self._restart(replica))

    def _restart(self, replica: Replica) -> None:
        self._advance(replica)
        replica.restart()
        self._schedule_loss(replica)

    # Trainer.

    def _policy(self) -> Admit:
        match self._job.when_stale:
            case "mask":
                return take_all
            case "wait":
                own = self._job
                return wait_for_stragglers(own.tau, self._oldest_in_flight, own.wait_deadline_s)
        return drop_stale(self._job.tau)

    def _oldest_in_flight(self) -> Iterator[int]:
        for rollouts in self._of_prompt.values():
            versions = [own.sampling.spans[0][0] for own in rollouts if own.sampling.spans]
            if versions:
                yield min(versions)

    def _take(self) -> None:
        waits = self._job.when_stale == "wait" and self._now < self._publishing_until
        if self._training or waits:
            return
        size = self._job.limits.groups_per_update
        if len(self._queue) < size and self._looked_under == self._published:
            return  # nobody got older meanwhile
        self._looked_under = self._published
        chosen = self._choose(size)
        if len(chosen) == size:
            gone = set(chosen)
            self._queue = [entry for entry in self._queue if entry not in gone]
            self._train([entry.group for entry in chosen])

    def _choose(self, n: int) -> list[_Queued]:
        """As the queue chooses: the longest sampled first, dropping what the policy drops."""
        chosen: list[_Queued] = []
        for entry in sorted(self._queue, key=lambda e: e.oldest):
            if len(chosen) == n:
                break
            decision = self._admit(entry.group, self._published)
            if isinstance(decision, Wait):
                if entry.wait_until is None:
                    entry.wait_until = self._now + decision.deadline
                    self._at(decision.deadline, self._take)
                if self._now < entry.wait_until:
                    continue
                decision = decision.then
            if isinstance(decision, Drop):
                self._drop(entry)
            else:
                chosen.append(entry)
        return chosen

    def _drop(self, entry: _Queued) -> None:
        self._queue.remove(entry)
        self._counts.dropped += 1
        # Told later: an event may not change the queue while it is being looked through.
        self._at(0.0, lambda: self._tell(Dropped(entry.group.prompt)))

    def _failed(self) -> None:
        self._barren += 1
        if self._barren > BARREN:
            raise ValueError("the simulated run is stuck: every group fails")

    def _train(self, groups: list[Group]) -> None:
        own = self._rates.trainer
        done = [self._done[m.key] for g in groups for m in g.members if m.copy_of is None]
        seconds = own.update_s + sum(one.context for one in done) / own.tokens_per_s
        self._training, self._barren = True, 0
        self._counts.trainer_busy += seconds
        lags = [(self._published - v, n) for one in done for v, n in one.spans]
        tokens = sum(n for _, n in lags)
        lagging = sum(lag * n for lag, n in lags)
        self._counts.tokens += tokens
        self._counts.lagging += lagging
        self._counts.start_lags += [self._published - one.started_under for one in done]
        self._counts.start_weights += [one.tokens for one in done]
        told = Update(
            self._now, self._now + seconds, tokens, lagging / tokens, max(lags)[0],
            len(self._queue), self._state.running,
        )  # fmt: skip
        prompts = tuple(group.prompt for group in groups)
        for key in (m.key for g in groups for m in g.members):
            self._done.pop(key, None)
        self._at(seconds, lambda: self._trained(told, prompts))

    def _trained(self, told: Update, prompts: tuple[int, ...]) -> None:
        self._updates.append(told)
        held = 0.0
        if len(self._updates) % self._job.push_every == 0:
            held = self._push()
        self._at(held, self._free)
        settled_in = max(held, self._publishing_until - self._now)
        self._at(settled_in, lambda: self._tell(Settled(prompts)))

    def _push(self) -> float:
        """Seconds for which the trainer is held up: by the copy and by an older publication."""
        own = self._rates.trainer
        held = max(own.push_s, self._publishing_until - self._now)
        self._counts.pushing += held
        self._publishing_until = self._now + held + own.publish_s
        self._pushed += 1
        version = self._pushed
        self._at(held + own.publish_s, lambda: self._publish(version))
        return held

    def _publish(self, version: int) -> None:
        self._published = version
        for replica in self._replicas:
            self._advance(replica)
            replica.swap(version)
        self._tell(Published(version))
        self._take()

    def _free(self) -> None:
        self._training = False
        self._take()

    def _forecast(self) -> Forecast:
        own = self._counts
        seconds = self._now - own.since
        busy = sum(replica.busy_s for replica in self._replicas) / len(self._replicas)
        lags, weights = np.array(own.start_lags), np.array(own.start_weights)
        pushes = sum(u.ended > own.since for u in self._updates) / self._job.push_every
        again = sum(replica.recomputed for replica in self._replicas) / len(self._replicas)
        rates = self._rates.sampler
        return Forecast(
            tokens_per_s=own.tokens / seconds,
            trainer_idle=1 - (own.trainer_busy + own.pushing) / seconds,
            sampler_idle=1 - busy / seconds,
            lag_mean=own.lagging / own.tokens,
            lag_start=float(lags.mean()),
            lag_start_by_tokens=float((lags * weights).sum() / weights.sum()),
            lag_p99=float(np.quantile(lags, 0.99, method="inverted_cdf")),
            in_flight=own.running / seconds,
            trainer_push_share=own.pushing / seconds,
            sampler_push_share=(pushes * rates.swap_s + again / rates.prefill_tokens_per_s)
            / seconds,
            dropped_share=own.dropped / max(own.put, 1),
        )


def _trajectory(key: RolloutKey, oldest: int, failed: bool) -> Trajectory:
    """One token stands for all: it has the oldest version, which is what decisions look at."""
    versions = np.array([oldest], np.int32)
    status = Status.FAILED if failed else Status.COMPLETED
    reward, reason = (None, "environment") if failed else (0.0, "")
    return Trajectory(key, _TOKEN, _SAMPLED, _LOGPROB, versions, (), 1.0, reward, status, reason)
