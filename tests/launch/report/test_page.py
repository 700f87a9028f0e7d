"""[H] The page of a run that is on disk: what it says, in any state, and that text stays text."""

import asyncio
import re
import shutil
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from launch.report import data, numbers
from launch.report.page import facts, show, versions, write_report
from rl_jax.config.base import UserError
from rl_jax.metrics.trace import FOLDER, merge
from rl_jax.replay.events import RunEnded
from rl_jax.replay.fates import Fate, Kind, Recorded
from rl_jax.replay.log import Clock, open_log
from tests.fakes.record import UPDATES, MadeRun, decode, label, made_run, write_run
from tests.launch.report.test_trajectory import masked


@pytest.fixture(scope="module")
def made() -> MadeRun:
    return made_run()


@pytest.fixture(scope="module")
def run_dir(made: MadeRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "made", made)


class Page(HTMLParser):
    """The tags, the text of each kind of tag, and the addresses of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.addresses: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self._open.append(tag)
        links = ("src", "href", "xlink:href", "action", "data")
        self.addresses += [value or "" for name, value in attrs if name in links]

    def handle_endtag(self, tag: str) -> None:
        while self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append((self._open[-1], data.strip()))

    def words(self, tag: str) -> list[str]:
        return [text for at, text in self.texts if at == tag]


def test_loaded_as_it_was_written(run_dir: Path, made: MadeRun) -> None:
    run = data.load(run_dir, label)
    assert (run.name, run.state, run.tau) == ("made", "finished", 2)
    assert run.events == tuple(made.events) and len(run.lines) == UPDATES
    expected = [
        numbers.row(r, label(r.trajectory)) for r in made.recorded if r.trajectory.copy_of is None
    ]
    assert sorted(map(str, run.rows)) == sorted(map(str, expected))
    assert len(run.spans) == len(made.spans)
    assert [s.start for s in run.spans] == sorted(s.start for s in run.spans)


def test_fates_come_from_the_journal_where_the_log_has_none(
    run_dir: Path, made: MadeRun, tmp_path: Path
) -> None:
    cut = write_run(tmp_path / "cut", made, settle=False)
    assert len(list((cut / "trajectories").glob("trainer-*.wal"))) == 4, "nothing could be sealed"
    assert sorted(map(str, data.load(cut).rows)) == sorted(map(str, data.load(run_dir).rows))


def test_a_merged_trace_takes_the_place_of_its_parts(run_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(run_dir, tmp_path / "made")
    parts = sorted((tmp_path / "made" / FOLDER).glob("*.json"))
    merge(parts, tmp_path / "made" / "trace.json")
    assert data.spans(tmp_path / "made") == data.spans(run_dir)


def test_page_of_a_finished_run(run_dir: Path, made: MadeRun) -> None:
    path = write_report(run_dir, decode, label=label)
    assert path == run_dir / "report.html" and not list(run_dir.glob("*.part"))
    text = path.read_text()
    assert len(text) < 3_000_000
    page = Page(text)
    assert page.tags["svg"] == 15
    assert not {"script", "link", "img", "iframe", "object"} & page.tags.keys()
    assert all(address.startswith("#") for address in page.addresses)
    assert not re.search(r"url\((?!#)", text)
    assert {"made", "Learning", "Versions", "Configuration"} <= {t for _, t in page.texts}

    rates = [h.rate for h in numbers.held_out(made.events)]
    values = page.words("dd")
    assert f"{rates[0]:.2f} → {rates[1]:.2f}" in values and str(UPDATES) in values
    assert f"{made.lines[-1]['trained_tokens']:,}" in values
    whys = page.words("strong")
    assert "dropped at the queue" in whys and "held out, solved" in whys
    assert len(whys) == len(set(whys)) >= 12
    assert any('recipe = "dis"' in block for block in page.words("pre"))


def test_versions_table_has_times_from_the_trace(run_dir: Path) -> None:
    rows = versions(data.load(run_dir))
    assert [v.version for v in rows] == list(range(11)) and rows[3].update == 12
    assert all(v.applied_after == pytest.approx(0.34) and v.pause == 0.04 for v in rows)
    assert rows[0].published == pytest.approx(60.0)


def test_a_run_that_was_killed_is_read_up_to_the_cut(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "cut", made_run(ended=None))
    for path in (run_dir / "metrics.jsonl", run_dir / FOLDER / "trainer.json"):
        path.write_bytes(path.read_bytes()[:-20])
    run = data.load(run_dir)
    assert run.state == "killed" and len(run.lines) == UPDATES - 1
    assert Counter(r.fate.kind for r in run.rows)[Kind.OPEN] == 8
    assert write_report(run_dir, decode).stat().st_size > 100_000


def test_a_run_that_goes_on_is_running(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path / "on", made_run(ended=None))

    async def look() -> list[str]:
        log = open_log(run_dir, "trainer", Clock())
        states = [data.load(run_dir).state]
        await log.append(RunEnded("stopped"))
        await log.close()
        return [*states, data.load(run_dir).state]

    assert asyncio.run(look()) == ["running", "stopped"]


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('name = "new"\n')
    text = write_report(tmp_path, decode).read_text()
    assert "None is recorded yet" in text and "<svg" not in text


def test_no_run_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is no run: it has no config\.toml"):
        write_report(tmp_path, decode)


def test_an_agents_text_is_escaped_wherever_it_stands(tmp_path: Path) -> None:
    nasty = '</span><script>alert("1")</script><img src=x onerror=y>&'
    made = made_run(ended=nasty)
    made.added = [
        (tuple(replace(t, reason=nasty) for t in ts), fate._replace(reason=nasty))
        for ts, fate in made.added
    ]
    run_dir = write_run(tmp_path / "made", made)
    text = write_report(run_dir, lambda ids: nasty, label=lambda t: nasty).read_text()
    page = Page(text)
    assert not {"script", "img"} & page.tags.keys() and page.addresses
    assert all(address.startswith("#") for address in page.addresses)
    assert nasty in page.words("span"), "it is shown as what it is"
    assert nasty in page.words("td")
    assert any(nasty in text for text in page.words("summary")), "reasons too"


def test_a_long_trajectory_is_shortened() -> None:
    long = masked("0" + "1" * 5000)
    shown = show("why", Recorded(long, Fate(Kind.TRAINED, 1), "trainer"), decode=str)
    assert sum(len(turn.tokens) for turn in shown.turns) == 600
    assert shown.facts.startswith("5,001 tokens, 5,000 sampled, 1 turns")


def test_facts_of_nothing() -> None:
    empty = data.RunData("empty", "killed", "", {}, (), (), (), ())
    assert [(f.name, f.value) for f in facts(empty)] == [("updates", "0"), ("versions pushed", "0")]
