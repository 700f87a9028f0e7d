"""A few of the kills that `python -m tests.drills.kills` does more of, and how they are judged."""

from pathlib import Path

import pytest

from rl_jax.replay import events
from rl_jax.replay.log import Entry
from rl_jax.trajectories.types import RolloutKey
from tests.drills.kills import ROLES, Outcome, Recovery, drill, judge, line
from tests.fakes.jobs import Process


@pytest.mark.slow
@pytest.mark.parametrize("role", ["trainer.1", "orchestrator", "host 1"])
def test_a_killed_process_heals_or_is_named(tmp_path: Path, role: str) -> None:
    outcome = drill(ROLES.index(role), tmp_path, role)
    assert not outcome.wrong and outcome.status == 0, line(0, outcome) + outcome.wrong


@pytest.mark.slow
@pytest.mark.parametrize("role", ["trainer", "host 1"])
def test_without_a_restart_the_job_fails_and_names_it(tmp_path: Path, role: str) -> None:
    outcome = drill(ROLES.index(role), tmp_path, role, restarts=0)
    assert not outcome.wrong and outcome.status > 0, line(0, outcome) + outcome.wrong
    assert outcome.attempts == 1


def log_of_a_crash_loop(out: Path) -> None:
    for attempt in range(4):
        folder = out / "logs" / f"attempt_{attempt}"
        folder.mkdir(parents=True)
        code = 1 if attempt else -9
        (folder / "a.log").write_text(f"rl-jax: trainer.1 (pid {attempt}) ended with {code}\n")


def test_a_crash_loop_is_wrong_though_a_log_names_the_killed(tmp_path: Path) -> None:
    log_of_a_crash_loop(tmp_path)
    victim = Process(0, "trainer.1")
    assert judge(tmp_path, victim, 1, 3).startswith("ended with 1 in spite of 3 restarts")
    assert judge(tmp_path, victim, 1, 0) == ""
    assert judge(tmp_path, Process(0, "host 1"), 1, 0).startswith("ended with 1 and does not say")


@pytest.mark.parametrize(("took", "verdict"), [(15.1, "SLOW"), (14.9, "ok"), (None, "ok")])
def test_a_slow_recovery_is_told(took: float | None, verdict: str) -> None:
    assert line(0, Outcome("trainer", 3, 0, 2, took, "")).endswith(verdict)


KEY = RolloutKey("lookup", 1, 0, 0)
UPDATE = Entry(1, "trainer", 0, events.UpdateDone(1, 0.0, 0.0))
RECOVERIES = {
    "sampler-1": (
        Entry(1, "supervisor-1", 0, events.ProcessStarted("sampler-1", 7)),
        [Entry(1, "sampler-0", 0, events.VersionApplied(2, 0.0)), UPDATE],
        Entry(1, "sampler-1", 0, events.VersionApplied(2, 0.0)),
    ),
    "orchestrator": (
        Entry(1, "supervisor-0", 0, events.ProcessStarted("orchestrator", 7)),
        [UPDATE],
        Entry(1, "orchestrator", 0, events.RolloutStarted(KEY)),
    ),
    "trainer.1": (
        Entry(1, "trainer", 0, events.RunStarted(3, "", 0)),
        [Entry(1, "supervisor-1", 0, events.ProcessStarted("trainer.1", 7))],
        UPDATE,
    ),
}
"""How it is there again; what is no work of its own; what is."""


@pytest.mark.parametrize("role", RECOVERIES)
def test_a_role_works_again_once_it_does_its_own_work_anew(role: str) -> None:
    started, others, works = RECOVERIES[role]
    told = [started, works]
    recovering = Recovery(role, told)
    for entry in (works, *others, started, *others):
        told.append(entry)
        assert not recovering.complete(told), entry
    told.append(works)
    assert recovering.complete(told)
