"""[H] The sampler's part of a run: an engine on its mesh, handed weights between two steps."""

import asyncio

import jax
from jax.sharding import Mesh

from launch import build
from launch.programs.base import Parts
from launch.record import open_trace
from rl_jax.arrays import Tree
from rl_jax.dispatch import Dispatcher
from rl_jax.gateway.protocol import Completion, Request
from rl_jax.metrics.trace import SWAP
from rl_jax.replay import events
from rl_jax.replay.log import open_log
from rl_jax.sampler.engine import Engine, Weights
from rl_jax.sampler.programs import Programs
from rl_jax.snapshots.publisher import reshard
from rl_jax.trajectories.types import RolloutKey, Segment


class SamplerRecord:
    """Journal and trace of a sampler."""

    def __init__(self, parts: Parts, program: str) -> None:
        self.log = open_log(parts.run_dir, program, parts.clock)
        self.trace = open_trace(parts, program)
        self._time = parts.time

    def on_swap(self, version: int, pause_s: float) -> None:
        self.log.append(events.VersionApplied(version, pause_s))
        now = self._time.now()
        self.trace.span("swaps", SWAP, now - pause_s, now, version=version)
        self.trace.flush()

    async def close(self) -> None:
        self.trace.close()
        await self.log.close()


def compile_sampler(parts: Parts, mesh: Mesh) -> Programs:
    """Every shape of the sampler, on its mesh."""
    return build.compile_sampler(parts.config, parts.model, mesh)


class LocalSampler:
    """A `SamplerClient`: the engine of this process, made by the first version delivered to it."""

    def __init__(
        self,
        parts: Parts,
        programs: Programs,
        dispatcher: Dispatcher,
        shardings: Tree,
        record: SamplerRecord,
        background: asyncio.TaskGroup,
    ) -> None:
        self._parts, self._programs, self._dispatcher = parts, programs, dispatcher
        self._shardings, self._record, self._background = shardings, record, background
        self._engine: Engine | None = None
        self._running: asyncio.Task[None] | None = None
        self._swaps: set[asyncio.Task[None]] = set()
        self._moved = asyncio.Event()
        """Set, and replaced, whenever a newer version samples."""

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "a version was delivered"
        return self._engine

    async def deliver(self, version: int, params: Tree) -> None:
        """Moves published weights onto the sampler's mesh; returns when they are staged there."""
        # Transfers without a collective, so beside the steps and not between them.
        moved = await asyncio.to_thread(_moved, params, self._shardings)
        await self.take(Weights(version, moved))

    async def take(self, weights: Weights) -> None:
        """The same for weights that are on the sampler's mesh."""
        if self._engine is None:
            self._engine = Engine(
                weights,
                self._programs,
                self._dispatcher,
                on_push=self._parts.config.sampler.on_push,
                on_swap=self._record.on_swap,
            )
            self._running = self._background.create_task(self._engine.run())
            self._wake()
        else:
            swap = self._background.create_task(self._swap(weights))
            self._swaps.add(swap)
            swap.add_done_callback(self._swaps.discard)
            await asyncio.sleep(0)  # staged before anything that is sampled next

    async def _swap(self, weights: Weights) -> None:
        await self.engine.swap(weights)
        self._wake()

    def _wake(self) -> None:
        self._moved.set()
        self._moved = asyncio.Event()

    async def open(self, key: RolloutKey) -> int:
        return await self.engine.open(key)

    async def generate(self, sequence: int, request: Request) -> Completion:
        return await self.engine.generate(sequence, request)

    def segments(self, sequence: int) -> tuple[Segment, ...]:
        return self.engine.segments(sequence)

    async def close(self, sequence: int) -> None:
        await self.engine.close(sequence)

    async def applied(self, version: int) -> None:
        """Returns when `version`, or a newer one, samples."""
        while self._engine is None or self._engine.weights.version < version:
            await self._moved.wait()

    def end(self) -> None:
        """Nothing is sampled any more; a version that was still staged never is."""
        for task in (*self._swaps, self._running):
            if task is not None:
                task.cancel()


def _moved(params: Tree, shardings: Tree) -> Tree:
    return jax.block_until_ready(reshard(params, shardings))
