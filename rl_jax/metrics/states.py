"""[P] Metrics as monoids: a state that merges in any order, computed once at the end.

A mean of means is wrong where the parts differ in size; these carry what is needed instead, so
microbatches, rows and devices add up to what one pass would have given.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


class Mean(NamedTuple):
    """A weighted mean; nothing seen computes to nan."""

    total: Float[Array, ""]
    count: Float[Array, ""]

    @classmethod
    def empty(cls) -> "Mean":
        return cls(jnp.zeros(()), jnp.zeros(()))

    @classmethod
    def of(cls, values: Float[Array, "*n"], weights: Float[Array, "*n"] | None = None) -> "Mean":
        """The mean of `values` under `weights`; a value of weight 0 may be nan or inf."""
        if weights is None:
            weights = jnp.ones_like(values)
        kept = jnp.where(weights != 0, values, 0.0)
        return cls(jnp.sum(kept * weights), jnp.sum(weights))

    def merge(self, other: "Mean") -> "Mean":
        return Mean(self.total + other.total, self.count + other.count)

    def compute(self) -> Float[Array, ""]:
        return self.total / self.count


class Max(NamedTuple):
    """The largest value seen; nothing seen computes to -inf."""

    value: Float[Array, ""]

    @classmethod
    def empty(cls) -> "Max":
        return cls(jnp.full((), -jnp.inf))

    @classmethod
    def of(cls, values: Float[Array, "*n"], where: Bool[Array, "*n"] | None = None) -> "Max":
        """The largest of `values` among those `where` selects."""
        return cls(jnp.max(values, initial=-jnp.inf, where=where))

    def merge(self, other: "Max") -> "Max":
        return Max(jnp.maximum(self.value, other.value))

    def compute(self) -> Float[Array, ""]:
        return self.value


State = Mean | Max
States = Mapping[str, State]


def merge(a: States, b: States) -> dict[str, State]:
    """Both sides' states by name; a name of one side only is kept as it is.

    Raises ValueError where a name stands for different kinds of state.
    """
    merged = {**a, **b}
    for name in a.keys() & b.keys():
        if type(a[name]) is not type(b[name]):
            kinds = f"{type(a[name]).__name__} and {type(b[name]).__name__}"
            raise ValueError(f"metric {name} is both {kinds}: one name, one kind")
        merged[name] = a[name].merge(b[name])  # pyright: ignore[reportArgumentType] same kind
    return merged


def compute(states: States) -> dict[str, Float[Array, ""]]:
    """The numbers of `states`, by name."""
    return {name: state.compute() for name, state in states.items()}
