"""[N] A forecast by formulas: what is tightest holds the rest back, lags follow from Little's law.

With B trajectories an update, lambda trajectories a second and P = B / lambda seconds an update:

- Samplers: a trajectory takes p seconds of prefill and d decode steps, and n requests decode side
  by side in one of R samplers, so lambda = R / (p + d step(n) / n).
- In flight, by Little: lambda E[T] rollouts and lambda / size E[largest T of a group] groups. The
  first is at most `in_flight`; the second, with what is trained and half an update's groups on the
  queue, at most the groups that may be outstanding.
- Where `in_flight` or the slots bind, a rollout's start lags E[largest T] / P + u updates, u the
  trainer's busy share and that of a publication, for what is under way is not published yet. A
  token lags by half its own rollout's time less.
- Where the outstanding groups bind, groups start as others settle: W outstanding groups and G of an
  update make W / G - 1 updates at the start. A token lags by the updates that end before it less. A
  trainer that never waits takes its next batch before the version just pushed is published.
- Groups that start as others settle come in bursts: a burst decodes by half of the requests that it
  could at most, and takes its rollouts half its time.

Divided by K, lags are in pushes. Left out: how tool times scatter, bursts, drops, failures, and
with fewer than two updates' groups outstanding everything that is not alternation; `simulate` has
them.
"""

import math
from typing import NamedTuple

import numpy as np

from launch.plan.forecast import Forecast
from launch.plan.inputs import Job, Rates, step_seconds
from launch.plan.lengths import Lengths, lengths_of

_HALVINGS = 60
TAIL = 0.99
BINDING = 0.98
"""From this share of a limit on it counts as what holds the rest back."""


class _Flow(NamedTuple):
    """One balance."""

    rate: float
    """Trajectories a second."""
    active: float
    """Requests that decode in one sampler."""
    seconds: np.ndarray
    """A rollout's time from its first token on, like `Lengths.tokens`."""
    wait_s: float
    """Before that, for a slot: older rollouts go first."""
    paced: bool
    """The groups outstanding bind, directly or through a slower trainer."""


class _Model(NamedTuple):
    job: Job
    rates: Rates
    lengths: Lengths
    update_s: float
    """Of the trainer for one update, its share of a push included."""
    prefill_s: float
    """Of a trajectory, without recomputed caches."""

    @property
    def steps(self) -> float:
        """Decode steps of a trajectory: a turn's first token comes with its prefill."""
        return max(self.lengths.mean_tokens - self.lengths.mean_turns, 1e-9)


def closed_form(job: Job, rates: Rates) -> Forecast:
    """The forecast of a run that goes on for long."""
    model = _model(job, rates)
    flow, recompute = _balanced(model), 0.0
    for _ in range(20):
        recompute = _recompute_seconds(model, flow, recompute)
        flow = _balanced(model, recompute)
    period = job.batch / flow.rate
    busy = min(1.0, model.update_s / period)
    lags = _lags_paced(model, flow, period) if flow.paced else _lags_flowing(model, flow, busy)
    start, by_tokens, token, tail = (lag / job.push_every for lag in lags)
    # Of lags below one push, as many rollouts as that have lag 1.
    tail = 1.0 if 1 - TAIL < tail < 1 else tail
    return Forecast(
        tokens_per_s=flow.rate * model.lengths.mean_tokens,
        trainer_idle=1 - busy,
        sampler_idle=_sampler_idle(model, flow, recompute),
        lag_mean=token,
        lag_start=start,
        lag_start_by_tokens=by_tokens,
        lag_p99=tail,
        in_flight=_in_flight(model, flow, recompute),
        trainer_push_share=rates.trainer.push_s / job.push_every / period,
        sampler_push_share=rates.sampler.swap_s / (job.push_every * period)
        + flow.rate * recompute / job.samplers,
    )


def _model(job: Job, rates: Rates) -> _Model:
    lengths = lengths_of(rates.rollout, job.limits.group_size, job.max_tokens)
    own, turns = rates.rollout, lengths.mean_turns
    appended = own.prompt_tokens + (turns - 1) * own.answer_tokens
    context = appended + lengths.mean_tokens
    trainer, sampler = rates.trainer, rates.sampler
    return _Model(
        job,
        rates,
        lengths,
        trainer.update_s
        + job.batch * context / trainer.tokens_per_s
        + trainer.push_s / job.push_every,
        turns * sampler.request_s + appended / sampler.prefill_tokens_per_s,
    )


def _recompute_seconds(model: _Model, flow: _Flow, before: float) -> float:
    """Of a trajectory: a push costs each rollout under way its context, one that waits its prompt.
    By half, as a rollout is half done on average. `before`: an earlier estimate."""
    if model.job.on_push != "recompute":
        return 0.0
    own, rates = model.rates.rollout, model.rates.sampler
    half = own.prompt_tokens + model.lengths.by_tokens(model.lengths.tokens) / 2
    waiting = flow.rate * flow.wait_s
    running = _in_flight(model, flow, before) - waiting
    tokens = running * half + waiting * own.prompt_tokens
    seconds = (running + waiting) * rates.request_s + tokens / rates.prefill_tokens_per_s
    return seconds / (model.job.batch * model.job.push_every)


def _balanced(model: _Model, recompute: float = 0.0) -> _Flow:
    """As many requests side by side as all limits allow, by bisection."""
    job = model.job
    fits, above = 0.0, float(job.slots)
    largest = _flow(model, above, recompute)
    if _allowed(model, largest):
        return _waiting(model, largest)
    for _ in range(_HALVINGS):
        middle = (fits + above) / 2
        if _allowed(model, _flow(model, middle, recompute)):
            fits = middle
        else:
            above = middle
    found = _flow(model, fits, recompute)
    trainer = found.rate * model.update_s / job.batch
    full = _groups(model, found) / _room(model, found)
    return found._replace(paced=max(trainer, full) > BINDING)


def _flow(model: _Model, active: float, recompute: float) -> _Flow:
    """Where `active` requests decode side by side in each sampler; below 1: now and then one."""
    rates, lengths = model.rates, model.lengths
    step = step_seconds(rates.sampler, max(active, 1.0))
    prefill = model.prefill_s + recompute
    rate = model.job.samplers / (prefill + model.steps * step / max(active, 1e-12))
    share = min(rate * prefill / model.job.samplers, 0.999)
    tool = rates.rollout.tool_median_s * math.exp(rates.rollout.tool_sigma**2 / 2)
    busy = (lengths.tokens - lengths.turns) * step + lengths.turns * prefill / lengths.mean_turns
    return _Flow(rate, active, busy / (1 - share) + (lengths.turns - 1) * tool, 0.0, False)


def _allowed(model: _Model, flow: _Flow) -> bool:
    return (
        flow.rate * model.update_s <= model.job.batch
        and flow.rate * model.lengths.mean(flow.seconds) <= _rollouts(model)
        and _groups(model, flow) <= _room(model, flow)
    )


def _groups(model: _Model, flow: _Flow) -> float:
    """Under way."""
    per_second = flow.rate / model.job.limits.group_size
    return per_second * model.lengths.of_slowest(flow.seconds)


def _room(model: _Model, flow: _Flow) -> float:
    """Groups that may be under way: the outstanding ones without those trained on or queued."""
    limits = model.job.limits
    busy = min(1.0, flow.rate * model.update_s / model.job.batch)
    size = limits.groups_per_update
    return max(limits.outstanding - size * busy - (size - 1) / 2, 1.0)


def _rollouts(model: _Model) -> float:
    """That are under way where they bind: a group starts once all of it fits."""
    return model.job.limits.in_flight - (model.job.limits.group_size - 1) / 2


def _waiting(model: _Model, flow: _Flow) -> _Flow:
    """All slots are taken; rollouts beyond them wait for one, until a limit binds."""
    by_rollouts = _rollouts(model) / flow.rate - model.lengths.mean(flow.seconds)
    more = _room(model, flow) - _groups(model, flow)
    by_groups = more * model.job.limits.group_size / flow.rate
    return flow._replace(wait_s=min(by_rollouts, by_groups), paced=by_groups < by_rollouts)


def _work(model: _Model, flow: _Flow, recompute: float) -> float:
    """Seconds of one sampler that a trajectory takes."""
    active = max(flow.active, 1.0)
    if flow.paced:
        job = model.job
        active = max(active, min(job.slots, job.batch / job.samplers) / 2)
    step = step_seconds(model.rates.sampler, active)
    return model.prefill_s + recompute + model.steps * step / active


def _sampler_idle(model: _Model, flow: _Flow, recompute: float) -> float:
    """Where rollouts come one by one: that none of them, as often as chance wants, is there."""
    if flow.paced:
        return max(0.0, 1 - flow.rate * _work(model, flow, recompute) / model.job.samplers)
    step = step_seconds(model.rates.sampler, max(flow.active, 1.0))
    prefill = model.prefill_s + recompute
    there = flow.rate * (prefill + model.steps * step) / model.job.samplers
    return math.exp(-there) if flow.active < model.job.slots else 0.0


def _in_flight(model: _Model, flow: _Flow, recompute: float) -> float:
    seconds = model.lengths.mean(flow.seconds) + flow.wait_s
    if flow.paced:
        job = model.job
        seconds = max(seconds, _work(model, flow, recompute) * job.batch / job.samplers / 2)
    return min(flow.rate * seconds, model.job.limits.in_flight)


def _lags_flowing(model: _Model, flow: _Flow, busy: float) -> tuple[float, float, float, float]:
    """In updates: of starts, the same by tokens, of tokens, the tail of starts."""
    lengths, period = model.lengths, model.job.batch / flow.rate
    by_tokens = lengths.slowest_by_tokens(flow.seconds)
    # The first token comes with the prefill, before the wait for a slot.
    token = by_tokens - lengths.by_tokens(flow.seconds) / 2 + flow.wait_s / lengths.mean_tokens
    found = (
        lengths.of_slowest(flow.seconds) + flow.wait_s,
        by_tokens + flow.wait_s,
        token,
        lengths.slowest_quantile(flow.seconds, TAIL) + flow.wait_s,
    )
    trainer = model.rates.trainer
    late = busy + (trainer.push_s + trainer.publish_s) / period
    start, by_tokens, token, tail = (seconds / period + late for seconds in found)
    return start, by_tokens, token, tail


def _lags_paced(model: _Model, flow: _Flow, period: float) -> tuple[float, float, float, float]:
    """As `_lags_flowing`."""
    limits, lengths = model.job.limits, model.lengths
    start = limits.outstanding / limits.groups_per_update - 1
    if flow.rate * model.update_s > BINDING * model.job.batch:
        start = max(0.0, start - math.ceil(model.rates.trainer.publish_s / period))
    updates, wait = flow.seconds / period, flow.wait_s / period
    whole = np.floor(updates)
    ended = (whole * (whole - 1) / 2 + whole * (updates - whole)) / np.maximum(updates, 1e-12)
    late = lengths.slowest_quantile(updates, TAIL) + wait
    by_tokens = start + lengths.slowest_by_tokens(np.maximum(updates + wait - start, 0.0))
    token = by_tokens - math.floor(wait) - lengths.by_tokens(ended)
    return start, by_tokens, max(0.0, token), max(start, late)
