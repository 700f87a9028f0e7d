"""[H] Work of native code that nobody can interrupt, in a thread that the process does not wait
for when it ends."""

import asyncio
import threading
from collections.abc import Callable


async def in_background[T](work: Callable[[], T]) -> T:
    """What `work` returns or raises. Cancelled, its thread goes on unheard: for compiling only."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(settle: Callable[..., None], value: object) -> None:
        if not done.done():
            settle(value)

    def run() -> None:
        try:
            settle, value = done.set_result, work()
        except BaseException as error:
            settle, value = done.set_exception, error
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell, settle, value)

    threading.Thread(target=run, name="background", daemon=True).start()
    return await done
