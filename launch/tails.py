"""[H] Logs of roles as lines: the last ones, and those that come after."""

from collections.abc import Callable
from pathlib import Path

TAIL_BYTES = 1 << 18
"""No more of a log's end is read."""


def tell_new(logs: Path, read: dict[Path, int], tell: Callable[[str], None]) -> None:
    """Whole lines that follow what was read of each log: `read` has how many bytes, and grows."""
    for path in sorted(logs.glob("*.log")):
        with path.open("rb") as file:
            file.seek(read.get(path, 0))
            whole, newline, _ = file.read().rpartition(b"\n")
        if newline:
            read[path] = read.get(path, 0) + len(whole) + 1
            for line in whole.decode("utf-8", errors="replace").splitlines():
                tell(f"{writer(path)}: {line}")


def writer(log: Path) -> str:
    """The role that wrote a log: "trainer", or "trainer-1" of the second process of its world."""
    return log.stem.removesuffix("-0")


def end_of_lines(log: Path) -> int:
    """Bytes up to the end of the last whole line, as far back as is looked."""
    with log.open("rb") as file:
        size = log.stat().st_size
        file.seek(max(0, size - TAIL_BYTES))
        return size - len(file.read(TAIL_BYTES).rpartition(b"\n")[2])


def last_lines(log: Path, count: int, end: int | None = None) -> list[str]:
    """The last `count` lines that are not empty of the first `end` bytes, or of all."""
    end = log.stat().st_size if end is None else end
    start = max(0, end - TAIL_BYTES)
    with log.open("rb") as file:
        file.seek(start)
        text = file.read(end - start).decode("utf-8", errors="replace")
    return [line for line in text.splitlines() if line.strip()][-count:] if count else []
