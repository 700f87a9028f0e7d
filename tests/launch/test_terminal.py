"""[H] Plain lines word for word, with a clock that the test turns; the live table's content."""

import io

import pytest
from rich.console import Console

from launch.terminal import LiveReporter, PlainReporter, View, duration, eta, reporter

UPDATE = {
    "step": 1,
    "policy_version": 0,
    "reward": 0.5,
    "lag_mean": 0.25,
    "lag_max": 1,
    "trained_tokens": 12345,
    "dropped": 2,
    "sampler_tokens_per_second": 2345.6,
    "trainer_busy_share": 0.61,
    "sampler_busy_share": 0.884,
    "overlap_share": 0.45,
}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_plain_lines():
    out, clock = io.StringIO(), Clock()
    show = PlainReporter(out, clock)
    show.phase("warm start", 8)
    for done in range(1, 9):
        clock.now += 1.0
        show.progress(done, loss=1 / done)
    show.phase("evaluation")
    show.progress(3)
    show.phase("training", 4)
    clock.now += 30.0
    show.update(UPDATE)
    clock.now += 10.0
    show.update({"step": 2, "reward": 1.0})
    show.note("version 1 published")
    show.close()
    assert out.getvalue() == (
        "warm start: 8 steps\n"
        "warm start 2/8  loss 0.5  after 2s\n"
        "warm start 4/8  loss 0.25  after 4s\n"
        "warm start 6/8  loss 0.167  after 6s\n"
        "warm start 8/8  loss 0.125  after 8s\n"
        "evaluation\n"
        "training: 4 steps\n"
        "update 1/4  version 0  reward 0.50  mean 0.50  lag 0.25/1  trained 12,345 tokens"
        "  dropped 2  sampler 2,346 tok/s  trainer busy 61%  sampler busy 88%  overlap 45%"
        "  eta 1m30s\n"
        "update 2/4  reward 1.00  mean 0.55  eta 40s\n"
        "version 1 published\n"
    )


def test_an_update_without_a_reward_keeps_the_mean():
    out = io.StringIO()
    show = PlainReporter(out, Clock())
    show.phase("training")
    show.update({"step": 1, "reward": 0.5})
    show.update({"step": 2, "reward": None, "lag_mean": None, "lag_max": None})
    assert out.getvalue().splitlines()[-1] == "update 2  mean 0.50"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (185, "3m05s"),
        (3599.7, "1h00m"),
        (7800, "2h10m"),
    ],
)
def test_duration(seconds, text):
    assert duration(float(seconds)) == text


def test_eta():
    assert eta(View(total=10, done=4, began=20.0), 28.0) == 12.0
    assert eta(View(total=10, done=0, began=20.0), 28.0) is None
    assert eta(View(total=None, done=4), 28.0) is None


def test_live_table_shows_the_numbers_and_ends_clean():
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    show = LiveReporter(console, clock)
    show.phase("warm start", 10)
    clock.now += 5.0
    show.progress(5, loss=1.25)
    show.phase("training", 60)
    clock.now += 24.0
    show.update(UPDATE | {"step": 12})
    with console.capture() as captured:
        console.print(show._render())
    show.note("something happened")
    show.close()
    table = captured.get()
    for text in ("training", "12/60", "0.50", "0.25/1", "12,345 tokens", "88%", "1m36s"):
        assert text in table
    assert "warm start  5s" in out.getvalue()
    assert "something happened" in out.getvalue()
    assert "training  24s" in out.getvalue()


def test_a_pipe_gets_plain_lines():
    assert isinstance(reporter(io.StringIO()), PlainReporter)
