"""[P] `chain`: transforms one after the other, their states and statistics in tuples."""

from typing import Any

from rl_jax.losses.types import LossTransform, Metrics, Scores, Terms


def chain(*transforms: LossTransform) -> LossTransform:
    """Applies `transforms` in order. Two that report the same metric name are an error."""

    def stats(scores: Scores) -> tuple[Any, ...]:
        return tuple(t.stats(scores) if t.stats else () for t in transforms)

    def apply(scores: Scores, terms: Terms, stats: Any, state: Any) -> tuple[Terms, Metrics]:
        metrics: Metrics = {}
        parts = stats if stats else ((),) * len(transforms)
        for transform, part, own in zip(transforms, parts, state, strict=True):
            terms, new = transform.apply(scores, terms, part, own)
            if clash := metrics.keys() & new.keys():
                raise ValueError(f"two transforms of one chain report {sorted(clash)[0]!r}")
            metrics |= new
        return terms, metrics

    def advance(state: Any, stats: Any) -> Any:
        parts = stats if stats else ((),) * len(transforms)
        return tuple(t.advance(s, p) for t, s, p in zip(transforms, state, parts, strict=True))

    return LossTransform(
        needs=frozenset().union(*(t.needs for t in transforms)),
        init=lambda: tuple(t.init() for t in transforms),
        stats=stats if any(t.stats for t in transforms) else None,
        apply=apply,
        advance=advance,
    )
