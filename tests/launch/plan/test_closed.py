"""Formulas: values worked out by hand, and the simulation where both apply."""

import math

import pytest

from launch.plan.closed import closed_form
from launch.plan.forecast import Forecast
from launch.plan.inputs import Job, Rates
from launch.plan.lengths import lengths_of
from launch.plan.simulate import simulate
from tests.launch.plan.jobs import job, rates

pytestmark = pytest.mark.usefixtures("unchecked")


def test_rollouts_bind_by_hand() -> None:
    """256 rollouts of 0.999 s, 64 an update: P = 0.24975 s; an update of 0.2 s keeps the trainer
    busy for 0.2 / P of it. Lag of a start: 256 / 64 + that."""
    found = closed_form(job(in_flight=256, groups=64), rates(update_s=0.2))
    busy = 0.2 / (0.999 * 64 / 256)
    assert found.tokens_per_s == pytest.approx(256 * 1000 / 0.999, rel=1e-3)
    assert found.trainer_idle == pytest.approx(1 - busy, rel=1e-3)
    assert found.lag_start == pytest.approx(4 + busy, rel=1e-3)
    assert found.lag_mean == pytest.approx(2 + busy, rel=1e-3)
    assert found.in_flight == pytest.approx(256, rel=1e-3)
    assert found.sampler_idle == pytest.approx(0)


def test_long_trajectories_weigh_more() -> None:
    """Of a lognormal E[L^2] / E[L]^2 is exp(sigma^2): M / B x that, a token half of it."""
    found = closed_form(job(in_flight=256, groups=64), rates(update_s=0.2, sigma=1.0))
    assert found.lag_start == pytest.approx(4 + 0.8, rel=0.01)
    assert found.lag_start_by_tokens == pytest.approx(4 * math.e + 0.8, rel=0.01)
    assert found.lag_mean == pytest.approx(2 * math.e + 0.8, rel=0.01)
    # The 99th percentile of length is exp(2.326 - 1/2) times its mean.
    assert found.lag_p99 == pytest.approx(4 * math.exp(2.326 - 0.5) + 0.8, rel=0.02)
    assert found.tau == math.ceil(found.lag_p99)


def test_a_slow_trainer_by_hand() -> None:
    """7 updates' groups outstanding, 1 s an update of 64 x 1,000 tokens: lag 7 - 1, in pushes of
    four updates a quarter of it."""
    given = job(in_flight=256, groups=64, ahead=6.0, push_every=4)
    found = closed_form(given, rates(update_s=1.0))
    assert found.tokens_per_s == pytest.approx(64_000, rel=1e-3)
    assert found.trainer_idle == pytest.approx(0, abs=1e-3)
    assert found.lag_start == pytest.approx(6 / 4)
    late = closed_form(given, rates(update_s=1.0, trainer={"publish_s": 0.3}))
    assert late.lag_start == pytest.approx(5 / 4)


def test_slots_bind_by_hand() -> None:
    """64 slots of steps of 10 ms + 64 x 0.1 ms: 3,902 tokens/s decoded."""
    given = job(in_flight=256, groups=64, slots=64)
    own = rates(update_s=0.0, sampler={"step_s": 0.01, "row_s": 1e-4})
    found = closed_form(given, own)
    assert found.tokens_per_s == pytest.approx(64 / 0.0164 * 1000 / 999, rel=1e-3)
    # In flight by Little, 256 / 64 updates, and nothing is under way at the trainer.
    assert found.lag_start == pytest.approx(4, rel=1e-3)


def test_the_slowest_of_a_group() -> None:
    """Of two lognormals of the same mean 1: E[max] = 2 Phi(sigma / sqrt 2); alike, the mean."""
    own = rates(update_s=0.0, sigma=1.0, rollout={"sampled_tokens": 1e6}).rollout
    found = lengths_of(own, 2, math.inf)
    both = 1 + math.erf(1 / math.sqrt(2) / math.sqrt(2))
    assert found.of_slowest(found.tokens) / 1e6 == pytest.approx(both, rel=0.01)
    alike = lengths_of(own.model_copy(update={"same_in_group": 1.0}), 2, math.inf)
    assert alike.of_slowest(alike.tokens) / 1e6 == pytest.approx(1, rel=0.01)


def test_lengths_are_capped() -> None:
    own = rates(update_s=0.0, sigma=2.0).rollout
    assert lengths_of(own, 1, 500.0).tokens.max() == 500


GROUPS = {"sigma": 0.4, "rollout": {"same_in_group": 0.8}}
CASES = {
    "rollouts": (job(in_flight=64, groups=4, size=8), rates(update_s=0.3, **GROUPS)),
    "trainer": (
        job(in_flight=256, groups=4, size=8, ahead=3.0, push_every=2),
        rates(update_s=2.0, **GROUPS),
    ),
    "slots": (
        job(in_flight=96, groups=4, size=8, slots=32, push_every=2),
        rates(update_s=0.5, sampler={"step_s": 5e-4, "row_s": 1e-5}, **GROUPS),
    ),
    "two samplers, caches made again": (
        job(in_flight=64, groups=2, size=8, samplers=2, on_push="recompute", push_every=4),
        rates(update_s=0.1, sampler={"prefill_tokens_per_s": 1e5}, **GROUPS),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_within_a_tenth_of_the_simulation(name: str) -> None:
    given, own = CASES[name]
    found, simulated = _both(given, own)
    assert found.tokens_per_s == pytest.approx(simulated.tokens_per_s, rel=0.1)
    assert found.lag_mean == pytest.approx(simulated.lag_mean, rel=0.1)
    assert found.lag_start == pytest.approx(simulated.lag_start, rel=0.1)
    assert found.trainer_idle == pytest.approx(simulated.trainer_idle, abs=0.1)
    # How a burst of rollouts runs out is a rule of thumb.
    rough = 0.2 if name == "trainer" else 0.1
    assert found.sampler_idle == pytest.approx(simulated.sampler_idle, abs=rough)


def _both(given: Job, own: Rates) -> tuple[Forecast, Forecast]:
    simulated = simulate(given, own, seed=0, updates=100, skip=20)
    return closed_form(given, own), simulated.forecast
