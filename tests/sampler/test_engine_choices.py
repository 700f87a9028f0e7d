"""Experts that the sampler's tokens went to: those of the forward pass, each recorded once."""

import asyncio
from functools import cache

import jax
import numpy as np

from rl_jax.gateway.protocol import Completion
from rl_jax.sampler.engine import Engine
from rl_jax.sampler.programs import Programs
from tests.fakes import tiny
from tests.fakes.engine import Stepped, ask, key, prompt, request
from tests.fakes.engine import run as run_engine

FIRST, SECOND = request(prompt(3, 20), 6), request(prompt(4, 9), 5)


def programs() -> Programs:
    return tiny.compiled(tiny.ROUTED, tiny.FEW, sequences=4, max_context=64).programs


def run(main, **rest):
    weights = tiny.weights(0, tiny.ROUTED)
    return run_engine(main, programs=programs(), weights=weights, **rest)


@cache
def _forward():
    routing = tiny.model(tiny.ROUTED).routing
    assert routing is not None
    return jax.jit(routing.forward)


def own_choices(log: list[int], version: int = 0) -> np.ndarray:
    """[T, M, k] by training's forward pass, in ascending order."""
    row, segments = np.zeros((1, 64), np.int32), np.full((1, 64), -1, np.int32)
    row[0, : len(log)], segments[0, : len(log)] = log, 0
    params = tiny.params(tiny.ROUTED, version)
    found = _forward()(params, row, np.arange(64, dtype=np.int32)[None], segments, None)[1]
    return np.sort(np.asarray(found)[0, : len(log)], -1)


def told(*given: Completion) -> np.ndarray:
    return np.sort(np.concatenate([g.choices for g in given]), -1)


def log_of(first: Completion, second: Completion) -> list[int]:
    return [*FIRST.new_tokens, *first.tokens, *SECOND.new_tokens, *second.tokens]


async def two_turns(engine: Engine, steps: Stepped) -> list[Completion]:
    return await ask(engine, 3, FIRST, SECOND)


def test_what_is_recorded_is_what_the_forward_pass_chooses() -> None:
    """All tokens in order over two turns; the very last one was never computed."""
    first, second = run(two_turns)
    assert first.choices is not None and first.choices.dtype == np.uint8
    assert len(first.choices) == 20 + 5
    want = own_choices(log_of(first, second))
    assert len(np.unique(want)) == 6
    np.testing.assert_array_equal(told(first, second), want[:-1])


def test_neighbours_change_nothing() -> None:
    async def crowded(engine: Engine, steps: Stepped) -> list[Completion]:
        others = (ask(engine, n, request(prompt(n, 30), 12)) for n in (5, 6, 7))
        return (await asyncio.gather(two_turns(engine, steps), *others))[0]

    for alone, beside in zip(run(two_turns), run(crowded), strict=True):
        assert alone[:5] == beside[:5]
        np.testing.assert_array_equal(alone.choices, beside.choices)


def test_a_recomputed_cache_keeps_what_was_recorded() -> None:
    """New weights between two turns compute all again: the first turn's tokens keep the experts
    under which the next ones were sampled."""

    async def main(engine: Engine, steps: Stepped) -> list[Completion]:
        sequence = await engine.open(key(3))
        first = await engine.generate(sequence, FIRST)
        await engine.swap(tiny.weights(1, tiny.ROUTED))
        return [first, await engine.generate(sequence, SECOND)]

    first, second = run(main)
    log = log_of(first, second)
    old, new = own_choices(log), own_choices(log, version=1)
    assert (old[:25] != new[:25]).any()
    np.testing.assert_array_equal(told(first, second)[:25], old[:25])
    np.testing.assert_array_equal(told(first, second)[25:], new[25:-1])


def test_a_swap_within_a_request_records_every_token_once() -> None:
    async def main(engine: Engine, steps: Stepped) -> list[Completion]:
        async def stage() -> None:
            swaps.append(asyncio.create_task(engine.swap(tiny.weights(1, tiny.ROUTED))))

        swaps = []
        steps.after[3] = stage
        return await two_turns(engine, steps)

    first, second = run(main)
    assert first.versions == (0, 0, 0, 1, 1, 1)
    log = log_of(first, second)
    # The third token was sampled under 0 and computed under 1.
    want = np.concatenate([own_choices(log)[:22], own_choices(log, version=1)[22:-1]])
    np.testing.assert_array_equal(told(first, second), want)
