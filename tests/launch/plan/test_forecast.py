"""`rl-jax plan CONFIG` and `rl-jax plan --fit RUN`: rates in, tables out, mistakes in one line."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from launch import build, cli
from launch.plan.chips import sizes_of
from launch.plan.fit import fit
from launch.plan.inputs import TOOL_SIGMA
from rl_jax.config.load import load
from rl_jax.config.run import RunConfig
from rl_jax.metrics.trace import TraceWriter

ROOT = Path(__file__).parents[3]
RECORDED = ROOT / "notebooks" / "recorded"
SMALL = (
    'model.layers=["mla"]', "trainer.updates=4", "trainer.groups=2", "trainer.group_size=4",
    "rollout.in_flight=8",
)  # fmt: skip
SETS = [word for text in SMALL for word in ("--set", text)]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """The recorded run with a trace of rollouts from second 60 on, and of steps of known length:
    100 of decode of 20 ms, 50 of prefill of 40 ms, 5 ms between any two."""
    own = tmp_path / "run"
    shutil.copytree(RECORDED, own)
    (own / "traces").mkdir()
    with TraceWriter(own / "traces" / "orchestrator.json", "orchestrator") as trace:
        for sample in range(8):
            trace.span("rollouts", f"lookup/0/{sample}", 60.0, 62.0)
    with TraceWriter(own / "traces" / "sampler.json", "sampler") as trace:
        at = 60.0
        for number in range(150):
            name, length = ("prefill 16", 0.04) if number % 3 == 2 else ("decode", 0.02)
            trace.span("device 1", name, at, at + length)
            at += length + 0.005
    with TraceWriter(own / "traces" / "trainer.json", "trainer") as trace:
        trace.span("publication", "push", 1.0, 9.0, version=0)
        trace.span("publication", "push", 68.0, 68.25, version=1)
    return own


def test_rates_of_a_run(run_dir: Path) -> None:
    found = fit(run_dir)
    rates = found.rates
    assert rates.sampler.step_s == pytest.approx(0.025)
    assert rates.trainer.publish_s == pytest.approx(0.25)
    assert rates.rollout.tool_sigma == TOOL_SIGMA == pytest.approx(0.98979, abs=1e-5)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    trained = lines[-1]["trained_tokens"]
    seconds = lines[-1]["wall_seconds"] - 60
    assert found.updates == len(lines) == 6
    assert found.measured.tokens_per_s == pytest.approx(trained / seconds)
    tokens = np.diff([0, *(line["trained_tokens"] for line in lines)])
    lags = [line["lag_mean"] for line in lines]
    assert found.measured.lag_mean == pytest.approx(float(np.average(lags, weights=tokens)))
    assert found.measured.in_flight == pytest.approx(16 / seconds)
    assert found.measured.sampler_idle == pytest.approx(1 - (100 * 0.02 + 50 * 0.04) / seconds)


@pytest.mark.usefixtures("unchecked")
def test_fit_compares_and_saves(run_dir: Path, capsys: pytest.CaptureFixture) -> None:
    saved = run_dir.parent / "rates.toml"
    assert cli.main(["plan", "--fit", str(run_dir), "--save", str(saved)]) == 0
    told = capsys.readouterr().out
    assert "measured     simulated   closed form" in told
    assert "trained tokens/s, of measured" in told
    config = str(ROOT / "configs" / "quickstart.toml")
    assert cli.main(["plan", config, *SETS, "--rates", str(saved), "--json"]) == 0
    forecast = json.loads(capsys.readouterr().out)["forecast"]
    assert forecast["rates"] == fit(run_dir).rates.model_dump()
    assert forecast["simulated"]["tokens_per_s"] > 0


def test_a_run_without_traces(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["plan", "--fit", str(RECORDED)]) == 2
    assert "no trace of its rollouts on record" in capsys.readouterr().err


@pytest.mark.usefixtures("unchecked")
def test_a_chip_and_its_assumptions(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    picture = tmp_path / "plan.png"
    given = "--chip", "v6e", "--assume", "rollout.sampled_tokens=40", "--picture", str(picture)
    assert cli.main(["plan", "quickstart", *SETS, *given]) == 0
    told = capsys.readouterr().out
    assert told.startswith("trainer: 1 device (not cut), bytes of one")
    assert "forecast: 4 updates of 8 trajectories, 1 + 1 devices (trainer + samplers)" in told
    assert "assumed: rollout.sampled_tokens=40" in told and "(assumed)" in told
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_sizes_of_a_model_with_experts() -> None:
    """Two of eight experts meet a token: a quarter of their matrices."""
    model = {"layers": ["mla"], "feed_forward": ["experts"], "width": 32, "heads": 4, "ffn": 48}
    experts = {"experts": 8, "chosen_experts": 2, "expert_width": 16, "head_dim": 8}
    config = RunConfig.model_validate({"name": "sizes", "model": model | experts})
    found = sizes_of(config, build.build_policy(config, 128), 10.0)
    assert found.parameters - found.active == 3 * 8 * 32 * 16 * 3 // 4
    assert found.served_bytes == 4 * found.parameters


def test_rates_of_a_chip_by_hand() -> None:
    """A dense model of N float32 parameters on one v6e: weights at half of 1,640 GB/s."""
    from launch.plan.chips import rates_of_chip

    config = load(ROOT / "configs" / "quickstart.toml")
    model = build.build_policy(config, 128)
    own = sizes_of(config, model, 0.0)
    told = rates_of_chip(config, model, "v6e")
    assert told["sampler"]["step_s"] == pytest.approx(4 * own.parameters / (0.5 * 1640e9))
    assert told["trainer"]["tokens_per_s"] == pytest.approx(0.2 * 918e12 / (6 * own.parameters))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["quickstart"], "a forecast needs rates: --chip NAME, or --rates FILE"),
        (["quickstart", "--rates", "none.toml"], "none.toml: cannot be read: No such file"),
        (
            ["quickstart", "--chip", "v5p", "--assume", "speed=3"],
            "--assume speed=3: no rate 'speed'",
        ),
        (
            ["quickstart", "--chip", "v5p", "--assume", "sampler.step_s=fast"],
            "--assume sampler.step_s=fast: needs a number, as in sampler.step_s=0.5",
        ),
        (
            ["quickstart", *SETS, "--chip", "v5p", "--assume", "sampler.step_s=0"],
            "--assume: sampler.step_s = 0.0: needs a number, above 0",
        ),
        (["quickstart", "--save", "x"], "--save: needs --fit RUN"),
        (["--model", "quickstart", "--picture", "x"], "--picture: needs CONFIG instead of --model"),
        (
            ["quickstart", "--chip", "v5p", "--picture", "nowhere/x.png"],
            "--picture nowhere/x.png: needs a file in a directory that there is",
        ),
        (["--fit", "x", "--save", "/"], "--save /: needs a file in a directory that there is"),
        (["--fit", "nowhere"], "nowhere is no run"),
        (["--fit", "nowhere", "--rates", "x"], "--rates: says nothing of a run that was"),
        (["--model", "quickstart", "quickstart"], "not allowed with argument"),
        ([], "one of the arguments"),
    ],
)
def test_mistakes(options: list[str], said: str, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["plan", *options]) == 2
    told = capsys.readouterr().err
    assert told.startswith("rl-jax: ") and told.count("\n") == 1 and said in told


def test_a_rates_file_with_a_wrong_key(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "rates.toml"
    path.write_text("[sampler]\nstep = 1.0\n")
    assert cli.main(["plan", "quickstart", "--rates", str(path)]) == 2
    told = capsys.readouterr().err
    assert str(path) in told and told.count("\n") == 1
