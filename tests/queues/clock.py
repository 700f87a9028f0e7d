"""An event loop whose clock jumps to the next deadline when nothing else is left to do.

Unix sockets between tasks of one loop are fine: what was written can be read at once, so no jump
overtakes a message.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any


class _JumpingSelector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("deadlock: every task waits and no deadline is set")
            self.now += timeout
        return ready


class _JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run[T](main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs `main()` under a jumping clock: no test waits, and a hang is an error at once."""
    with asyncio.Runner(loop_factory=_JumpingLoop) as runner:
        return runner.run(main())


def now() -> float:
    return asyncio.get_running_loop().time()


async def settle() -> None:
    """Lets every task go on until it waits."""
    for _ in range(100):
        await asyncio.sleep(0)
