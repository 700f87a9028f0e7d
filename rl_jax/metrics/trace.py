"""[H] Who did what when, as a trace that Perfetto and chrome://tracing open.

Chrome's JSON array format, one event a line: it is read although the closing bracket is missing, so
a file is appended to while the run goes on and stays readable however the run ends. A program is a
process of the trace and a device, or whatever else works on its own, a track of it. Times are
seconds since the run began.
"""

import json
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

FOLDER = "traces"
"""In a run's directory, with each program's trace; `trace.json` is all of them."""
WAIT, STEP, PUSH, SWAP = "wait", "step", "push", "swap"
"""Names of spans that a report knows: the trainer waits for a batch, runs an update, pushes a
version (argument `version`); a sampler swaps to one (argument `version`)."""


class Span(NamedTuple):
    """`process` did `name` on `track` from `start` to `end`, in seconds since the run began."""

    process: str
    track: str
    name: str
    start: float
    end: float
    args: Mapping[str, Any]


class TraceWriter:
    """Appends the events of one program to `path`; may be called from any thread.

    On disk after every `buffered` events and at `flush`. An event that a crash cut short is removed
    first.
    """

    def __init__(self, path: Path, process: str, *, buffered: int = 256) -> None:
        self._pid, self._buffered = _id(process), buffered
        self._lock = threading.Lock()
        self._tracks: set[str] = set()
        self._lines: list[str] = []
        fresh = _drop_cut_line(path) == 0
        self._file = path.open("a", encoding="utf-8")
        if fresh:
            self._file.write("[\n")
        self._add({"ph": "M", "name": "process_name", "args": {"name": process}})
        self.flush()

    def span(self, track: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """`track` did `name` from `start_s` to `end_s`; `args` are shown when it is selected."""
        self._event(
            track, {"ph": "X", "name": name, "ts": _us(start_s), "dur": _us(end_s - start_s)}, args
        )

    def instant(self, track: str, name: str, at_s: float, **args: Any) -> None:
        """`name` happened on `track`."""
        self._event(track, {"ph": "i", "s": "t", "name": name, "ts": _us(at_s)}, args)

    def counter(self, track: str, name: str, at_s: float, value: float) -> None:
        """From `at_s` on, `name` is `value`."""
        self._event(track, {"ph": "C", "name": name, "ts": _us(at_s)}, {name: value})

    def flush(self) -> None:
        """What was told so far is in the file."""
        with self._lock:
            self._write()

    def close(self) -> None:
        self.flush()
        self._file.close()

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _event(self, track: str, event: dict[str, Any], args: Mapping[str, Any]) -> None:
        with self._lock:
            if track not in self._tracks:
                self._tracks.add(track)
                self._add({"ph": "M", "name": "thread_name", "args": {"name": track}}, track)
            self._add(event | ({"args": args} if args else {}), track)
            if len(self._lines) >= self._buffered:
                self._write()

    def _add(self, event: Mapping[str, Any], track: str | None = None) -> None:
        tid = {} if track is None else {"tid": _id(track)}
        self._lines.append(json.dumps({"pid": self._pid, **tid, **event}, allow_nan=False) + ",\n")

    def _write(self) -> None:
        self._file.write("".join(self._lines))
        self._file.flush()
        self._lines.clear()


def read_spans(path: Path) -> list[Span]:
    """The spans of a trace, whole or cut, in order of their start."""
    processes: dict[int, str] = {}
    tracks: dict[tuple[int, int], str] = {}
    told: list[Mapping[str, Any]] = []
    for event in map(json.loads, _events(path)):
        match event["ph"], event["name"]:
            case "M", "process_name":
                processes[event["pid"]] = event["args"]["name"]
            case "M", "thread_name":
                tracks[event["pid"], event["tid"]] = event["args"]["name"]
            case "X", _:
                told.append(event)
    spans = [
        Span(
            processes[e["pid"]], tracks[e["pid"], e["tid"]], e["name"],
            e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6, e.get("args", {}),
        )
        for e in told
    ]  # fmt: skip
    return sorted(spans, key=lambda span: (span.start, span.end))


def merge(paths: Sequence[Path], out: Path) -> None:
    """The events of all `paths` as one trace, which is a whole JSON array."""
    with out.open("w", encoding="utf-8") as file:
        lead = "[\n"
        for path in paths:
            for line in _events(path):
                file.write(lead + line)
                lead = ",\n"
        file.write("\n]\n" if lead != "[\n" else "[]\n")


def _events(path: Path) -> Iterator[str]:
    """The JSON text of each whole event."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            event = line.rstrip("\n").removesuffix(",")
            if line.endswith("\n") and event.startswith("{"):
                yield event


def _id(name: str) -> int:
    """The format wants numbers: the same for a name in every program and every run."""
    return zlib.crc32(name.encode()) >> 1


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _drop_cut_line(path: Path) -> int:
    """Cuts `path` after its last whole line; the bytes that are left."""
    if not path.exists():
        return 0
    whole = path.read_bytes().rfind(b"\n") + 1
    with path.open("r+b") as file:
        file.truncate(whole)
    return whole
