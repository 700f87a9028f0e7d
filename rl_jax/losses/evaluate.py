"""[P] A transform on scores: fresh terms in, what every loss reports of itself out."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from rl_jax.arrays import AnyArray, Array
from rl_jax.losses.types import LossTransform, Metrics, Scores, Terms, sampled
from rl_jax.metrics import names
from rl_jax.metrics.states import Mean

DTYPES = {"mask": jnp.bool_, "lag": jnp.int32, "segments": jnp.int32, "tasks": jnp.int32}
"""Of the fields of `Scores`; all others are float32."""


def make_scores(
    current: AnyArray,
    behavior: AnyArray,
    mask: AnyArray,
    advantages: AnyArray,
    *,
    lag: AnyArray | None = None,
    segments: AnyArray | None = None,
    tasks: AnyArray | None = None,
    returns: AnyArray | None = None,
    others: Mapping[str, AnyArray] | None = None,
) -> Scores:
    """`Scores` of arrays [R, L]; what is left out is zero, and each row is one trajectory.

    Raises ValueError naming the field whose shape is not that of `current`, whose dtype cannot be
    converted, or that is not finite where `mask` is true, and where `mask` is false everywhere.
    """
    none = np.zeros(np.shape(current), np.int32)
    given = {
        "current": current,
        "behavior": behavior,
        "mask": mask,
        "advantages": advantages,
        "lag": none if lag is None else lag,
        "segments": none if segments is None else segments,
        "tasks": none if tasks is None else tasks,
        "returns": none.astype(np.float32) if returns is None else returns,
    }
    scores = Scores(
        **{field: _converted(field, array) for field, array in given.items()},
        others={name: _converted(name, array) for name, array in (others or {}).items()},
    )
    check_scores(scores, "make_scores")
    _check_values(scores, "make_scores")
    return scores


def start(scores: Scores) -> Terms:
    """The terms that a chain begins with."""
    zeros = jnp.zeros_like(scores.current)
    return Terms(
        log_ratio=zeros,
        factor=zeros + 1.0,
        kept=scores.mask,
        advantages=jnp.where(scores.mask, scores.advantages, 0.0),
        weight=zeros,
        loss=zeros,
    )


def evaluate(
    transform: LossTransform, scores: Scores, stats: Any = None, state: Any = None
) -> tuple[Terms, Metrics]:
    """`transform` on fresh terms; without `stats` and `state`, those of `scores` alone and a fresh
    state.

    Besides the parts' own metrics: the mean ratio to the sampling policy, the share of sampled
    tokens that no mask dropped, and the moments of the weights. Raises ValueError, at trace time,
    for wrong shapes and dtypes and for scores that are lacking; and, where the numbers are known,
    for a mask behind the objective.
    """
    check_scores(scores, transform.name)
    if not isinstance(scores.mask, Tracer):
        _check_values(scores, transform.name)
    if stats is None:
        stats = transform.stats(scores) if transform.stats else ()
    if state is None:
        state = transform.init()
    fresh = start(scores)
    terms, metrics = transform.apply(scores, fresh, stats, state)
    check_terms(terms, fresh, transform.name)
    _check_order(terms, transform.name)
    return terms, metrics | _common(scores, terms)


def _common(scores: Scores, terms: Terms) -> Metrics:
    ratio = jnp.exp(jnp.clip(scores.current - scores.behavior, max=LOG_RATIO_BOUND))
    weights = sampled(scores)
    return {
        names.RATIO_MEAN: Mean.of(jax.lax.stop_gradient(ratio), weights),
        names.MASKED_SHARE: Mean.of(1.0 - terms.kept.astype(jnp.float32), weights),
        names.ESS_WEIGHT: Mean.of(terms.weight, weights),
        names.ESS_WEIGHT_SQUARED: Mean.of(jnp.square(terms.weight), weights),
    }


LOG_RATIO_BOUND = 20.0
"""Log-ratios beyond this are cut, or their exponential would not be finite in float32."""


def check_scores(scores: Scores, asked_by: str) -> None:
    """ValueError naming the field whose shape or dtype is wrong."""
    shape = scores.current.shape
    if len(shape) != 2:
        raise ValueError(f"{asked_by}: current has the shape {shape}, needs [rows, tokens]")
    for path, leaf in jax.tree_util.tree_leaves_with_path(scores):
        field = _field(path)
        if leaf.shape != shape:
            raise ValueError(f"{asked_by}: {field} has the shape {leaf.shape}, current {shape}")
        if leaf.dtype != (wanted := DTYPES.get(field, jnp.float32)):
            raise ValueError(f"{asked_by}: {field} is {leaf.dtype}, needs {wanted.__name__}")


def check_terms(terms: Terms, before: Terms, by: str) -> None:
    """ValueError naming what a transform returned with another shape or dtype."""
    if not isinstance(terms, Terms):
        raise ValueError(f"{by}: returned {type(terms).__name__} for terms, needs Terms")
    for field, now, then in zip(Terms._fields, terms, before, strict=True):
        if (now.shape, now.dtype) != (then.shape, then.dtype):
            raise ValueError(
                f"{by}: returned {field} as {now.dtype}{list(now.shape)}, "
                f"needs {then.dtype}{list(then.shape)}"
            )


def _check_order(terms: Terms, by: str) -> None:
    """Of arrays whose numbers are known: what was dropped has no weight."""
    if isinstance(terms.kept, Tracer) or isinstance(terms.weight, Tracer):
        return
    if (~np.asarray(terms.kept) & (np.asarray(terms.weight) != 0)).any():
        raise ValueError(f"{by}: a mask dropped tokens after an objective; put it before")


def _check_values(scores: Scores, asked_by: str) -> None:
    """Of arrays whose numbers are known: not all masked, finite where they count."""
    mask = np.asarray(scores.mask)
    if not mask.any():
        raise ValueError(f"{asked_by}: mask is false everywhere, so there is no token to train on")
    for path, leaf in jax.tree_util.tree_leaves_with_path(scores):
        if isinstance(leaf, Tracer) or leaf.dtype != jnp.float32:
            continue
        bad = np.argwhere(mask & ~np.isfinite(np.asarray(leaf)))
        if len(bad):
            row, column = bad[0]
            value = float(leaf[row, column])
            raise ValueError(f"{asked_by}: {_field(path)} is {value} at row {row}, token {column}")


def _converted(field: str, given: AnyArray) -> Array:
    array = given if isinstance(given, jax.Array) else np.asarray(given)
    wanted = DTYPES.get(field, jnp.float32)
    kinds = {jnp.bool_: "b", jnp.int32: "iu"}.get(wanted, "f")
    if array.dtype.kind not in kinds:
        raise ValueError(f"make_scores: {field} is {array.dtype}, needs {wanted.__name__}")
    return jnp.asarray(array, wanted)


def _field(path: tuple[Any, ...]) -> str:
    """`current`, or the key of one of the others."""
    last = path[-1]
    return str(getattr(last, "key", getattr(last, "name", last)))
