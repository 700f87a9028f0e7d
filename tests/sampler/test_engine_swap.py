"""Weights swapped under running requests: versions, segments, log-probabilities of each part."""

import asyncio
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from rl_jax.gateway.protocol import Completion
from rl_jax.sampler import engine as sampler_program
from rl_jax.sampler.engine import Engine
from rl_jax.trajectories.lineage import cache_versions, pure
from rl_jax.trajectories.types import NOT_SAMPLED, Origin, Segment, Status, Trajectory
from tests.fakes import tiny
from tests.fakes.engine import Stepped, ask, key, prompt, request, run

TOLERANCE = 1e-5


def agree(given: Completion, log: list[int], start: int) -> None:
    """Every token of `given`, from `start` in the log, has its own version's log-probability."""
    versions = np.array(given.versions)
    for version in set(given.versions):
        scores = tiny.scored(tiny.params(seed=version), log)[start : start + len(versions)]
        own = versions == version
        np.testing.assert_allclose(np.array(given.logprobs)[own], scores[own], atol=TOLERANCE)


def staging(engine: Engine, version: int, into: list[asyncio.Task[None]]):
    async def stage() -> None:
        into.append(asyncio.create_task(engine.swap(tiny.weights(version))))

    return stage


def test_the_weights_differ() -> None:
    """Or agreement with one version would say nothing of another."""
    log = [*prompt(0, 40)]
    scores = [tiny.scored(tiny.params(seed=v), log)[1:] for v in (0, 1, 2, 3)]
    assert all(np.abs(a - b).max() > 1 for a, b in itertools.pairwise(scores))


def test_recompute_swaps_between_two_steps_of_a_request() -> None:
    """Ten tokens under 0 (one by prefill, nine by decode), then the whole cache under 1."""

    async def main(engine: Engine, steps: Stepped) -> tuple[Completion, tuple[Segment, ...]]:
        swaps: list[asyncio.Task[None]] = []
        steps.after[10] = staging(engine, 1, swaps)
        sequence = await engine.open(key(3))
        given = await engine.generate(sequence, request(prompt(3, 20), 30))
        await swaps[0]
        return given, engine.segments(sequence)

    given, segments = run(main)
    assert given.versions == (0,) * 10 + (1,) * 20
    assert segments == (
        Segment(0, 20, 0, Origin.PREFILL),
        Segment(20, 29, 0, Origin.DECODE),
        Segment(0, 29, 1, Origin.RECOMPUTE),
        Segment(29, 30, 1, Origin.PREFILL),
        Segment(30, 49, 1, Origin.DECODE),
    )
    agree(given, [*prompt(3, 20), *given.tokens], 20)
    assert run(main)[0] == given


def test_the_swap_changes_nothing_before_it() -> None:
    async def main(engine: Engine, steps: Stepped) -> Completion:
        return (await ask(engine, 3, request(prompt(3, 20), 30)))[0]

    async def swapped(engine: Engine, steps: Stepped) -> Completion:
        steps.after[10] = staging(engine, 1, [])
        return await main(engine, steps)

    undisturbed, given = run(main), run(swapped)
    assert given.tokens[:10] == undisturbed.tokens[:10]
    assert given.logprobs[:10] == undisturbed.logprobs[:10]


def test_recompute_of_a_long_log_goes_chunk_by_chunk() -> None:
    """A swap in the middle of another's recomputation starts that again; no token has version 1."""

    async def main(engine: Engine, steps: Stepped) -> tuple[Completion, tuple[Segment, ...]]:
        swaps: list[asyncio.Task[None]] = []
        # Prefill takes programs 1 to 3; 1 is staged after ten more, 2 after one chunk of it.
        steps.after[13] = staging(engine, 1, swaps)
        steps.after[14] = staging(engine, 2, swaps)
        sequence = await engine.open(key(4))
        given = await engine.generate(sequence, request(prompt(4, 130), 30))
        await asyncio.gather(*swaps)
        return given, engine.segments(sequence)

    given, segments = run(main)
    assert given.versions == (0,) * 11 + (2,) * 19
    assert [s for s in segments if s.version == 1] == [Segment(0, 64, 1, Origin.RECOMPUTE)]
    assert [s for s in segments if s.version == 2] == [
        Segment(0, 140, 2, Origin.RECOMPUTE),
        Segment(140, 141, 2, Origin.PREFILL),
        Segment(141, 159, 2, Origin.DECODE),
    ]
    agree(given, [*prompt(4, 130), *given.tokens], 130)


def test_a_conversation_between_two_requests_is_recomputed_too() -> None:
    async def main(engine: Engine, _: Stepped) -> tuple[Completion, Completion]:
        sequence = await engine.open(key(5))
        first = await engine.generate(sequence, request(prompt(5, 50), 20))
        await engine.swap(tiny.weights(1))
        return first, await engine.generate(sequence, request(prompt(6, 9), 10))

    first, second = run(main)
    assert set(first.versions) == {0} and set(second.versions) == {1}
    log = [*prompt(5, 50), *first.tokens, *prompt(6, 9), *second.tokens]
    agree(first, log, 50)
    agree(second, log, 79)


def test_drain_finishes_what_runs_and_starts_what_waits_under_the_new_weights() -> None:
    async def main(engine: Engine, steps: Stepped) -> tuple[Completion, Completion]:
        swaps: list[asyncio.Task[None]] = []
        later: list[asyncio.Task[list[Completion]]] = []

        async def stage() -> None:
            await staging(engine, 1, swaps)()
            later.append(asyncio.create_task(ask(engine, 7, request(prompt(7, 30), 10))))

        steps.after[3] = stage
        (running,) = await ask(engine, 6, request(prompt(6, 20), 25))
        assert not later[0].done(), "it waits while the older one runs"
        await swaps[0]
        return running, (await later[0])[0]

    running, later = run(main, on_push="drain")
    assert running.versions == (0,) * 25
    assert later.versions == (1,) * 10
    agree(running, [*prompt(6, 20), *running.tokens], 20)
    agree(later, [*prompt(7, 30), *later.tokens], 30)


def test_drain_ends_when_the_last_running_request_is_cancelled() -> None:
    async def main(engine: Engine, steps: Stepped) -> None:
        swaps: list[asyncio.Task[None]] = []

        async def stage() -> None:
            await staging(engine, 1, swaps)()
            own.cancel()

        steps.after[3] = stage
        own = asyncio.create_task(ask(engine, 6, request(prompt(6, 20), 100)))
        await asyncio.wait([own])
        await swaps[0]
        assert engine.weights.version == 1

    run(main, on_push="drain")


# --- keep ----------------------------------------------------------------------------------------


def test_keep_goes_on_with_the_cache_of_the_older_weights() -> None:
    """Ten tokens under 0, then twenty under 1 of which nothing is computed again."""

    async def main(engine: Engine, steps: Stepped) -> tuple[Completion, tuple[Segment, ...], int]:
        swaps: list[asyncio.Task[None]] = []
        steps.after[10] = staging(engine, 1, swaps)
        sequence = await engine.open(key(3))
        given = await engine.generate(sequence, request(prompt(3, 20), 30))
        await swaps[0]
        assert engine.steps == 30
        return given, engine.segments(sequence), engine.stale_cache_tokens

    given, segments, stale = run(main, on_push="keep")
    assert given.versions == (0,) * 10 + (1,) * 20
    assert segments == (
        Segment(0, 20, 0, Origin.PREFILL),
        Segment(20, 29, 0, Origin.DECODE),
        Segment(29, 49, 1, Origin.DECODE),
    )
    assert stale == 20
    log = [*prompt(3, 20), *given.tokens]
    agree(given._replace(versions=given.versions[:10], logprobs=given.logprobs[:10]), log[:30], 20)
    alone = tiny.scored(tiny.params(seed=1), log)[30:]
    assert np.abs(np.array(given.logprobs[10:]) - alone).max() > 0.1, "the cache is not that of 1"
    assert run(main, on_push="keep")[0] == given


def test_keep_lets_a_conversation_go_on_and_new_ones_begin_afresh() -> None:
    """Stale is what was sampled from an older cache, not what was sampled after a swap."""

    async def main(engine: Engine, _: Stepped) -> tuple[Completion, list[int]]:
        stale: list[int] = []
        sequence = await engine.open(key(5))
        await engine.generate(sequence, request(prompt(5, 50), 20))
        await engine.swap(tiny.weights(1))
        await engine.generate(sequence, request(prompt(6, 9), 10))
        stale.append(engine.stale_cache_tokens)
        (fresh,) = await ask(engine, 7, request(prompt(7, 30), 10))
        stale.append(engine.stale_cache_tokens)
        assert engine.segments(sequence) == (
            Segment(0, 50, 0, Origin.PREFILL),
            Segment(50, 69, 0, Origin.DECODE),
            Segment(69, 79, 1, Origin.PREFILL),
            Segment(79, 88, 1, Origin.DECODE),
        )
        return fresh, stale

    fresh, stale = run(main, on_push="keep")
    assert fresh.versions == (1,) * 10
    agree(fresh, [*prompt(7, 30), *fresh.tokens], 30)
    assert stale == [10, 10]


@pytest.mark.parametrize(
    ("on_push", "versions", "caches"),
    [
        ("recompute", (0,) * 4 + (1,) * 5 + (2,) * 3, (0,) * 4 + (1,) * 5 + (2,) * 3),
        ("drain", (0,) * 12, (0,) * 12),
        ("keep", (0,) * 4 + (1,) * 5 + (2,) * 3, (0,) * 12),
    ],
)
def test_lineage_of_a_request_over_two_pushes(
    on_push: str, versions: tuple[int, ...], caches: tuple[int, ...]
) -> None:
    """Then a second turn, after both: under 2 in any case."""

    async def main(engine: Engine, steps: Stepped) -> tuple[Trajectory, int]:
        swaps: list[asyncio.Task[None]] = []

        def when(tokens: int, version: int):
            async def stage() -> None:
                if engine.sampled_tokens == tokens - 1 and len(swaps) < version:
                    await staging(engine, version, swaps)()

            return stage

        # Of 4 tokens the last is not counted yet when its program is done.
        for program in range(1, 30):
            first, second = when(4, 1), when(9, 2)

            async def either(first=first, second=second) -> None:
                await first()
                await second()

            steps.after[program] = either
        sequence = await engine.open(key(3))
        one = await engine.generate(sequence, request(prompt(3, 20), 12))
        await asyncio.gather(*swaps)
        two = await engine.generate(sequence, request(prompt(4, 5), 3))
        column = (NOT_SAMPLED,) * 20 + one.versions + (NOT_SAMPLED,) * 5 + two.versions
        own = np.array(column, np.int32)
        return Trajectory(
            key=key(3),
            tokens=np.zeros(len(own), np.int32),
            loss_mask=own != NOT_SAMPLED,
            behavior_logprobs=np.zeros(len(own), np.float32),
            versions=own,
            segments=engine.segments(sequence),
            temperature=1.0,
            reward=1.0,
            status=Status.COMPLETED,
        ), engine.stale_cache_tokens

    own, stale = run(main, on_push=on_push, bursts=False)
    last = 0 if on_push == "keep" else 2
    assert own.versions[20:32].tolist() == [*versions] and own.versions[37:].tolist() == [2] * 3
    assert cache_versions(own)[own.loss_mask].tolist() == [*caches, last, last, last]
    assert pure(own).sum() == (4 if on_push == "keep" else 15)
    assert stale == (own.loss_mask & ~pure(own)).sum()


# --- what a swap costs ---------------------------------------------------------------------------


@pytest.mark.parametrize("on_push", ["recompute", "drain", "keep"])
def test_a_swap_tells_its_version_and_pause_once_the_new_weights_stepped(
    on_push: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that goes on by 1 at every program, by 1,000 in idleness and 1/64 at a look."""
    now = 0.0
    told: list[tuple[int, float]] = []

    def look() -> float:
        nonlocal now
        now += 1 / 64
        return now

    async def step() -> None:
        nonlocal now
        now += 1

    async def main(engine: Engine, steps: Stepped) -> None:
        nonlocal now
        swaps: list[asyncio.Task[None]] = []

        async def stage() -> None:
            await step()
            await staging(engine, 1, swaps)()

        steps.after = dict.fromkeys(range(1, 100), step) | {5: stage}
        await ask(engine, 3, request(prompt(3, 20), 12))
        assert told == ([] if on_push == "drain" else [(1, 1 / 64)])
        await asyncio.gather(*swaps)
        now += 1000
        await engine.swap(tiny.weights(2))
        now += 1000
        await ask(engine, 4, request(prompt(4, 20), 3))
        assert told[-1] == (2, 1 / 64)

    monkeypatch.setattr(sampler_program, "time", SimpleNamespace(perf_counter=look))

    def on_swap(version: int, pause: float) -> None:
        told.append((version, pause))

    run(main, on_push=on_push, on_swap=on_swap, bursts=False)
    assert [version for version, _ in told] == ([2] if on_push == "drain" else [1, 2])


@pytest.mark.parametrize("on_push", ["recompute", "drain", "keep"])
def test_versions_may_be_skipped_and_never_go_back(on_push: str) -> None:
    async def main(engine: Engine, steps: Stepped) -> Completion:
        swaps: list[asyncio.Task[None]] = []

        async def both() -> None:
            await staging(engine, 1, swaps)()
            await asyncio.sleep(0)
            await staging(engine, 3, swaps)()
            await asyncio.sleep(0)
            with pytest.raises(ValueError, match="version 2 is not above 3"):
                await engine.swap(tiny.weights(2))

        steps.after[2] = both
        await ask(engine, 8, request(prompt(8, 20), 10))
        await asyncio.gather(*swaps)
        assert engine.weights.version == 3
        for version in (1, 3):
            with pytest.raises(ValueError, match=f"version {version} is not above 3"):
                await engine.swap(tiny.weights(version))
        return (await ask(engine, 9, request(prompt(9, 20), 5)))[0]

    assert run(main, on_push=on_push).versions == (3,) * 5
