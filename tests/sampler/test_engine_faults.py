"""Requests that go wrong alone, and an engine that goes wrong for everybody."""

import asyncio
from collections.abc import Callable
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from launch import build
from rl_jax.arrays import Tree
from rl_jax.gateway.protocol import Completion, RequestFailed
from rl_jax.sampler.engine import Engine
from rl_jax.sampler.programs import Programs, compile_programs
from tests.fakes import tiny
from tests.fakes.engine import Stepped, ask, key, prompt, request, run

POISON = tiny.VOCAB - 1
"""The token whose embedding is NaN in `poisoned`; no prompt has it unless a test says so."""


@cache
def poisoned() -> Programs:
    """One NaN embedding row on the way in; the head, which shares the matrix, stays clean."""
    clean = tiny.model()

    def extend(params: Tree, *rest: Any) -> Any:
        embedding = params["embedding"].at[POISON].set(jnp.nan)
        return clean.extend({**params, "embedding": embedding}, *rest)

    layout = tiny.compiled().programs.layout
    params = build.abstract_params(clean, tiny.mesh())
    shapes = tiny.SHAPES._replace(prefill_tokens=(64,))
    return compile_programs(
        clean._replace(extend=extend), params, layout, shapes, tiny.mesh(), tiny.SEED
    )


def pool_of(engine: Engine) -> np.ndarray:
    return np.asarray(engine._pool)


# --- one request ---------------------------------------------------------------------------------


def test_a_cancelled_request_leaves_the_engine_healthy() -> None:
    async def main(engine: Engine, steps: Stepped) -> list[Completion]:
        sequence = await engine.open(key(1))
        lost = asyncio.create_task(engine.generate(sequence, request(prompt(1, 40), 100)))

        async def cancel() -> None:
            lost.cancel()

        steps.after[6] = cancel
        beside = asyncio.create_task(ask(engine, 2, request(prompt(2, 40), 30)))
        await asyncio.wait([lost])
        with pytest.raises(ValueError, match="has a request that failed or was cancelled"):
            await engine.generate(sequence, request(prompt(1, 3)))
        await engine.close(sequence)
        given = await beside
        again = await ask(engine, 1, request(prompt(1, 40), 30))
        return [*given, *again]

    async def undisturbed(engine: Engine, _: Stepped) -> list[Completion]:
        return [
            *await ask(engine, 2, request(prompt(2, 40), 30)),
            *await ask(engine, 1, request(prompt(1, 40), 30)),
        ]

    assert run(main) == run(undisturbed)


def test_closing_in_the_middle_of_a_step_lets_the_next_one_have_the_pages() -> None:
    """The step still writes to them; the newcomer's own steps come after it."""

    async def main(engine: Engine, steps: Stepped) -> list[Completion]:
        replaced: list[asyncio.Task[list[Completion]]] = []

        async def replace() -> None:
            await engine.close(sequence)
            replaced.append(asyncio.create_task(ask(engine, 5, request(prompt(5, 90), 20))))

        sequence = await engine.open(key(1))
        steps.after[4] = replace
        lost = asyncio.create_task(engine.generate(sequence, request(prompt(1, 40), 100)))
        while not replaced:
            await asyncio.sleep(0)
        lost.cancel()
        return await replaced[0]

    assert run(main) == run(lambda engine, _: ask(engine, 5, request(prompt(5, 90), 20)))


def test_logits_that_are_not_finite_fail_their_request_alone() -> None:
    """Poison in a prompt of 20: its pages are zeroed, its neighbours keep every bit."""

    async def main(engine: Engine, _: Stepped) -> list[list[Completion]]:
        bad = await engine.open(key(1))
        others = [asyncio.create_task(ask(engine, n, request(prompt(n, 50), 30))) for n in (2, 3)]
        with pytest.raises(RequestFailed, match=r"logits not finite: RolloutKey\(task='t'"):
            await engine.generate(bad, request([*prompt(1, 10), POISON, *prompt(1, 9)], 30))
        own = engine._sequences[bad].row.owned()
        given = [await other for other in others]
        assert len(own) > 1 and not pool_of(engine)[0, :, own].any()
        with pytest.raises(ValueError, match="failed or was cancelled"):
            await engine.generate(bad, request(prompt(1, 3)))
        await engine.close(bad)
        given.append(await ask(engine, 1, request(prompt(1, 90), 20)))
        assert np.isfinite(pool_of(engine)[0, :, 1:].view(np.float32)).all()
        return given

    async def undisturbed(engine: Engine, _: Stepped) -> list[list[Completion]]:
        asked = ((2, 50, 30), (3, 50, 30), (1, 90, 20))
        return [await ask(engine, n, request(prompt(n, length), new)) for n, length, new in asked]

    assert run(main, programs=poisoned()) == run(undisturbed, programs=poisoned())


def test_pages_of_a_poisoned_request_that_was_closed_meanwhile_are_zeroed_too() -> None:
    async def main(engine: Engine, steps: Stepped) -> None:
        async def close() -> None:
            lost.cancel()
            await asyncio.wait([lost])
            await engine.close(bad)

        bad = await engine.open(key(1))
        steps.after[1] = close
        lost = asyncio.create_task(engine.generate(bad, request([POISON, *prompt(1, 9)])))
        await asyncio.wait([lost])
        await ask(engine, 2, request(prompt(2, 5), 1))
        assert np.isfinite(pool_of(engine)[0, :, 1:].view(np.float32)).all()

    run(main, programs=poisoned())


# --- the engine ----------------------------------------------------------------------------------


class Broken(Exception):
    pass


def breaking(after: int) -> Programs:
    """The device fails at step `after`."""
    programs = tiny.compiled().programs
    steps = 0

    def wrapped(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == after:
                raise Broken("out of memory")
            return step(*args)

        return run

    return programs._replace(steps={n: wrapped(step) for n, step in programs.steps.items()})


def test_a_fault_of_the_engine_fails_everybody_who_waits() -> None:
    async def main(engine: Engine, steps: Stepped) -> None:
        running = [
            asyncio.create_task(ask(engine, n, request(prompt(n, 20), 50))) for n in range(71)
        ]
        await asyncio.sleep(0)
        await engine.open(key(90))
        opening = asyncio.create_task(engine.open(key(99)))

        async def stage() -> None:
            swapping.append(asyncio.create_task(engine.swap(tiny.weights(1))))

        swapping: list[asyncio.Task[None]] = []
        steps.after[19] = stage
        ended = await asyncio.gather(*running, opening, return_exceptions=True)
        ended += await asyncio.gather(*swapping, return_exceptions=True)
        assert len(ended) == 73
        for error in ended:
            assert isinstance(error, RuntimeError)
            assert str(error) == "the sampler has stopped: Broken('out of memory')"
            assert isinstance(error.__cause__, Broken)
        for late in (engine.open(key(1)), engine.swap(tiny.weights(2))):
            with pytest.raises(RuntimeError, match="the sampler has stopped"):
                await late
        await engine.close(90)

    run(main, programs=breaking(after=20), on_push="drain")


def test_the_loop_raises_its_own_fault() -> None:
    async def main() -> None:
        steps = Stepped()
        engine = Engine(tiny.weights(), breaking(after=2), steps)
        loop = asyncio.create_task(engine.run())
        with pytest.raises(RuntimeError, match="the sampler has stopped"):
            await ask(engine, 1, request(prompt(1, 20), 50))
        with pytest.raises(Broken, match="out of memory"):
            await loop
        steps.close()

    asyncio.run(main())
