"""[H] The sampler program: continuous batching over the pool, weights swapped between two steps."""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from rl_jax import rng
from rl_jax.arrays import CHUNK, Tree
from rl_jax.dispatch import Dispatcher
from rl_jax.gateway.protocol import Completion, Finish, Request, RequestFailed
from rl_jax.sampler import burst
from rl_jax.sampler.burst import Burst
from rl_jax.sampler.layout import Pages
from rl_jax.sampler.page_table import PageTable
from rl_jax.sampler.programs import Programs, sampled_of, step_inputs
from rl_jax.sampler.sampling import Sampled
from rl_jax.sampler.scheduler import Plan, Running, Sequence, plan
from rl_jax.sampler.step import StepInputs
from rl_jax.sampler.words import pack
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
    computes their caches again, "keep" goes on with the caches of older weights, "drain" lets
    requests finish first. `on_swap` hears, after the first step under new weights, of their version
    and of the pause before it: the seconds since the last step under older ones ended, or since
    there was something to do again.
    """

    def __init__(
        self,
        weights: Weights,
        programs: Programs,
        dispatcher: Dispatcher,
        *,
        on_push: str = "recompute",
        on_swap: Callable[[int, float], object] = lambda version, pause: None,
    ) -> None:
        self.weights = weights
        self.sampled_tokens = 0
        self.stale_cache_tokens = 0
        """Sampled from a cache with older versions than their own in it."""
        self.steps = 0
        self._on_swap = on_swap
        self._stepped, self._ready_since = weights.version, time.perf_counter()
        self._programs, self._dispatcher = programs, dispatcher
        self._layout, self._shapes = programs.layout, programs.shapes
        self._on_push = on_push
        self._pool = programs.make_pool()
        self._pages = PageTable(programs.layout)
        self._sequences: dict[int, Sequence] = {}
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._done: dict[int, asyncio.Future[Completion]] = {}
        self._ids = itertools.count()
        self._staged: _Staged | None = None
        self._wake = asyncio.Event()
        self._changed = False
        """Whether the next step may be another one than the last plan would go on with; read by the
        dispatcher's thread."""
        self._error: BaseException | None = None

    @property
    def max_context(self) -> int:
        """Tokens a sequence can hold."""
        return self._layout.token_pages * CHUNK

    async def open(self, key: RolloutKey) -> int:
        """A new sequence in the data shard with most room; waits while there is none."""
        self._check()
        while (row := self._pages.open(self._roomiest_shard())) is None:
            self._waiting.append(asyncio.get_running_loop().create_future())
            await self._waiting[-1]
        number = next(self._ids)
        self._sequences[number] = Sequence(number, key, row)
        return number

    async def generate(self, sequence: int, request: Request) -> Completion:
        """One request of a sequence; at most one at a time, none after one that failed or was
        cancelled. Where the context has no room, nothing is added or sampled."""
        self._check()
        own = self._sequences[sequence]
        if own.running or own.ended:
            state = "under way" if own.running else "that failed or was cancelled"
            raise ValueError(f"sequence {own.key} has a request {state}")
        length = len(own.tokens) + len(request.new_tokens)
        if not length:
            raise ValueError(f"sequence {own.key} is empty: nothing to sample after")
        running = Running(request, rng.stream(own.key, own.requests))
        if length >= self.max_context:
            return running.completion(Finish.LENGTH)
        own.tokens += request.new_tokens
        own.running = running
        own.requests += 1
        done = self._done[sequence] = asyncio.get_running_loop().create_future()
        self._change()
        try:
            return await done
        except BaseException:
            own.ended = self._changed = True
            raise
        finally:
            own.running = None
            self._done.pop(sequence, None)

    def segments(self, sequence: int) -> tuple[Segment, ...]:
        return tuple(self._sequences[sequence].segments)

    async def close(self, sequence: int) -> None:
        own = self._sequences.pop(sequence, None)
        if own is None:
            return
        self._changed = True
        self._pages.release(own.row)
        # All of them: one that is cancelled as it wakes must not keep the others waiting.
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._waiting.clear()

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
        self._change()
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
        self._changed = False
        self._swap_if_staged()
        draining = self._staged is not None
        step = plan(self._sequences.values(), self._shapes, draining=draining)
        if step is None:
            self._wake.clear()
            await self._wake.wait()
            self._ready_since = time.perf_counter()
            return
        most = burst.longest(step, self.max_context)
        for sequence, count in zip(step.rows, step.counts, strict=True):
            if sequence:
                self._pages.grow(sequence.row, sequence.cached + count + most - 1)
        weights, inputs = self.weights, step_inputs(step, self._layout)
        began = time.perf_counter()
        steps = Burst(step, inputs, most, time.perf_counter, began + burst.SECONDS)
        taken = await self._dispatcher.repeat(
            lambda: self._execute(step.width, weights.params, steps.inputs),
            lambda outputs: steps.goes_on(outputs[1]) and not self._changed,
            label="decode" if step.width == 1 else f"prefill {step.width}",
        )
        self._time(weights.version, began)
        for _, sampled in taken:
            self.steps += 1
            self._absorb(step, sampled, weights.version)
        # Where a row is not finite no step follows.
        for index, sequence in enumerate(step.rows):
            if sequence and not taken[-1][1].finite[index]:
                await self._dispatcher.run(self._clear, sequence.row.shard, inputs.pages, index)

    def _change(self) -> None:
        self._changed = True
        self._wake.set()

    def _time(self, version: int, began: float) -> None:
        pause, self._ready_since = began - self._ready_since, time.perf_counter()
        if version != self._stepped:
            self._stepped = version
            self._on_swap(version, pause)

    # Both run on the dispatcher's thread: whatever comes next there finds the pool they leave.

    def _execute(self, width: int, params: Tree, inputs: StepInputs) -> tuple[jax.Array, Sampled]:
        self._pool, words = self._programs.steps[width](params, self._pool, pack(inputs))
        return self._pool, sampled_of(words)

    def _clear(self, shard: int, pages: Pages, index: int) -> jax.Array:
        """Zeroes the pages that row `index` had in a step; its sequence may be closed by now."""
        own = np.concatenate([np.ravel(pages.tokens[index]), np.ravel(pages.states[index])])
        self._pool = self._programs.clear(self._pool, np.int32(shard), own)
        return self._pool

    def _swap_if_staged(self) -> None:
        if self._staged is None or (self._on_push == "drain" and self._busy()):
            return
        self.weights = self._staged.weights
        if self._on_push != "keep":
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
            if not sequence.uncached:
                continue  # given up while its row went on
            sequence.enter_cache(count, version, origin)
            if sequence.running is None:
                continue
            sequence.running.started = True
            if sampled.choices is not None:
                own = np.asarray(sampled.choices[index, :count])
                sequence.record(sequence.cached - count, own)
            if not sampled.finite[index]:
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
        self.stale_cache_tokens += sequence.oldest_cached < version
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

    def _roomiest_shard(self) -> int:
        return max(range(self._layout.data), key=self._pages.room)

    def _check(self) -> None:
        if self._error is not None:
            raise _stopped(self._error)

    def _fail(self, error: BaseException) -> None:
        self._error = error
        waiters: list[asyncio.Future[Any]] = [*self._done.values(), *self._waiting]
        if self._staged:
            waiters += self._staged.waiters
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(_stopped(error))


def _stopped(error: BaseException) -> RuntimeError:
    stopped = RuntimeError(f"the sampler has stopped: {error!r}")
    stopped.__cause__ = error
    return stopped
