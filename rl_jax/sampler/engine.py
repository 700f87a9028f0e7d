"""[H] The sampler program: continuous batching over the pool, weights swapped between two steps."""

import asyncio
import itertools
from collections import deque
from typing import Any, NamedTuple

import jax
import numpy as np

from rl_jax import rng
from rl_jax.arrays import CHUNK, Tree
from rl_jax.dispatch import Dispatcher
from rl_jax.gateway.protocol import Completion, Finish, Request, RequestFailed
from rl_jax.sampler.page_table import PageTable
from rl_jax.sampler.programs import Programs, step_inputs
from rl_jax.sampler.sampling import Sampled
from rl_jax.sampler.scheduler import Plan, Running, Sequence, plan
from rl_jax.sampler.step import StepInputs
from rl_jax.trajectories.types import Origin, RolloutKey, Segment


class Weights(NamedTuple):
    """Parameters in the sampler's sharding and the version they are."""

    version: int
    params: Tree


class _Staged(NamedTuple):
    weights: Weights
    waiters: list[asyncio.Future[None]]


class Engine:
    """A `SamplerClient` over one mesh. `run` is its loop; everything else is called beside it.

    `on_push` says what a swap does to running requests: "recompute" swaps between two steps and
    computes their caches again, "drain" lets them finish first.
    """

    def __init__(
        self,
        weights: Weights,
        programs: Programs,
        dispatcher: Dispatcher,
        *,
        on_push: str = "recompute",
    ) -> None:
        self.weights = weights
        self.sampled_tokens = 0
        self.steps = 0
        self._programs, self._dispatcher = programs, dispatcher
        self._layout, self._shapes = programs.layout, programs.shapes
        self._drains = on_push == "drain"
        self._pool = programs.make_pool()
        self._pages = PageTable(programs.layout)
        self._sequences: dict[int, Sequence] = {}
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._done: dict[int, asyncio.Future[Completion]] = {}
        self._ids = itertools.count()
        self._staged: _Staged | None = None
        self._wake = asyncio.Event()
        self._error: BaseException | None = None
    @property
    def max_context(self) -> int:
        """Tokens a sequence can hold."""
        return self._layout.token_pages * CHUNK

    async def open(self, key: RolloutKey) -> int:
        """A new sequence in the data shard with most free pages; waits while there is none."""
        while True:
            self._check()
            shard = max(range(self._layout.data), key=self._pages.free)
            row = self._pages.open(shard)
            if row is not None:
                break
            self._waiting.append(asyncio.get_running_loop().create_future())
            await self._waiting[-1]
        number = next(self._ids)
        self._sequences[number] = Sequence(number, key, row)
        return number

    async def generate(self, sequence: int, request: Request) -> Completion:
        """One request of a sequence; at most one at a time."""
        self._check()
        own = self._sequences[sequence]
        if own.running:
            raise ValueError(f"sequence {own.key} has a request under way")
        own.tokens += request.new_tokens
        if not own.tokens:
            raise ValueError(f"sequence {own.key} is empty: nothing to sample after")
        if len(own.tokens) >= self.max_context:
            return Running(request, (0, 0)).completion(Finish.LENGTH)
        own.running = Running(request, rng.stream(own.key, own.requests))
        own.requests += 1
        done = self._done[sequence] = asyncio.get_running_loop().create_future()
        self._wake.set()
        try:
            return await done
        finally:
            own.running = None
            self._done.pop(sequence, None)

    def segments(self, sequence: int) -> tuple[Segment, ...]:
        return tuple(self._sequences[sequence].segments)

    async def close(self, sequence: int) -> None:
        own = self._sequences.pop(sequence, None)
        if own is None:
            return
        if own.poisoned and self._error is None:
            await self._clear_pages(own)
        self._pages.release(own.row)
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                break

    async def swap(self, weights: Weights) -> None:
        """Returns when `weights`, or newer ones, sample.

        Versions may be skipped (a newer one replaces one that is still staged), never applied out
        of order: a ValueError.
        """
        self._check()
        newest = self._staged.weights.version if self._staged else self.weights.version
        if weights.version <= newest:
            raise ValueError(f"version {weights.version} is not above {newest}")
        applied = asyncio.get_running_loop().create_future()
        waiters = [*self._staged.waiters, applied] if self._staged else [applied]
        self._staged = _Staged(weights, waiters)
        self._wake.set()
        await applied

    async def run(self) -> None:
        """Steps until cancelled. A fault of the program ends it and fails every waiter."""
        try:
            while True:
                await self._advance()
        except BaseException as error:
            self._fail(error)
            raise

    async def _advance(self) -> None:
        self._swap_if_staged()
        draining = bool(self._staged)
        step = plan(self._sequences.values(), self._shapes, draining=draining)
        if step is None:
            self._wake.clear()
            await self._wake.wait()
            return
        for sequence, count in zip(step.rows, step.counts, strict=True):
            if sequence and not self._pages.grow(sequence.row, sequence.cached + count):
                raise RuntimeError(f"no page left for {sequence.key}: the pool is smaller than planned")
        weights, inputs = self.weights, step_inputs(step, self._layout)
        self._pool, sampled = await self._dispatcher.run(
            self._execute, step.width, weights.params, self._pool, inputs
        )
        self.steps += 1
        self._absorb(step, sampled, weights.version)

    def _execute(
        self, width: int, params: Tree, pool: jax.Array, inputs: StepInputs
    ) -> tuple[jax.Array, Sampled]:
        pool, sampled = self._programs.steps[width](params, pool, inputs)
        return pool, jax.device_get(sampled)

    def _swap_if_staged(self) -> None:
        if self._staged is None or (self._drains and self._busy()):
            return
        self.weights = self._staged.weights
        for sequence in self._sequences.values():
            sequence.invalidate()
        for waiter in self._staged.waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._staged = None

    def _busy(self) -> bool:
        return any(s.running and s.running.started for s in self._sequences.values())

    def _absorb(self, step: Plan, sampled: Sampled, version: int) -> None:
        origin = Origin.DECODE if step.width == 1 else Origin.PREFILL
        for index, (sequence, count) in enumerate(zip(step.rows, step.counts, strict=True)):
            if sequence is None or sequence.number not in self._sequences:
                continue
            sequence.enter_cache(count, version, origin)
            if sequence.running is None:
                continue
            sequence.running.started = True
            if not sampled.finite[index]:
                sequence.poisoned = True
                self._finish(sequence, RequestFailed(f"logits not finite: {sequence.key}"))
            elif not sequence.uncached:
                self._take(sequence, sampled, index, version)

    def _take(self, sequence: Sequence, sampled: Sampled, index: int, version: int) -> None:
        running, token = sequence.running, int(sampled.tokens[index])
        assert running is not None
        sequence.tokens.append(token)
        running.tokens.append(token)
        running.logprobs.append(float(sampled.logprobs[index]))
        running.raw_logprobs.append(float(sampled.raw_logprobs[index]))
        running.versions.append(version)
        self.sampled_tokens += 1
        if token in running.request.stop_ids:
            self._finish(sequence, running.completion(Finish.STOP))
        elif (
            len(running.tokens) >= running.request.max_new_tokens
            or len(sequence.tokens) >= self.max_context
        ):
            self._finish(sequence, running.completion(Finish.LENGTH))

    def _finish(self, sequence: Sequence, result: Completion | Exception) -> None:
        sequence.running = None
        done = self._done.get(sequence.number)
        if done is None or done.done():
            return
        if isinstance(result, Exception):
            done.set_exception(result)
        else:
            done.set_result(result)

    async def _clear_pages(self, sequence: Sequence) -> None:
        pages = np.array(sequence.row.owned(), np.int32)
        padded = np.zeros(self._layout.pages_per_sequence, np.int32)
        padded[: len(pages)] = pages

        def clear() -> jax.Array:
            self._pool = self._programs.clear(self._pool, np.int32(sequence.row.shard), padded)
            return self._pool

        await self._dispatcher.run(clear)

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError("the sampler has stopped") from self._error

    def _fail(self, error: BaseException) -> None:
        self._error = error
        waiters: list[asyncio.Future[Any]] = [*self._done.values(), *self._waiting]
        if self._staged:
            waiters += self._staged.waiters
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(RuntimeError(f"the sampler has stopped: {error!r}"))
