"""What the library makes of every case: one program, compiled once, at one shape, for all tests.

All cases together compile faster than apart, as they share sums over trajectories, ratios and
masks; and nothing of a case depends on its being alone.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rl_jax.arrays import Array
from rl_jax.losses.combine import chain
from rl_jax.losses.evaluate import evaluate
from rl_jax.losses.types import LossTransform, Metrics, Scores, Terms, drop, stateless
from rl_jax.metrics.states import merge
from tests.losses.conformance.batches import OTHERS, Layout, Tokens, cut, laid
from tests.losses.conformance.cases import CASES
from tests.losses.conformance.oracle import LIVE

SHUT = 100
"""From this lag on, the gate before every transform of the suite drops a token."""
FAST_TO_COMPILE = {"xla_backend_optimization_level": 0}


PLAIN = tuple(name for name in CASES if ":" not in name)
"""One case of each function."""


class Result(NamedTuple):
    loss: Array
    gradients: dict[str, Array]
    """By name of score, of those with a gradient."""
    terms: Terms
    metrics: Metrics


class Told(NamedTuple):
    """A result over microbatches, its arrays by trajectory."""

    loss: float
    gradients: dict[str, dict[int, np.ndarray]]
    terms: dict[int, Terms]
    metrics: Metrics


def gate() -> LossTransform:
    """Drops what has a lag from `SHUT` on: nothing, but for tests where nothing shall be kept."""
    return stateless("gate", lambda scores, terms: drop("gate", scores, terms, scores.lag >= SHUT))


@cache
def transform(name: str) -> LossTransform:
    return chain(gate(), CASES[name].transform())


def narrowed(name: str, scores: Scores) -> Scores:
    """With the scores that the case says it needs, and no others."""
    return scores._replace(others={need: scores.others[need] for need in CASES[name].needs})


def result(name: str, scores: Scores, weights: Array, stats: Any) -> Result:
    """Of one case, traced."""
    whole = transform(name)

    def value(live: dict[str, Array]) -> Any:
        others = {n: live.get(n, score) for n, score in scores.others.items()}
        own = scores._replace(current=live["current"], others=others)
        terms, metrics = evaluate(whole, own, stats, whole.init())
        return jnp.sum(weights * terms.loss), (terms, metrics)

    known = {"current": scores.current, **scores.others}
    live = {n: score for n, score in known.items() if n in LIVE}
    (loss, aux), gradients = jax.value_and_grad(value, has_aux=True)(live)
    return Result(loss, gradients, *aux)


@cache
def _first_pass() -> Any:
    def every(scores: Scores) -> dict[str, Any]:
        parts = {name: transform(name).stats for name in CASES}
        return {n: stats(narrowed(n, scores)) for n, stats in parts.items() if stats}

    return jax.jit(every, compiler_options=FAST_TO_COMPILE)


@cache
def program() -> Any:
    """(scores with all others, weights, statistics by case) -> results by case."""

    def every(scores: Scores, weights: Array, stats: Mapping[str, Any]) -> dict[str, Result]:
        return {n: result(n, narrowed(n, scores), weights, stats.get(n, ())) for n in CASES}

    return jax.jit(every, compiler_options=FAST_TO_COMPILE)


@cache
def sharded_program() -> Any:
    """(scores, weights) -> losses and gradients of one case of each function.

    The statistics are taken within: they too are sums over rows.
    """

    def every(scores: Scores, weights: Array) -> dict[str, tuple[Array, dict[str, Array]]]:
        made = {}
        for name in PLAIN:
            own, stats = narrowed(name, scores), transform(name).stats
            got = result(name, own, weights, stats(own) if stats else ())
            made[name] = got.loss, got.gradients
        return made

    return jax.jit(every, compiler_options=FAST_TO_COMPILE)


def statistics(parts: Sequence[Scores]) -> dict[str, Any]:
    """Summed over the microbatches, of the cases that have some."""
    each = [_first_pass()(part) for part in parts]
    return jax.tree.map(lambda *leaves: sum(leaves[1:], leaves[0]), *each)


def run(
    batch: Sequence[Tokens],
    layouts: Sequence[Layout],
    *,
    fill: Mapping[str, Any] | None = None,
    weights: float | None = None,
) -> dict[str, Told]:
    """Every case on `batch`, each of the layouts a microbatch; `weights` instead of the batch's."""
    parts = [laid(batch, layout, OTHERS, fill) for layout in layouts]
    stats = statistics([scores for scores, _ in parts])
    told = {name: Told(0.0, {}, {}, {}) for name in CASES}
    for (scores, own), layout in zip(parts, layouts, strict=True):
        if weights is not None:
            own = np.where(scores.mask, np.float32(weights), np.float32(0))
        results = jax.device_get(program()(scores, own, stats))
        told = {name: _joined(told[name], results[name], layout) for name in CASES}
    return told


def _joined(told: Told, result: Result, layout: Layout) -> Told:
    gradients = dict(told.gradients)
    for name, gradient in result.gradients.items():
        gradients[name] = gradients.get(name, {}) | cut(gradient, layout)
    arrays = [cut(field, layout) for field in result.terms]
    terms = {number: Terms(*(field[number] for field in arrays)) for number in layout}
    return Told(
        told.loss + float(result.loss),
        gradients,
        told.terms | terms,
        merge(told.metrics, result.metrics),
    )
