"""[H] Live progress: a table that redraws itself on a terminal, plain lines everywhere else.

Both show the same numbers. A plain stream gets a line per update and few per phase, so that a log
stays readable; nothing here decides anything.
"""

import io
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import batched
from typing import Any, Protocol, TextIO, runtime_checkable

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rl_jax.metrics import names

Stream = TextIO | io.TextIOWrapper | io.StringIO
"""Either class is a `TextIO` to a type checker, but not where types are checked at run time."""
Clock = Callable[[], float]
EMA = 0.9
"""Decay per update of the running solve rate."""


@runtime_checkable
class Reporter(Protocol):
    """Where a run tells what it does. Called from one thread."""

    def phase(self, name: str, total: int | None = None, done: int = 0) -> None:
        """A new part of the run begins; `total` counts its steps where that is known, `done` of
        which an earlier part of the run has done."""
        ...

    def progress(self, done: int, **numbers: float) -> None:
        """`done` steps of the phase are behind us."""
        ...

    def update(self, metrics: Mapping[str, Any]) -> None:
        """One trainer update, by the names of `rl_jax.metrics.names`; counts as progress."""
        ...

    def note(self, text: str) -> None:
        """Something worth a line of its own."""
        ...

    def close(self) -> None:
        """Ends the display; further calls are errors."""
        ...


@dataclass(frozen=True)
class View:
    """All that is shown: replaced, never changed, since a display may be drawing it."""

    phase: str = ""
    total: int | None = None
    done: int = 0
    began: float = 0.0
    numbers: Mapping[str, Any] | None = None
    solve_rate: float | None = None
    """Exponential mean of the reward."""
    skipped: int = 0
    """Done before the phase began, by an earlier part of the run."""


def eta(view: View, now: float) -> float | None:
    """Seconds left in the phase at its mean pace so far; None where that cannot be told."""
    own = view.done - view.skipped
    if not view.total or not own:
        return None
    return (now - view.began) / own * (view.total - view.done)


def after_update(view: View, metrics: Mapping[str, Any]) -> View:
    """`view` with one update's metrics in it."""
    reward, mean = metrics.get(names.REWARD), view.solve_rate
    if reward is not None:
        mean = reward if mean is None else EMA * mean + (1 - EMA) * reward
    done = int(metrics.get(names.STEP, view.done + 1))
    return replace(view, done=done, numbers=metrics, solve_rate=mean)


def duration(seconds: float) -> str:
    """ "45s", "3m05s", "2h10m"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def fields(view: View, now: float) -> list[tuple[str, str]]:
    """(label, text) of what is known of the last update, most telling first."""
    numbers = view.numbers or {}
    shown = [
        ("version", "{:.0f}", (names.POLICY_VERSION,)),
        ("reward", "{:.2f}", (names.REWARD,)),
        ("lag", "{:.2f}/{:.0f}", (names.LAG_MEAN, names.LAG_MAX)),
        ("trained", "{:,.0f} tokens", (names.TRAINED_TOKENS,)),
        ("dropped", "{:,.0f}", (names.DROPPED,)),
        ("sampler", "{:,.0f} tok/s", (names.SAMPLER_TOKENS_PER_SECOND,)),
        ("trainer busy", "{:.0%}", (names.TRAINER_BUSY_SHARE,)),
        ("sampler busy", "{:.0%}", (names.SAMPLER_BUSY_SHARE,)),
        ("overlap", "{:.0%}", (names.OVERLAP_SHARE,)),
    ]  # fmt: skip
    told = [
        (label, form.format(*(numbers[n] for n in wanted)))
        for label, form, wanted in shown
        if all(numbers.get(n) is not None for n in wanted)
    ]
    if view.solve_rate is not None:
        told.insert(min(2, len(told)), ("mean", f"{view.solve_rate:.2f}"))
    left = eta(view, now)
    return told if left is None else [*told, ("eta", duration(left))]


class PlainReporter:
    """One line per update; a phase says when it begins and at each quarter."""

    def __init__(self, stream: Stream, clock: Clock = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._view = View()

    def phase(self, name: str, total: int | None = None, done: int = 0) -> None:
        mean = self._view.solve_rate
        self._view = View(name, total, done, self._clock(), solve_rate=mean, skipped=done)
        self._line(name if total is None else f"{name}: {total} steps")

    def progress(self, done: int, **numbers: float) -> None:
        before, self._view = self._view, replace(self._view, done=done)
        total = before.total
        if total and done * 4 // total > before.done * 4 // total:
            words = [f"{k} {_number(v)}" for k, v in numbers.items()]
            words.append(f"after {duration(self._clock() - before.began)}")
            self._line(f"{before.phase} {done}/{total}  {'  '.join(words)}")

    def update(self, metrics: Mapping[str, Any]) -> None:
        self._view = after_update(self._view, metrics)
        of = f"/{self._view.total}" if self._view.total else ""
        words = [f"{label} {text}" for label, text in fields(self._view, self._clock())]
        self._line(f"update {self._view.done}{of}  {'  '.join(words)}")

    def note(self, text: str) -> None:
        self._line(text)

    def close(self) -> None:
        self._stream.flush()

    def _line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


class LiveReporter:
    """A table that is redrawn in place four times a second; notes and ended phases scroll above."""

    def __init__(self, console: Console, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._view = View(began=clock())
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=4)
        self._live.start()

    def phase(self, name: str, total: int | None = None, done: int = 0) -> None:
        self._say_done()
        mean = self._view.solve_rate
        self._view = View(name, total, done, self._clock(), solve_rate=mean, skipped=done)

    def progress(self, done: int, **numbers: float) -> None:
        self._view = replace(self._view, done=done, numbers=numbers)

    def update(self, metrics: Mapping[str, Any]) -> None:
        self._view = after_update(self._view, metrics)

    def note(self, text: str) -> None:
        self._live.console.print(Text(text))

    def close(self) -> None:
        self._say_done()
        self._view = View()
        self._live.stop()

    def _say_done(self) -> None:
        if self._view.phase:
            took = duration(self._clock() - self._view.began)
            self._live.console.print(Text.assemble((self._view.phase, "bold"), f"  {took}"))

    def _render(self) -> Group:
        view, now = self._view, self._clock()
        if not view.phase:
            return Group()
        known = fields(view, now)
        if view.numbers and names.REWARD not in view.numbers:
            known = [(k, _number(v)) for k, v in view.numbers.items()] + known
        table = Table.grid(padding=(0, 2))
        for row in batched(known, 2):
            cells = [(Text(label, style="dim"), Text(text, style="bold")) for label, text in row]
            table.add_row(*(cell for pair in cells for cell in pair))
        count = f"{view.done}/{view.total}" if view.total else duration(now - view.began)
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=view.total, completed=view.done, width=40) if view.total else ""
        head.add_row(Text(view.phase, style="bold cyan"), bar, Text(count))
        return Group(head, table)


def reporter(stream: Stream, clock: Clock = time.monotonic) -> Reporter:
    """The display that suits `stream`."""
    if stream.isatty():
        return LiveReporter(Console(file=stream), clock)
    return PlainReporter(stream, clock)
