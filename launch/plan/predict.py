"""[H] The forecast of `rl-jax plan`: rates of a chip, a file or a run, and what they give."""

import argparse
from collections.abc import Mapping
from typing import Any, NamedTuple

from launch import build
from launch.plan.chips import SOURCES, rates_of_chip
from launch.plan.closed import closed_form
from launch.plan.compare import CLOSED, MEASURED, SIMULATED, left_out, to_json, to_plain, to_text
from launch.plan.forecast import Forecast
from launch.plan.inputs import Job, Rates, checked, job_of, with_assumptions
from launch.plan.simulate import Trace, simulate
from rl_jax.config.base import UserError
from rl_jax.config.run import RunConfig
from rl_jax.model import Model

Table = Mapping[str, Any]
"""Of a rates file."""
ROLLOUTS = 20_000
"""That a simulation takes at most, but for four pushes."""


_FITTED = (
    "the closed form is of a run that goes on for long: its first pushes lag less",
    "tool times are the configuration's, all else is measured",
)


class Predicted(NamedTuple):
    """Of one job."""

    job: Job
    rates: Rates
    columns: Mapping[str, Forecast]
    trace: Trace


def rates_for(
    given: argparse.Namespace, table: Table | None, config: RunConfig, model: Model
) -> tuple[Rates, list[str]]:
    """The rates of `table`, that of --rates, or of the chip, and where they come from."""
    if table is None:
        table = rates_of_chip(config, model, given.chip)
        notes = [f"rates: assumed for {given.chip}, --assume replaces one, --fit measures them:"]
        notes += [f"  {source}" for source in SOURCES]
    else:
        notes = [f"rates: {given.rates}"]
    if given.assumed:
        table = with_assumptions(table, given.assumed)
        notes.append(f"assumed: {', '.join(given.assumed)}")
    return checked("--assume" if given.assumed else str(given.rates), table), notes


def predict(config: RunConfig, rates: Rates, updates: int | None = None) -> Predicted:
    """By formulas and by a simulation from the run's beginning, of `updates` updates or as many as
    `ROLLOUTS` allow. UserError where the simulated run gets stuck."""
    job = job_of(config, build.build_limits(config))
    least = 4 * job.push_every
    count = updates or min(job.updates, max(least, ROLLOUTS // job.batch)) or least
    try:
        trace = simulate(job, rates, seed=config.seed, updates=count)
        free = job._replace(when_stale="mask", limits=job.limits._replace(pace=None))
        tail = trace if free == job else simulate(free, rates, seed=config.seed, updates=count)
    except ValueError as error:
        raise UserError(str(error)) from error
    # Which tau would keep the tail shows where none is kept.
    own = trace.forecast._replace(lag_p99=tail.forecast.lag_p99)
    return Predicted(job, rates, {SIMULATED: own, CLOSED: closed_form(job, rates)}, trace)


def forecast(
    given: argparse.Namespace, table: Table | None, config: RunConfig, model: Model
) -> dict[str, Any]:
    """Prints the forecast of `config` unless --json is given; what JSON shall hold of it."""
    rates, notes = rates_for(given, table, config, model)
    found = predict(config, rates)
    head = f"forecast: {len(found.trace.updates)} updates of {found.job.batch} trajectories, "
    head += f"{config.mesh.trainer.size} + {config.processes.samplers * config.mesh.sampler.size} "
    head += "devices (trainer + samplers)"
    _picture(given, found)
    if not given.json:
        print("\n" + to_text(head, found.columns, [*_doubts(found), *notes]))
    return to_plain(found.columns, rates)


def fitted(given: argparse.Namespace) -> None:
    """Prints what a run's rates give beside what it did; writes the rates where asked to."""
    from launch.plan.fit import fit, rates_text

    found = fit(given.fit)
    table = with_assumptions(found.rates.model_dump(), given.assumed)
    rates = checked("--assume", table)
    predicted = predict(found.config, rates, found.updates)
    columns = {MEASURED: found.measured, **predicted.columns}
    notes = [*_doubts(predicted), *_FITTED]
    if given.save is not None:
        measured = f"measured by rl-jax plan --fit {found.config.name}, {found.updates} updates"
        given.save.write_text(rates_text(rates, [measured]), encoding="utf-8")
        notes.append(f"rates written to {given.save}")
    _picture(given, predicted)
    if given.json:
        print(to_json(to_plain(columns, rates)))
    else:
        print(to_text(f"{given.fit}: {found.updates} updates", columns, notes))


def _doubts(found: Predicted) -> list[str]:
    reasons = left_out(found.job, found.rates, found.columns[CLOSED])
    return [f"the closed form leaves out: {'; '.join(reasons)}"] if reasons else []


def _picture(given: argparse.Namespace, found: Predicted) -> None:
    if given.picture is None:
        return
    from launch.plan.picture import draw

    draw(given.picture, found.job, found.rates, found.trace)
