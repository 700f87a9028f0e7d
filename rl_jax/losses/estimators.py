"""[P] Estimates of a KL divergence from one sample's log-ratio."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

Estimator = Literal["k1", "k2", "k3"]
ESTIMATORS = ("k1", "k2", "k3")


def estimate(estimator: Estimator, log_ratio: Float[Array, "R L"]) -> Float[Array, "R L"]:
    """KL(q || p) in nats from samples of q, with x = log p - log q as `log_ratio`.

    k1 = -x is unbiased, k2 = x^2 / 2 biased with little variance, k3 = e^x - 1 - x unbiased and
    never negative. Source: Schulman, "Approximating KL divergence" (2020).
    """
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * jnp.square(log_ratio)
    return jnp.expm1(log_ratio) - log_ratio
