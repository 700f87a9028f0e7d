"""[H] Runs as text, read back from what a run leaves."""

import io
import json
import os
from pathlib import Path

import pytest

from launch.listing import list_runs, print_events, show
from rl_jax.config.base import UserError
from tests.fakes.record import MadeRun, decode, made_run, write_run


@pytest.fixture(scope="module")
def made() -> MadeRun:
    return made_run()


@pytest.fixture(scope="module")
def runs(made: MadeRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    write_run(runs / "second", made)
    (runs / "first").mkdir()
    (runs / "first" / "config.toml").touch()
    (runs / "old" / "journal").mkdir(parents=True)
    (runs / "old" / "config.toml").touch()
    (runs / "notes").mkdir()
    for day, name in enumerate(("first", "old", "second"), start=1):
        os.utime(runs / name / "config.toml", (0, day * 86400.0))
    return runs


def told(print_to, *args: object) -> str:
    out = io.StringIO()
    print_to(*args, out)
    return out.getvalue()


def test_table_of_runs(runs: Path) -> None:
    head, *rows = [line.split("  ") for line in told(list_runs, runs).splitlines()]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert [cell.strip() for cell in head if cell.strip()] == [
        "name", "state", "updates", "version", "solve rate", "started",
    ]  # fmt: skip
    assert [row[:5] for row in cells] == [
        ["first", "killed", "0", "–", "–"],
        ["old", "unreadable", "0", "–", "–"],
        ["second", "finished", "40", "10", cells[2][4]],
    ]
    assert all(row[5].startswith("1970-01-0") for row in cells)
    before, after = map(float, cells[2][4].split(" -> "))
    assert 0.5 < before < after <= 1


def test_no_runs_and_no_directory(tmp_path: Path) -> None:
    assert told(list_runs, tmp_path) == f"no run in {tmp_path}\n"
    with pytest.raises(UserError, match="no such directory"):
        told(list_runs, tmp_path / "gone")


def test_events_are_the_journal_in_order(runs: Path, made: MadeRun) -> None:
    lines = [json.loads(line) for line in told(print_events, runs / "second").splitlines()]
    assert [line["kind"] for line in lines] == [event.kind for event in made.events]
    assert [line["program"] for line in lines] == [program for program, _ in made.told]
    assert [line["clock"] for line in lines] == list(range(1, len(lines) + 1))
    assert lines[0] | {"clock": 0} == {
        "clock": 0, "program": "trainer", "sequence": 0, "kind": "run_started", "seed": 7,
        "fingerprint": "cpu, 2 threads", "update": 0,
    }  # fmt: skip
    assert lines[1]["digest"] == "00c0ffee" * 8
    taken = next(line for line in lines if line["kind"] == "batch_taken")
    assert taken["groups"][0] == ["lookup", made.puts[0][0].prompt]
    rates = [line["rates"] for line in lines if line["kind"] == "evaluated"]
    assert all(set(r) == {"all", *(f"hops={n}" for n in range(1, 7))} for r in rates)
    with pytest.raises(UserError, match="is no run"):
        told(print_events, runs / "notes")


def test_a_trajectory_turn_by_turn(runs: Path, made: MadeRun) -> None:
    group, fate = made.puts[0]
    t = group.members[2]
    text = told(show, runs / "second", f"lookup/{group.prompt}/2", decode)
    head, size, cache, *rest = text.splitlines()
    gap, prompt, *_ = rest[len(t.segments) - 1 :]
    assert head.startswith(f"lookup/{group.prompt}/2/0  completed, reward {t.reward:g}  ")
    assert head.endswith(f"trained in update {fate.step}")
    assert size == f"{len(t.tokens)} tokens, {t.turns} turns, temperature 0.7"
    assert cache.startswith("cache [0, ") and gap == ""
    first = int(t.loss_mask.argmax())
    assert prompt == f"prompt, tokens 0 to {first - 1}"
    ids = [line.split()[1:] for line in text.splitlines() if line.startswith("  ids")]
    assert [int(i) for turn in ids for i in turn] == t.tokens.tolist()
    logprobs = [line.split()[2:] for line in text.splitlines() if line.startswith("  log p")]
    assert [float(p) for turn in logprobs for p in turn] == pytest.approx(
        t.behavior_logprobs[t.loss_mask].tolist(), abs=5.1e-4
    )
    assert "  versions  0 x" in text


def test_all_records_of_one_name_and_one_attempt_alone(runs: Path) -> None:
    both = told(show, runs / "second", "heldout/3/0", decode)
    assert both.count("heldout/3/0/0  ") == 2, "evaluated before and after"
    assert "evaluated under version 0" in both and "evaluated under version 10" in both
    assert told(show, runs / "second", "heldout/3/0/0", decode) == both


def test_an_unknown_name_says_which_there_are(runs: Path) -> None:
    for name in ("lookup/1/0/9", "lookup/1", "nonsense"):
        with pytest.raises(ValueError, match=rf"no trajectory {name} .*; there is \w+/\d+/\d+, "):
            told(show, runs / "second", name, decode)
    with pytest.raises(ValueError, match="none is recorded yet"):
        told(show, runs / "first", "lookup/1/0", decode)


def test_an_agents_text_does_not_steer_the_terminal(runs: Path) -> None:
    text = told(show, runs / "second", "heldout/3/0", lambda ids: "a\x1b[2J\nb")
    assert "\x1b" not in text
    assert "  text      a\\x1b[2J\n            b\n" in text
