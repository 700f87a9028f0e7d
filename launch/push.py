"""[H] From the trainer to the samplers of the same process: publish, reshard, swap."""

import asyncio

from launch.record import Record
from rl_jax.arrays import Tree
from rl_jax.dispatch import Dispatcher
from rl_jax.sampler.engine import Engine, Weights
from rl_jax.snapshots.publisher import Publisher, reshard


class Pusher:
    """Publishes the trainer's weights and hands them to the sampler, device to device.

    `shardings` are the sampler's. Whatever `attach` was told takes the weights from then on.
    """

    def __init__(
        self,
        publisher: Publisher,
        record: Record,
        trainer: Dispatcher,
        sampler: Dispatcher,
        shardings: Tree,
    ) -> None:
        self._publisher, self._record = publisher, record
        self._trainer, self._sampler, self._shardings = trainer, sampler, shardings
        self._engine: Engine | None = None
        self._background: asyncio.TaskGroup | None = None
        self._swaps: list[asyncio.Task[None]] = []

    def attach(self, engine: Engine, background: asyncio.TaskGroup) -> None:
        """Swaps wait in `background`, so a failing one ends the run."""
        self._engine, self._background = engine, background

    async def publish(self, params: Tree, step: int) -> tuple[Tree, Weights]:
        """Copies and publishes under the next version, 0 first: the copy, and the sampler's."""
        version = self._record.version + 1
        writing = await self._trainer.run(self._publisher.publish, params, version, step)
        published = (await writing).params
        self._record.version = version
        moved = await self._sampler.run(reshard, published, self._shardings)
        return published, Weights(version, moved)

    async def push(self, params: Tree, step: int) -> Tree:
        """The trainer's hook. The swap itself waits for the sampler, the trainer does not."""
        assert self._engine and self._background, "attached before the loop starts"
        published, weights = await self.publish(params, step)
        self._swaps.append(self._background.create_task(self._engine.swap(weights)))
        await asyncio.sleep(0)  # the swap is staged before anything sampled next
        return published

    async def applied(self) -> None:
        """Returns when the sampler has the newest version."""
        await asyncio.gather(*self._swaps)
