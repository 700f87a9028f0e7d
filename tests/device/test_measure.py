"""How the device scripts judge, time and end, on the CPU."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from tests.device import measure


def script(checks=lambda seed: True, runs=(), budget=60.0, why_not=lambda: "") -> int:
    return measure.script("title", checks, runs, budget, why_not)


@pytest.fixture(autouse=True)
def arguments(monkeypatch):
    monkeypatch.setattr("sys.argv", ["script", "3"])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_error_that_is_not_a_number_fails_wherever_it_is(place: int) -> None:
    errors = [1e-9, 1e-9, 1e-9]
    assert measure.judged(errors, [1e-5] * 3) == ("ok", True)
    errors[place] = math.nan
    assert measure.judged(errors, [1e-5] * 3) == ("FAIL", False)


def test_a_condition_or_an_error_over_its_limit_fails() -> None:
    assert measure.judged([1e-3], [1e-2], True, False) == ("FAIL", False)
    assert measure.judged([1e-3, 2e-2], [1e-2, 1e-2]) == ("FAIL", False)


def test_errors_are_relative_and_absolute_where_nothing_is_wanted() -> None:
    assert measure.error(jnp.asarray([3.0, 4.5]), np.asarray([3.0, 4.0])) == pytest.approx(0.1)
    assert measure.error(jnp.asarray([0.0, 2.0]), np.zeros(2)) == 2.0


def test_status_is_zero_where_every_row_passes(capsys: pytest.CaptureFixture) -> None:
    seen = []
    assert script(runs=[("row", lambda name, *given: seen.append((name, *given)), (5,))]) == 0
    assert seen == [("row", 3, 5)]
    assert "every row passed" in capsys.readouterr().out


def test_a_run_that_raises_fails_and_the_next_starts(capsys: pytest.CaptureFixture) -> None:
    def broken(name, seed):
        raise ValueError("RESOURCE_EXHAUSTED\nmore")

    seen = []
    runs = [("one", broken, ()), ("two", lambda name, seed: seen.append(name), ())]
    assert script(runs=runs) == 1
    assert seen == ["two"]
    assert "| one | FAIL ValueError: RESOURCE_EXHAUSTED |" in capsys.readouterr().out


def test_failed_checks_and_no_gpu_have_their_own_status(capsys: pytest.CaptureFixture) -> None:
    assert script(checks=lambda seed: False) == 1

    def unavailable():
        raise RuntimeError("no backend cuda\nmore")

    assert script(why_not=unavailable) == 2
    assert script(why_not=lambda: "no GPU here") == 2
    assert capsys.readouterr().err == (
        "nothing was run: no backend cuda\nnothing was run: no GPU here\n"
    )


def test_out_of_time_is_told_and_no_fault(capsys: pytest.CaptureFixture) -> None:
    def never(name, seed):
        raise AssertionError

    assert script(runs=[("late", never, ())], budget=-1.0) == 0
    assert "| late | not run: out of time |" in capsys.readouterr().out


def test_steps_in_place_are_chained_over_the_pool(monkeypatch) -> None:
    last = []

    def best(run, repeats):
        for _ in range(repeats):
            last.append(np.asarray(run()).copy())
        return 6.0

    monkeypatch.setattr(measure, "best", best)
    took, needed = measure.seconds_in_place(
        lambda pool, x: 2 * pool + x, jnp.ones(4), jnp.ones(4), steps=3, repeats=2
    )
    assert took == 2.0  # of the 6 for a program, 3 steps
    assert [x[0] for x in last] == [15.0, 127.0]  # 1 -> 3 -> 7 -> 15, and on from there
    assert needed >= 2 * 4 * 4
