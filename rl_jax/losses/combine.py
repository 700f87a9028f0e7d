"""[P] Transforms out of transforms: one after the other, side by side, one for each task."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from rl_jax.losses.evaluate import check_terms
from rl_jax.losses.types import (
    Loss,
    LossTransform,
    Metrics,
    Scores,
    Terms,
    stateless,
    task_id,
)


def chain(*transforms: LossTransform) -> LossTransform:
    """Applies `transforms` in order. Two that report the same metric name are an error."""
    _check_parts("chain", transforms)

    def apply(scores: Scores, terms: Terms, stats: Any, state: Any) -> tuple[Terms, Metrics]:
        metrics: Metrics = {}
        for transform, part, own in zip(transforms, stats, state, strict=True):
            before = terms
            terms, new = transform.apply(scores, terms, part, own)
            check_terms(terms, before, transform.name)
            if clash := metrics.keys() & new.keys():
                raise ValueError(
                    f"chain: {sorted(clash)[0]!r} is reported by {transform.name} and by a "
                    "transform before it; give one of them another name"
                )
            metrics |= new
        return terms, metrics

    return _joined("chain", transforms, apply)


def weighted_sum(**parts: tuple[float, LossTransform]) -> LossTransform:
    """The sum of coefficient x loss of parts that each begin with the terms as they came.

    weighted_sum(policy=(1.0, a), distillation=(0.1, b)); the keywords are prefixes of the parts'
    metrics. Ratio, factor and masks of the parts go no further; a token is kept if a part keeps it.
    What stands before it in a chain holds for each part: a mask by lag, a weight per token. Each
    part tells the share that its own masks dropped, so those of two parts count a token twice and
    do not add up with the kept share to 1.
    """
    for name, part in parts.items():
        if isinstance(part, LossTransform) or not isinstance(part, tuple) or len(part) != 2:
            raise ValueError(f"weighted_sum: {name} must be (coefficient, transform)")
        if not math.isfinite(part[0]):
            raise ValueError(f"weighted_sum: the coefficient of {name} is {part[0]}")
    transforms = tuple(transform for _, transform in parts.values())
    _check_parts("weighted_sum", transforms)

    def apply(scores: Scores, terms: Terms, stats: Any, state: Any) -> tuple[Terms, Metrics]:
        metrics: Metrics = {}
        kept = jnp.zeros_like(terms.kept)
        loss, weight = terms.loss, terms.weight
        nothing = jnp.zeros_like(terms.loss)
        begun = terms._replace(loss=nothing, weight=nothing)
        each = zip(parts.items(), stats, state, strict=True)
        for (name, (coefficient, transform)), part, own in each:
            made, new = transform.apply(scores, begun, part, own)
            check_terms(made, terms, transform.name)
            kept = kept | made.kept
            loss = loss + coefficient * made.loss
            weight = weight + coefficient * made.weight
            metrics |= {f"{name}/{metric}": value for metric, value in new.items()}
        return terms._replace(kept=terms.kept & kept, loss=loss, weight=weight), metrics

    return _joined("weighted_sum", transforms, apply)


def per_task(chains: Mapping[str, LossTransform], default: LossTransform) -> LossTransform:
    """Every token under the chain of its task, `default` where `chains` names none.

    Each chain sees the tokens of its tasks only; its metrics are told as TASK/METRIC, those of the
    default as default/METRIC.
    """
    if "default" in chains:
        raise ValueError("per_task: a task named 'default' has the metrics of the default chain")
    transforms = (*chains.values(), default)
    _check_parts("per_task", transforms)
    ids = [task_id(task) for task in chains]
    if len(set(ids)) != len(ids):
        raise ValueError(f"per_task: two of the tasks {', '.join(chains)} have the same number")

    def masks(scores: Scores) -> list[Array]:
        own = [scores.tasks == number for number in ids]
        rest = ~jnp.any(jnp.stack(own), axis=0) if own else jnp.ones_like(scores.mask)
        return [*own, rest]

    def seen(scores: Scores, where: Array) -> Scores:
        return scores._replace(mask=scores.mask & where)

    def stats(scores: Scores) -> tuple[Any, ...]:
        each = zip(transforms, masks(scores), strict=True)
        return tuple(t.stats(seen(scores, m)) if t.stats else () for t, m in each)

    def apply(scores: Scores, terms: Terms, stats: Any, state: Any) -> tuple[Terms, Metrics]:
        metrics: Metrics = {}
        merged = terms
        parts = zip((*chains, "default"), transforms, masks(scores), stats, state, strict=True)
        for name, transform, where, part, own in parts:
            begun = terms._replace(kept=terms.kept & where)
            made, new = transform.apply(seen(scores, where), begun, part, own)
            check_terms(made, terms, transform.name)
            merged = Terms(*(jnp.where(where, a, b) for a, b in zip(made, merged, strict=True)))
            metrics |= {f"{name}/{metric}": value for metric, value in new.items()}
        return merged, metrics

    joined = _joined("per_task", transforms, apply)
    return joined._replace(stats=stats if joined.stats else None)


def token_weights(
    weights: Callable[[Scores], Float[Array, "R L"]],
    *,
    needs: tuple[str, ...] = (),
    name: str = "token_weights",
) -> LossTransform:
    """Multiplies the factor by `weights(scores)`, detached: any weight per token of one's own.

    A ValueError, at trace time, where that is no float32[R, L]; and where a sampled token's is not
    finite, if the scores are no tracers.
    """

    def apply(scores: Scores, terms: Terms) -> tuple[Terms, Metrics]:
        for score in needs:
            scores.score(score, name)
        own = weights(scores)
        _check_weights(name, own, scores)
        own = jax.lax.stop_gradient(own)
        return terms._replace(factor=jnp.where(scores.mask, terms.factor * own, terms.factor)), {}

    return stateless(name, apply, needs)


def _check_weights(name: str, own: Any, scores: Scores) -> None:
    shape = scores.mask.shape
    if not hasattr(own, "dtype"):
        raise ValueError(
            f"{name}: weights returned {type(own).__name__}, needs float32{list(shape)}"
        )
    if (own.dtype, own.shape) != (jnp.float32, shape):
        raise ValueError(
            f"{name}: weights returned {own.dtype}{list(own.shape)}, needs float32{list(shape)}"
        )
    if isinstance(own, Tracer) or isinstance(scores.mask, Tracer):
        return
    bad = np.argwhere(np.asarray(scores.mask) & ~np.isfinite(np.asarray(own)))
    if len(bad):
        row, token = bad[0]
        raise ValueError(
            f"{name}: the weight is {float(own[row, token])} at row {row}, token {token}"
        )


def _check_parts(name: str, transforms: tuple[LossTransform, ...]) -> None:
    if not transforms:
        raise ValueError(f"{name}: needs at least one transform")
    for transform in transforms:
        if isinstance(transform, Loss):
            raise ValueError(f"{name}: a Loss is no part, use its .transform")
        if not isinstance(transform, LossTransform):
            raise ValueError(
                f"{name}: {transform!r} is no LossTransform; a reduction is not part of a chain, "
                "write Loss(chain, reduction)"
            )


def _joined(name: str, transforms: tuple[LossTransform, ...], apply: Any) -> LossTransform:
    """States and statistics of the parts in tuples."""

    def stats(scores: Scores) -> tuple[Any, ...]:
        return tuple(t.stats(scores) if t.stats else () for t in transforms)

    none = ((),) * len(transforms)

    def advance(state: Any, stats: Any) -> Any:
        parts = zip(transforms, state, stats or none, strict=True)
        return tuple(t.advance(own, part) for t, own, part in parts)

    return LossTransform(
        name=name,
        needs=frozenset().union(*(t.needs for t in transforms)),
        init=lambda: tuple(t.init() for t in transforms),
        stats=stats if any(t.stats for t in transforms) else None,
        apply=lambda scores, terms, stats, state: apply(scores, terms, stats or none, state),
        advance=advance,
    )
