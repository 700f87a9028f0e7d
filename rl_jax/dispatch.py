"""[H] One `Dispatcher` per mesh: the only place from which a mesh's programs are launched.

Sharded programs that pile up in one process can deadlock in the rendezvous of their collectives, so
a mesh has a bounded number of executions in flight, launched in order by one thread. The event loop
never blocks: it awaits.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import jax

T = TypeVar("T")


class Interval(NamedTuple):
    """A span of `time.perf_counter` seconds in which the mesh was executing."""

    start: float
    end: float


OnSpan = Callable[[str, float, float], object]
"""(label, start, end) of every execution, on the dispatcher's thread."""


class Dispatcher:
    """Launches programs of one mesh in order, at most `depth` in flight.

    The CPU backend takes 32 executions per device. A launch beyond that blocks a thread of the pool
    that all devices share; two meshes of four devices then deadlock (depth 32 runs, 33 does not).
    Two in flight already hide the launch behind the execution.
    """

    def __init__(self, name: str, depth: int = 2, on_span: OnSpan | None = None) -> None:
        if depth < 1:
            raise ValueError(f"depth must be at least 1, got {depth}")
        self.name = name
        self._on_span = on_span
        self.busy: list[Interval] = []
        """Spans of execution, ascending, merged where they touch. A program ends when it was waited
        for: exactly so after `run`, after `launch` when its place is needed or at a drain."""
        self._depth = depth
        self._in_flight: deque[tuple[str, float, Any]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"dispatch-{name}")

    async def launch(self, program: Callable[..., T], *args: Any, label: str = "") -> T:
        """Launches `program(*args)`; returns its outputs, perhaps not yet computed.

        `label` is what `on_span` hears of it; the program's name where it is empty.

        What goes wrong at the launch is raised here. What goes wrong while it executes is raised by
        the next call that waits for it, and by reading the outputs; the calls after that are well.
        """
        return await self._submit(self._launch, program, args, label)

    async def run(self, program: Callable[..., T], *args: Any, label: str = "") -> T:
        """Launches `program(*args)` and returns its outputs when everything in flight is done."""
        return await self._submit(self._run, program, args, label)

    async def repeat(
        self, program: Callable[[], T], goes_on: Callable[[T], bool], *, label: str = ""
    ) -> list[T]:
        """As `run`, again and again on the thread while `goes_on` of what came last; all that came.

        For programs that take no longer than the way to the thread and back. What goes wrong in one
        is raised, and what came before it is lost.
        """
        return await self._submit(self._repeat, program, goes_on, label)

    async def drain(self) -> None:
        """Returns when nothing is in flight."""
        await self._submit(self._drain)

    def close(self) -> None:
        """Waits for what is in flight and ends the thread."""
        try:
            self._thread.submit(self._drain).result()
        finally:
            self._thread.shutdown()

    async def _submit(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _launch(self, program: Callable[..., T], args: tuple[Any, ...], label: str) -> T:
        while len(self._in_flight) >= self._depth:
            self._finish_oldest()
        start = time.perf_counter()
        outputs = program(*args)
        label = label or getattr(program, "__name__", type(program).__name__).strip("_")
        self._in_flight.append((label, start, outputs))
        return outputs

    def _run(self, program: Callable[..., T], args: tuple[Any, ...], label: str) -> T:
        outputs = self._launch(program, args, label)
        self._drain()
        return outputs

    def _repeat(
        self, program: Callable[[], T], goes_on: Callable[[T], bool], label: str
    ) -> list[T]:
        taken = [self._run(program, (), label)]
        while goes_on(taken[-1]):
            taken.append(self._run(program, (), label))
        return taken

    def _drain(self) -> None:
        while self._in_flight:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        label, start, outputs = self._in_flight.popleft()
        while self._in_flight and _donated(outputs):
            # Nothing is left to wait for but the program that took it all.
            _, _, outputs = self._in_flight.popleft()
        try:
            jax.block_until_ready([leaf for leaf in jax.tree.leaves(outputs) if not _gone(leaf)])
        finally:
            self._was_busy(label, start, time.perf_counter())

    def _was_busy(self, label: str, start: float, end: float) -> None:
        if self._on_span is not None:
            self._on_span(label, start, end)
        if self.busy and start <= self.busy[-1].end:
            start = self.busy.pop().start
        self.busy.append(Interval(start, end))


def _gone(leaf: Any) -> bool:
    """Whether a later program took this output as donated."""
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def _donated(outputs: Any) -> bool:
    leaves = jax.tree.leaves(outputs)
    return bool(leaves) and all(map(_gone, leaves))
