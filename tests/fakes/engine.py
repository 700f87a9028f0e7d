"""Runs an engine beside a test, with hooks between its steps; requests and logs in short."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from rl_jax.dispatch import Dispatcher
from rl_jax.gateway.protocol import Completion, Request
from rl_jax.sampler.engine import Engine, Weights
from rl_jax.sampler.programs import Programs
from rl_jax.trajectories.types import RolloutKey
from tests.fakes import tiny

TIMEOUT = 60.0


class Stepped(Dispatcher):
    """Awaits `after[n]` when program n, counted from 1, is done and before anybody sees it.

    Without `bursts` the engine's own loop goes round after every step.
    """

    def __init__(self, *, bursts: bool = True) -> None:
        super().__init__("sampler")
        self.count = 0
        self.visits = 0
        """Of the thread."""
        self.after: dict[int, Callable[[], Awaitable[object]]] = {}
        self._bursts = bursts

    async def run(self, program: Callable[..., Any], *args: Any, label: str = "") -> Any:
        self.visits += 1
        outputs = await super().run(program, *args, label=label)
        await self._hook()
        return outputs

    async def repeat(
        self, program: Callable[[], Any], goes_on: Callable[[Any], bool], *, label: str = ""
    ) -> list[Any]:
        if not self._bursts:
            return [await self.run(program, label=label)]
        self.visits += 1
        loop = asyncio.get_running_loop()

        def hooked() -> Any:
            outputs = program()
            asyncio.run_coroutine_threadsafe(self._hook(), loop).result(TIMEOUT)
            return outputs

        return await super().repeat(hooked, goes_on, label=label)

    async def _hook(self) -> None:
        self.count += 1
        if self.count in self.after:
            await self.after[self.count]()
            await asyncio.sleep(0)  # what it started reaches its first wait


def run[T](
    main: Callable[[Engine, Stepped], Awaitable[T]],
    *,
    programs: Programs | None = None,
    weights: Weights | None = None,
    on_push: str = "recompute",
    on_swap: Callable[[int, float], object] = lambda version, pause: None,
    bursts: bool = True,
) -> T:
    """The result of `main(engine, dispatcher)` while the engine's loop runs; no hang survives."""

    async def whole() -> T:
        engine = Engine(
            weights or tiny.weights(),
            programs or tiny.compiled().programs,
            dispatcher,
            on_push=on_push,
            on_swap=on_swap,
        )
        loop = asyncio.create_task(engine.run())
        try:
            async with asyncio.timeout(TIMEOUT):
                return await main(engine, dispatcher)
        finally:
            loop.cancel()
            await asyncio.wait([loop])

    dispatcher = Stepped(bursts=bursts)
    try:
        return asyncio.run(whole())
    finally:
        dispatcher.close()


def key(number: int) -> RolloutKey:
    return RolloutKey("t", number, number % 3)


def prompt(number: int, length: int) -> tuple[int, ...]:
    """Tokens that follow from the number; the vocabulary's last one is never among them."""
    random = np.random.default_rng(number)
    return tuple(random.integers(0, tiny.VOCAB - 1, length).tolist())


def request(
    tokens: Sequence[int],
    new: int = 8,
    *,
    temperature: float = 1.0,
    stop: Sequence[int] = (),
    training: bool = True,
) -> Request:
    return Request(tuple(tokens), new, frozenset(stop), temperature, training=training)


async def ask(engine: Engine, number: int, *requests: Request) -> list[Completion]:
    """A sequence of its own with these requests, one after the other."""
    sequence = await engine.open(key(number))
    try:
        return [await engine.generate(sequence, each) for each in requests]
    finally:
        await engine.close(sequence)
