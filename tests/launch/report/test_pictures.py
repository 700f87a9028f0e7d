"""[H] Pictures: that they show the numbers, whatever text is in them, and what a run lacks."""

import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest

from launch.report import numbers, panel
from launch.report.data import RunData
from launch.report.pictures import pictures
from rl_jax.metrics import names
from rl_jax.metrics.trace import Span
from tests.fakes.record import TAU, label, made_run


@pytest.fixture(scope="module")
def run() -> RunData:
    made = made_run()
    rows = [
        numbers.row(r, label(r.trajectory)) for r in made.recorded if r.trajectory.copy_of is None
    ]
    spans = [Span(*span) for span in made.spans]
    config = {"staleness": {"tau": TAU}}
    return RunData("made", "finished", "", config, made.lines, made.events, rows, spans)


EMPTY = RunData("empty", "killed", "", {}, (), (), (), ())


def drawn(run: RunData) -> dict[str, list]:
    """The axes of each picture's panels, by its title."""
    return {p.title: [figure.axes[0] for figure in p.panels] for p in pictures(run)}


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


def test_each_picture_shows_its_numbers(run):
    axes = drawn(run)
    assert [len(panels) for panels in axes.values()] == [3, 2, 2, 2, 2, 2, 2]

    lags = numbers.lag_tokens(run.rows, run.events)
    bars = [patch.get_height() for patch in axes["Lag"][0].patches]
    np.testing.assert_allclose(bars, np.array(list(lags.values())) / sum(lags.values()))
    assert f"bound τ = {TAU}" in texts(axes["Lag"][0])

    for at, clock in enumerate(numbers.clocks(run.lines)):
        dots, _, held = axes["Learning"][at].lines
        np.testing.assert_allclose(dots.get_xdata(), clock)
        assert len(held.get_xdata()) == 2
    rates = [h.rate for h in numbers.held_out(run.events)]
    assert texts(axes["Learning"][0]) == [f"{rate:.2f}" for rate in rates]

    counts = [line.trajectories for line in numbers.fates(run.rows)]
    assert texts(axes["What became of the trajectories"][0])[: len(counts)] == [
        f"{n:,}" for n in counts
    ]
    lengths = numbers.lengths(run.rows)
    title = axes["Trained against offered"][0].get_title(loc="left")
    assert title == f"Lengths: trained are {-lengths.difference:.1%} shorter"
    entries = [t.get_text() for t in axes["Trained against offered"][0].get_legend().get_texts()]
    trained, offered = lengths.means
    assert entries == [f"offered, mean {offered:.1f}", f"trained, mean {trained:.1f}"]


def test_a_run_without_data_has_no_pictures():
    assert pictures(EMPTY) == []


def test_what_is_missing_is_left_out(run):
    """The first update of a run with neither trace nor record, of the metrics that are old."""
    line = {names.STEP: 1, names.POLICY_VERSION: 0, names.WALL_SECONDS: 2.0, names.REWARD: 0.5}
    assert list(drawn(replace(EMPTY, lines=(line,)))) == ["Learning", "Who waited for whom"]
    lanes = drawn(replace(run, spans=()))["Who waited for whom"][1]
    assert lanes.get_title(loc="left") == "Busy share since the last update"
    share = [line[names.TRAINER_BUSY_SHARE] for line in run.lines]
    np.testing.assert_allclose(lanes.lines[0].get_ydata(), share)


def test_long_runs_are_drawn_in_few_points(run):
    lines = [run.lines[i % 40] | {names.STEP: i + 1} for i in range(5000)]
    (learning, *_) = pictures(replace(EMPTY, lines=lines))
    assert len(learning.panels[0].axes[0].lines[0].get_xdata()) <= 300
    assert len(panel.svg(learning.panels[0])) < 100_000


def test_svg_is_xml_in_the_colours_of_the_page(run):
    text = panel.svg(pictures(run)[1].panels[0])
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    told = {"".join(e.itertext()).strip() for e in root.iter() if e.tag.endswith("}text")}
    assert {"Share of trained tokens by lag", f"bound τ = {TAU}"} <= told
    assert "var(--blue)" in text and not any(color in text for color in panel.COLORS.values())


def test_text_from_outside_is_only_text(run):
    nasty = "<script>$x^{$ & \x00\n" + "long " * 30
    rows = [r._replace(label=nasty, fate=r.fate._replace(reason=nasty)) for r in run.rows]
    for picture in pictures(replace(run, rows=rows)):
        for figure in picture.panels:
            text = panel.svg(figure)
            assert "<script" not in text
            ElementTree.fromstring(text)


def test_plain_and_ticks():
    assert panel.plain("a$b\nc", 9) == r"a\$b·c"
    assert panel.plain("abcdef", 4) == "abc…"
    assert [panel.compact(v) for v in (0, 12.5, 1500, 2e6)] == ["0", "12.5", "1.5k", "2M"]
    assert [panel.percent(v) for v in (0.5, 0.0125, 0.1 + 0.2)] == ["50%", "1.25%", "30%"]
