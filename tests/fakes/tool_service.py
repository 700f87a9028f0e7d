"""A tool behind a socket, in a process of its own that can be killed and started again.

It answers "hello ..." with "w1" and never answers "hold".
"""

import asyncio
import subprocess
import sys

from rl_jax.tasks.base import TaskError

PROGRAM = """
import asyncio

async def serve(reader, writer):
    while line := await reader.readline():
        if line.startswith(b"hello"):
            writer.write(b"w1\\n")
            await writer.drain()

async def main():
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


class ToolService:
    """`revives`: a call that finds the process dead starts it again, or else fails."""

    def __init__(self, *, revives: bool = True) -> None:
        self.starts = self.holding = 0
        self._revives = revives
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0
        self._starting = asyncio.Lock()

    async def call(self, words: str) -> str:
        """One request on a connection of its own; TaskError where the service died."""
        async with self._starting:
            if not self.starts or (self._revives and self._process is None):
                await asyncio.to_thread(self._start)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError as error:
            raise TaskError(f"service gone ({type(error).__name__})") from error
        self.holding += words.startswith("hold")
        try:
            writer.write(f"{words}\n".encode())
            line = await reader.readline()
        except OSError as error:
            raise TaskError(f"service died ({type(error).__name__})") from error
        finally:
            writer.close()
        if not line:
            raise TaskError("service died (end of stream)")
        return line.decode().strip()

    def kill(self) -> None:
        """SIGKILL, until it is dead."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> None:
        self.starts += 1
        command = [sys.executable, "-S", "-c", PROGRAM]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._port = int(self._process.stdout.readline())
