"""The simulated run: against an independent simulation's published table, and its own rules."""

import pytest

from launch.plan.replica import Replica, Sampling
from launch.plan.simulate import simulate
from tests.launch.plan.jobs import job, rates

pytestmark = pytest.mark.usefixtures("unchecked")

TABLE = [
    # in flight, batch, sigma, K, ahead, trainer's share: lag of starts, by tokens, of tokens, p99.
    pytest.param(256, 64, 0.5, 1, 1000.0, 0.8, (4.80, 5.93, 3.37, 12), id="narrow"),
    pytest.param(256, 64, 1.0, 4, 1000.0, 0.8, (1.20, 2.92, 1.42, 6), id="K4"),
    pytest.param(
        256,
        64,
        1.0,
        1,
        6.0,
        1.1,
        (6.00, 11.8, 7.54, 23),
        id="trainer-bound",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        256, 64, 1.0, 1, 1000.0, 0.8, (4.80, 11.7, 5.68, 25), id="wide", marks=pytest.mark.slow
    ),
    pytest.param(
        256, 64, 1.3, 1, 1000.0, 0.8, (4.80, 22.4, 11.0, 36), id="wider", marks=pytest.mark.slow
    ),
    pytest.param(
        512, 64, 1.0, 1, 1000.0, 0.8, (8.81, 22.6, 12.8, 50), id="512", marks=pytest.mark.slow
    ),
    pytest.param(
        256, 256, 1.0, 1, 1000.0, 0.8, (1.80, 3.51, 2.08, 7), id="B256", marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(("m", "b", "sigma", "k", "ahead", "busy", "wanted"), TABLE)
def test_lags_of_a_published_simulation(
    m: int,
    b: int,
    sigma: float,
    k: int,
    ahead: float,
    busy: float,
    wanted: tuple[float, float, float, float],
) -> None:
    """Means are held closely; what long trajectories weigh much in is noisy in either run."""
    # m rollouts of a second each: an update's b take b / m seconds.
    given = job(in_flight=m, groups=b, push_every=k, ahead=ahead)
    own = rates(update_s=busy * b / m, sigma=sigma)
    # A trainer that is hardly the slower one takes long to fill its queue, a heavy tail to show,
    # and many rollouts in flight to be steady.
    skip, counted = (100, 300) if busy > 1 or sigma > 1 or m > 256 else (40, 100)
    found = simulate(given, own, seed=0, updates=skip + counted, skip=skip).forecast
    start, by_tokens, token, tail = wanted
    assert found.lag_start == pytest.approx(start, rel=0.1, abs=0.3)
    assert found.lag_start_by_tokens == pytest.approx(by_tokens, rel=0.15, abs=0.3)
    assert found.lag_mean == pytest.approx(token, rel=0.15, abs=0.3)
    assert found.lag_p99 == pytest.approx(tail, rel=0.1, abs=1)


def test_one_rollout_after_the_other_by_hand() -> None:
    """Two rollouts an update, one at a time, of 1 + 999 tokens: 0.999 s each, the first token for
    nothing. Training 0.5 s, a push each: the trainer ends 0.5 s after each second rollout."""
    given = job(in_flight=1, groups=2)
    told = simulate(given, rates(update_s=0.5), seed=3, updates=3)
    assert [u.taken for u in told.updates] == pytest.approx([1.998, 3.996, 5.994])
    assert [u.ended for u in told.updates] == pytest.approx([2.498, 4.496, 6.494])
    assert [u.tokens for u in told.updates] == pytest.approx([2000] * 3)
    assert told.forecast.tokens_per_s == pytest.approx(6000 / 6.494)
    assert told.forecast.trainer_idle == pytest.approx(1 - 1.5 / 6.494)
    # The third begins at 1.998 under version 0, which 500 ms later is replaced: at most 501 of its
    # tokens are of version 0 when it is trained under version 1.
    first, second, _ = told.updates
    assert (first.lag_mean, first.lag_max) == (0, 0)
    assert second.lag_mean == pytest.approx(501 / 2000, abs=1e-3) and second.lag_max == 1


def test_the_seed_alone_decides() -> None:
    given, own = job(in_flight=16, groups=2, size=4), rates(update_s=0.1, sigma=1.0)
    first, again, other = (simulate(given, own, seed=s, updates=6) for s in (1, 1, 2))
    assert first == again != other


def test_in_step_nothing_lags() -> None:
    given = job(in_flight=64, groups=4, size=4, ahead=0.0, tau=1, when_stale="drop")
    found = simulate(given, rates(update_s=0.3, sigma=1.0), seed=0, updates=20).forecast
    assert (found.lag_mean, found.lag_start, found.dropped_share) == (0, 0, 0)


@pytest.mark.parametrize("policy", ["drop", "wait", "pace"])
def test_no_policy_trains_on_what_is_too_old(policy: str) -> None:
    given = job(in_flight=64, groups=2, size=4, ahead=2.0, tau=2, when_stale=policy)
    own = rates(update_s=0.05, sigma=1.0, trainer={"publish_s": 0.01})
    told = simulate(given, own, seed=0, updates=60)
    free = simulate(given._replace(when_stale="mask", limits=given.limits._replace(pace=None)),
                    own, seed=0, updates=60)  # fmt: skip
    assert max(u.lag_max for u in free.updates) > 2
    assert max(u.lag_max for u in told.updates) <= 2
    assert (told.forecast.dropped_share > 0) == (policy == "drop")
    assert told.forecast.tokens_per_s < free.forecast.tokens_per_s


def test_a_sampler_that_goes_away_costs_its_rollouts() -> None:
    given = job(in_flight=32, groups=2, size=4, samplers=2)
    lossy = {"losses_per_hour": 360.0, "restart_s": 3.0}
    calm, lost = (
        simulate(given, rates(update_s=0.1, sampler=more), seed=0, updates=40).forecast
        for more in ({}, lossy)
    )
    assert lost.tokens_per_s < 0.95 * calm.tokens_per_s
    assert lost.in_flight <= 32


@pytest.mark.parametrize(
    ("on_push", "ends", "spans"),
    [
        ("keep", 0.10, [(0, 1), (0, 5), (1, 5)]),
        # Until the request ends; then it swaps.
        ("drain", 0.10, [(0, 1), (0, 10)]),
        # The six tokens so far again at 100 a second; the step that ends it samples one.
        ("recompute", 0.05 + 0.06 + 0.04, [(0, 1), (0, 5), (1, 1), (1, 4)]),
    ],
)
def test_a_swap_within_a_request(on_push: str, ends: float, spans: list[tuple[int, int]]) -> None:
    """A request of 11 tokens, the first with its prefill of nothing, ten in steps of 10 ms; new
    weights after 50 ms."""
    own = rates(update_s=0.0, sampler={"step_s": 0.01, "prefill_tokens_per_s": 100.0}).sampler
    replica, rollout = Replica(own, 4, on_push), Sampling(0)
    replica.submit(rollout, 0.0, 11.0)
    assert replica.advance(replica.next_event) == []
    assert replica.advance(0.05) == []
    replica.swap(1)
    ended: list[Sampling] = []
    while not ended:
        now = replica.next_event
        ended = replica.advance(now)
    assert ended == [rollout] and now == pytest.approx(ends)
    assert [v for v, _ in rollout.spans] == [v for v, _ in spans]
    assert [n for _, n in rollout.spans] == pytest.approx([n for _, n in spans])
    assert replica.version == 1


@pytest.mark.parametrize("began", [16.0, 65536.0])
def test_a_short_step_ends_however_late_it_is(began: float) -> None:
    """A time near `began` tells no two moments apart that are 1e-9 of a step from each other."""
    own = rates(update_s=0.0, sampler={"step_s": 1.25e-6, "prefill_tokens_per_s": 1e9}).sampler
    for length in range(2, 60):
        replica, rollout = Replica(own, 4, "keep"), Sampling(0)
        replica.advance(began)
        replica.submit(rollout, 0.0, float(length))
        visits = iter(range(8))
        while not replica.advance(replica.next_event):
            assert next(visits, None) is not None, f"{length} tokens never end"


def test_caches_that_are_made_again_take_time() -> None:
    given = job(in_flight=16, groups=4)
    own = rates(update_s=0.05, sampler={"prefill_tokens_per_s": 40_000.0})
    kept, again = (
        simulate(given._replace(on_push=on), own, seed=0, updates=30).forecast
        for on in ("keep", "recompute")
    )
    assert kept.sampler_push_share == 0 < again.sampler_push_share < 1
    assert again.tokens_per_s < kept.tokens_per_s


def test_a_run_that_gets_nowhere_says_so() -> None:
    given = job(in_flight=64, groups=1, size=2)
    own = rates(update_s=0.0, rollout={"failed_share": 1.0})
    with pytest.raises(ValueError, match="every group fails"):
        simulate(given, own, seed=0, updates=100)
