"""Launching: in order, bounded, never wedged, and without a deadlock of two sharded programs."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl_jax.arrays import Array
from rl_jax.dispatch import Dispatcher
from rl_jax.sharding import DATA, TENSOR, make_mesh
from tests.trainer.sharded import collectives

DEADLINE_S = 60.0


@contextmanager
def dispatcher(*depth: int) -> Iterator[Dispatcher]:
    """Of the default depth, or of another."""
    made = Dispatcher("test", *depth)
    try:
        yield made
    finally:
        made.close()


class Output:
    """What `jax.block_until_ready` waits for; counts itself in and out of flight."""

    def __init__(self, number: int, flight: "Flight") -> None:
        self.number, self._flight = number, flight

    def block_until_ready(self) -> "Output":
        self._flight.finished.append(self.number)
        return self


class Flight:
    """A program that records launches, completions, and how many are between the two."""

    def __init__(self) -> None:
        self.launched: list[int] = []
        self.finished: list[int] = []
        self.most = 0
        self.threads: set[int] = set()

    def program(self, number: int) -> Output:
        self.launched.append(number)
        self.threads.add(threading.get_ident())
        self.most = max(self.most, len(self.launched) - len(self.finished))
        return Output(number, self)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_in_order_and_never_more_than_depth_in_flight(depth: int) -> None:
    flight = Flight()

    async def many() -> list[Output]:
        with dispatcher(depth) as own:
            return await asyncio.gather(*(own.launch(flight.program, i) for i in range(50)))

    outputs = asyncio.run(many())
    assert [o.number for o in outputs] == flight.launched == flight.finished == list(range(50))
    assert flight.most == depth
    assert len(flight.threads) == 1
    assert threading.get_ident() not in flight.threads


def test_launch_returns_before_the_program_is_done_and_drain_after() -> None:
    flight = Flight()

    async def scenario() -> None:
        with dispatcher(3) as own:
            await own.launch(flight.program, 0)
            await own.launch(flight.program, 1)
            assert flight.finished == []
            await own.drain()
            assert flight.finished == [0, 1]
            await own.launch(flight.program, 2)
            await own.run(flight.program, 3)
            assert flight.finished == [0, 1, 2, 3]
            await own.launch(flight.program, 4)
        assert flight.finished == [0, 1, 2, 3, 4]  # closing waits too

    asyncio.run(scenario())


double = jax.jit(lambda x: x * 2, donate_argnums=0)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_programs_that_take_all_outputs_of_the_one_before_are_bounded_too(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs: list[Array] = []
    done, most = 0, 0
    wait = jax.block_until_ready

    def waited(arrays: list[Array]) -> Any:
        """What is waited for is done, and so is everything that it was computed from."""
        nonlocal done
        done = max([done, *(1 + i for i, x in enumerate(outputs) if any(x is a for a in arrays))])
        return wait(arrays)

    def program(x: Array) -> Array:
        nonlocal most
        outputs.append(double(x))
        most = max(most, len(outputs) - done)
        return outputs[-1]

    async def scenario() -> None:
        x = jnp.ones(())
        with dispatcher(depth) as own:
            for _ in range(25):
                x = await own.launch(program, x)
            await own.drain()
            assert float(x) == 2.0**25

    monkeypatch.setattr(jax, "block_until_ready", waited)
    asyncio.run(scenario())
    assert outputs[0].is_deleted()
    assert (most, done) == (depth, 25)


def test_a_fault_at_the_launch_reaches_its_caller_alone() -> None:
    flight = Flight()

    def broken() -> None:
        raise ZeroDivisionError("broken program")

    async def scenario() -> list[Any]:
        with dispatcher() as own:
            calls: list[Callable] = [flight.program, broken, flight.program]
            return await asyncio.gather(
                own.launch(calls[0], 0),
                own.launch(calls[1]),
                own.run(calls[2], 1),
                own.run(calls[1]),
                own.launch(calls[2], 2),
                return_exceptions=True,
            )

    results = asyncio.run(scenario())
    assert [type(r) for r in results] == [
        Output,
        ZeroDivisionError,
        Output,
        ZeroDivisionError,
        Output,
    ]
    assert flight.finished == [0, 1, 2]


def fail(value: np.ndarray) -> np.ndarray:
    raise ZeroDivisionError("inside the program")


@jax.jit
def fails_while_it_runs(x: Array) -> Array:
    return jax.pure_callback(fail, jax.ShapeDtypeStruct((), jnp.float32), x)


def test_a_fault_of_an_execution_reaches_the_awaiting_caller_and_wedges_nothing() -> None:
    async def scenario() -> None:
        with dispatcher() as own:
            with pytest.raises(Exception, match="inside the program"):
                await own.run(fails_while_it_runs, jnp.float32(1))
            assert float(await own.run(jnp.negative, jnp.float32(2))) == -2.0
            await own.drain()

    asyncio.run(scenario())


def test_a_fault_of_a_launched_program_is_not_lost() -> None:
    class Broken(Output):
        def block_until_ready(self) -> Output:
            super().block_until_ready()
            raise ZeroDivisionError("late")

    flight = Flight()

    def program(number: int) -> Output:
        flight.program(number)
        return Broken(number, flight)

    async def scenario() -> None:
        with dispatcher(1) as own:
            await own.launch(program, 0)
            with pytest.raises(ZeroDivisionError, match="late"):
                await own.launch(flight.program, 1)
            await own.run(flight.program, 2)
            assert flight.launched == flight.finished == [0, 2]

    asyncio.run(scenario())


def test_closing_ends_the_thread_even_after_a_fault() -> None:
    flight = Flight()

    class Broken(Output):
        def block_until_ready(self) -> Output:
            raise ZeroDivisionError("late")

    own = Dispatcher("test")
    asyncio.run(own.launch(lambda: Broken(0, flight)))
    with pytest.raises(ZeroDivisionError, match="late"):
        own.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        own.close()


def test_a_caller_that_gives_up_wedges_nothing() -> None:
    gate, flight = threading.Event(), Flight()

    async def scenario() -> None:
        with dispatcher() as own:
            stuck = asyncio.create_task(own.run(gate.wait))
            queued = asyncio.create_task(own.run(flight.program, 0))
            await asyncio.sleep(0)
            stuck.cancel()
            queued.cancel()
            await asyncio.wait([stuck, queued])
            gate.set()
            await own.run(flight.program, 1)

    asyncio.run(scenario())
    assert flight.finished[-1] == 1


def test_the_event_loop_goes_on_while_a_program_runs() -> None:
    gate = threading.Event()

    async def scenario() -> bool:
        with dispatcher() as own:
            running = asyncio.create_task(own.run(gate.wait))
            await asyncio.sleep(0)
            assert not running.done()
            gate.set()  # only a loop that was not blocked comes here
            return await running

    assert asyncio.run(scenario())


def test_at_least_one_in_flight() -> None:
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        Dispatcher("test", 0)


class Clock:
    """`time.perf_counter` that reads 1, 2, 3, ..."""

    def __init__(self) -> None:
        self._ticks = itertools.count(1)

    def perf_counter(self) -> float:
        return float(next(self._ticks))


def test_busy_spans_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rl_jax.dispatch.time", Clock())
    flight = Flight()

    async def scenario(own: Dispatcher) -> None:
        await own.run(flight.program, 0)  # 1 to 2
        await own.launch(flight.program, 1)  # from 3
        await own.launch(flight.program, 2)  # from 4
        await own.drain()  # to 5 and 6: one span
        await own.run(flight.program, 3)  # 7 to 8

    with dispatcher() as own:
        asyncio.run(scenario(own))
        assert own.busy == [(1, 2), (3, 6), (7, 8)]


def test_a_donated_programs_span_ends_with_the_one_that_took_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rl_jax.dispatch.time", Clock())

    async def scenario(own: Dispatcher) -> None:
        x = await own.launch(double, jnp.ones(()))  # from 1
        await own.launch(double, x)  # from 2
        await own.drain()  # to 3: both are done

    with dispatcher() as own:
        asyncio.run(scenario(own))
        assert own.busy == [(1, 3)]


def test_busy_spans_ascend_and_do_not_touch() -> None:
    async def scenario(own: Dispatcher) -> None:
        for i in range(60):
            await (own.run if i % 3 else own.launch)(jnp.negative, jnp.float32(i))

    with dispatcher() as own:
        asyncio.run(scenario(own))
        assert 1 <= len(own.busy) <= 60
        assert all(span.start < span.end for span in own.busy)
        assert all(a.end < b.start for a, b in itertools.pairwise(own.busy))


def stand_in(mesh: Mesh) -> tuple[Callable, Array]:
    """A small program of six collectives over both axes, and its first state."""

    def local(x: Array) -> tuple[Array, Array]:
        for _ in range(2):
            x = jnp.tanh(jax.lax.psum(x, DATA) * 0.3)
            x = x + jax.lax.all_gather(jax.lax.pmean(x, TENSOR), TENSOR).mean(0)
        return x, x.sum()[None, None]

    cut = PartitionSpec(DATA, TENSOR)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=cut, out_specs=(cut, cut))
    state = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, cut))
    return jax.jit(mapped, donate_argnums=0).lower(state).compile(), state


def meshes() -> tuple[Mesh, Mesh]:
    return make_mesh(jax.devices(), 2, 2), make_mesh(jax.devices()[4:], 2, 2)


@pytest.mark.parametrize("chained", [True, False], ids=["chained", "independent"])
def test_two_sharded_programs_a_thousand_steps_each_at_full_speed(chained: bool) -> None:
    """Each on four of the eight devices, from two tasks, at the default depth."""

    async def steps(mesh: Mesh) -> None:
        with dispatcher() as own:
            program, state = stand_in(mesh)
            assert collectives(program).keys() == {"all-reduce", "all-gather"}
            if not chained:
                again = state
                original, program = program, lambda _: original(jnp.copy(again))
            for _ in range(1000):
                state, _ = await own.launch(program, state)
            await own.drain()
            assert np.isfinite(state).all()

    async def both() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*map(steps, meshes()))

    asyncio.run(both())


# --- again and again -----------------------------------------------------------------------------


def test_repeat_runs_on_while_it_is_told_to_and_accounts_for_each() -> None:
    """All on the dispatcher's thread, each waited for before it is looked at."""
    flight, spans = Flight(), list[tuple[str, float, float]]()

    async def main() -> list[Output]:
        numbers = itertools.count(1)

        def goes_on(output: Output) -> bool:
            assert output.number in flight.finished and flight.threads == {threading.get_ident()}
            return output.number < 4

        return await own.repeat(lambda: flight.program(next(numbers)), goes_on, label="step")

    own = Dispatcher("test", on_span=lambda *span: spans.append(span))
    try:
        assert [output.number for output in asyncio.run(main())] == [1, 2, 3, 4]
    finally:
        own.close()
    assert flight.most == 1 and flight.threads != {threading.get_ident()}
    assert [label for label, _, _ in spans] == ["step"] * 4
    assert all(a[2] <= b[1] for a, b in itertools.pairwise(spans))


def test_what_goes_wrong_in_a_repetition_is_raised_and_the_next_call_is_well() -> None:
    async def main(own: Dispatcher) -> None:
        given = iter((1, 0))
        with pytest.raises(ZeroDivisionError):
            await own.repeat(lambda: np.array(1 // next(given)), lambda _: True)
        assert await own.run(int, 3) == 3

    with dispatcher() as own:
        asyncio.run(main(own))
