"""Several decode steps in one visit of the mesh's thread: the same bits, no longer than allowed."""

import asyncio

import numpy as np
import pytest

from rl_jax.gateway.protocol import Completion, Request
from rl_jax.sampler import burst
from rl_jax.sampler.burst import Burst, longest
from rl_jax.sampler.engine import Engine
from rl_jax.sampler.layout import Pages
from rl_jax.sampler.page_table import PageRow
from rl_jax.sampler.sampling import Sampled
from rl_jax.sampler.scheduler import Plan, Running, Sequence
from rl_jax.sampler.step import StepInputs
from rl_jax.trajectories.types import Origin, RolloutKey, Segment
from tests.fakes import tiny
from tests.fakes.engine import Stepped, ask, key, prompt, request, run

CONTEXT = 192


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No burst ends because the machine is slow."""
    monkeypatch.setattr(burst, "SECONDS", 600.0)


# --- how long, by hand ----------------------------------------------------------------------------


def sequence(sampled: int, most: int, length: int, stop: tuple[int, ...] = ()) -> Sequence:
    row = PageRow(0, np.zeros((1, 4), np.int32), np.zeros(1, np.int32))
    asked = Request((), most, frozenset(stop), 1.0)
    running = Running(asked, (0, 0), True, tokens=[0] * sampled)
    return Sequence(0, RolloutKey("t", 0, 0), row, [0] * length, length - 1, running=running)


@pytest.mark.parametrize(
    ("rows", "steps"),
    [
        ([sequence(3, 10, 50)], 7),
        ([sequence(3, 10, 50), None, sequence(1, 6, 50)], 5),
        ([sequence(3, 90, 188)], 4),  # the context has room for four
        ([sequence(0, 1000, 20)], burst.MOST),
        ([sequence(9, 10, 50)], 1),
    ],
)
def test_a_burst_is_as_long_as_its_shortest_row(rows: list[Sequence | None], steps: int) -> None:
    assert longest(Plan(1, rows, [1 if row else 0 for row in rows]), CONTEXT) == steps


def test_a_row_whose_request_was_given_up_bounds_nothing_and_prefill_is_one_step() -> None:
    given_up = sequence(3, 10, 50)
    given_up.running = None
    assert longest(Plan(1, [given_up, sequence(1, 6, 50)], [1, 1]), CONTEXT) == 5
    assert longest(Plan(16, [sequence(0, 90, 50)], [16]), CONTEXT) == 1


def sampled(tokens: list[int], finite: list[bool] | None = None) -> Sampled:
    nothing = np.zeros(len(tokens), np.float32)
    own = np.array(finite or [True] * len(tokens))
    return Sampled(np.array(tokens, np.int32), nothing, nothing, own, None)


def made(rows: list[Sequence | None], most: int, clock: list[float]) -> Burst:
    count = len(rows)
    inputs = StepInputs(
        np.full((count, 1), 5, np.int32),
        np.array([1 if row else 0 for row in rows], np.int32),
        np.array([49 if row else 0 for row in rows], np.int32),
        Pages(np.zeros((count, 1, 4), np.int32), np.zeros((count, 1), np.int32)),
        np.zeros((count, 2), np.uint32),
        np.zeros(count, np.float32),
    )
    counts = [1 if row else 0 for row in rows]
    return Burst(Plan(1, rows, counts), inputs, most, lambda: clock[0], 10.0)


def test_the_next_step_has_what_the_last_one_sampled_one_place_further() -> None:
    own = made([sequence(3, 10, 50), None], 3, [0.0])
    first = own.inputs
    assert own.goes_on(sampled([7, 3]))  # an idle row samples something, too
    assert own.inputs.tokens.tolist() == [[7], [0]] and own.inputs.positions.tolist() == [50, 0]
    assert own.inputs.tokens.dtype == own.inputs.positions.dtype == np.int32
    assert first.positions.tolist() == [49, 0], "what a program may still read is left alone"
    assert own.goes_on(sampled([8, 3])) and own.inputs.positions.tolist() == [51, 0]
    assert not own.goes_on(sampled([9, 3])), "three were asked for"


def test_what_ends_a_burst() -> None:
    rows = [sequence(3, 10, 50, stop=(7, 9)), None, sequence(3, 10, 50)]
    assert made(rows, 9, [0.0]).goes_on(sampled([8, 7, 7])), "7 stops the first row only"
    assert not made(rows, 9, [0.0]).goes_on(sampled([9, 0, 0]))
    assert not made(rows, 9, [0.0]).goes_on(sampled([0, 0, 0], [True, True, False]))
    assert made(rows, 9, [0.0]).goes_on(sampled([0, 0, 0], [True, False, True])), "an idle row"
    assert made(rows, 9, [10.0]).goes_on(sampled([0, 0, 0]))
    assert not made(rows, 9, [10.1]).goes_on(sampled([0, 0, 0]))


# --- in the engine --------------------------------------------------------------------------------


async def crowd(engine: Engine, _: Stepped) -> list[list[Completion]]:
    """Two dozen conversations of two turns, of every length; a third of the turns stop early."""

    def asked(number: int, turn: int) -> Request:
        stop = [number % 50] if number % 3 == 0 else []
        new = 5 + (7 * number + turn) % 60
        return request(prompt(number + turn, 4 + 3 * number % 40), new, stop=stop)

    return await asyncio.gather(
        *(ask(engine, number, asked(number, 0), asked(number, 1)) for number in range(24))
    )


def test_bursts_and_single_steps_sample_the_same(patient: None) -> None:
    assert run(crowd) == run(crowd, bursts=False)


def test_one_visit_makes_many_steps(patient: None) -> None:
    async def main(engine: Engine, steps: Stepped) -> tuple[int, int]:
        await ask(engine, 1, request(prompt(1, 40), 60))
        return engine.steps, steps.visits

    # A prefill, then 59 decode steps, 32 and 27 of them; else a visit each.
    assert run(main) == (60, 3)
    assert run(main, bursts=False) == (60, 60)


def test_a_new_request_waits_for_one_step_and_no_more(patient: None) -> None:
    async def main(engine: Engine, steps: Stepped) -> list[int]:
        started: list[int] = []
        others: list[asyncio.Task[list[Completion]]] = []

        async def arrive() -> None:
            others.append(asyncio.create_task(ask(engine, 2, request(prompt(2, 9), 1))))
            others[-1].add_done_callback(lambda _: started.append(steps.count))

        steps.after[7] = arrive
        await ask(engine, 1, request(prompt(1, 40), 30))
        await asyncio.gather(*others)
        return started

    (done,) = run(main)
    # Its prefill, which samples all it wants, is program 8, unless 8 had begun before it arrived.
    assert done in (8, 9)


def test_new_weights_sample_from_the_next_step_on(patient: None) -> None:
    async def main(engine: Engine, steps: Stepped) -> Completion:
        swaps: list[asyncio.Task[None]] = []

        async def stage() -> None:
            swaps.append(asyncio.create_task(engine.swap(tiny.weights(1))))

        steps.after[10] = stage
        (given,) = await ask(engine, 1, request(prompt(1, 20), 30))
        await asyncio.gather(*swaps)
        return given

    given = run(main, on_push="keep")
    assert given.versions == (0,) * 10 + (1,) * 20


def test_a_request_given_up_in_a_burst_enters_nothing_that_its_log_has_not(
    patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The burst goes on to its end, as if nobody had told it."""
    deaf = property(lambda engine: False, lambda engine, value: None)
    monkeypatch.setattr(Engine, "_changed", deaf, raising=False)

    async def main(engine: Engine, steps: Stepped) -> tuple[Segment, ...]:
        own = await engine.open(key(1))
        lost = asyncio.create_task(engine.generate(own, request(prompt(1, 20), 100)))

        async def cancel() -> None:
            lost.cancel()

        steps.after[6] = cancel
        await asyncio.wait([lost])
        await ask(engine, 2, request(prompt(2, 20), 30))
        return engine.segments(own)

    # Prefill samples one token; the first step of the burst, whose token is in the log, enters it.
    assert run(main) == (Segment(0, 20, 0, Origin.PREFILL), Segment(20, 21, 0, Origin.DECODE))
