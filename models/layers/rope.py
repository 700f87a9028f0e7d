"""[P] Rotary positions: pairs of numbers half a head apart, turned by their token's position.

Equations: arXiv 2104.09864, sec. 3.4. The pair of number i is i + width / 2, as released weights of
the Llama kind have it, not its neighbour.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from models.layers.norm import exact
from rl_jax.arrays import Array

KINDS = ("linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeScaling:
    """How frequencies change for contexts `factor` times as long as `original_max_positions`."""

    kind: str
    """"linear", "llama3" or "yarn"."""
    factor: float
    original_max_positions: int | None = None
    """Of training; "linear" does not need it."""
    low_freq_factor: float = 1.0
    """"llama3": frequencies with fewer turns within the original positions are divided."""
    high_freq_factor: float = 4.0
    """"llama3": those with more turns than this stay."""
    beta_fast: float = 32.0
    """"yarn": frequencies with more turns than this stay."""
    beta_slow: float = 1.0
    """"yarn": those with fewer turns than this are divided."""
    whole_pairs: bool = True
    """"yarn": the bounds are rounded to whole pairs."""
    attention_factor: float | None = None
    """"yarn": queries and keys are multiplied by it; None for 0.1 ln(factor) + 1."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind: {self.kind!r} must be one of {', '.join(KINDS)}")
        if self.factor < 1.0:
            raise ValueError(f"factor: {self.factor} must be at least 1")
        if self.kind != "linear" and self.original_max_positions is None:
            raise ValueError(f"original_max_positions: {self.kind!r} must have one")
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            limit = f"below high_freq_factor = {self.high_freq_factor}"
            raise ValueError(f"low_freq_factor: {self.low_freq_factor} must be {limit}")

    @property
    def gain(self) -> float:
        """What cosine and sine are multiplied by."""
        if self.kind != "yarn":
            return 1.0
        known = self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if known is None else known


class Rotation(NamedTuple):
    """Of the tokens of R rows, for every head."""

    cos: Float[Array, "R L 1 half"]
    sin: Float[Array, "R L 1 half"]


def frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> Float[np.ndarray, " half"]:
    """Radians per position of each pair, theta^(-2i / head_dim), scaled."""
    plain = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    match scaling:
        case None:
            return plain
        case RopeScaling(kind="linear"):
            return plain / scaling.factor
        case RopeScaling(kind="llama3"):
            kept = _kept_llama3(plain, scaling)
        case _:
            kept = _kept_yarn(head_dim, theta, scaling)
    return plain * kept + plain / scaling.factor * (1.0 - kept)


def _kept_llama3(plain: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """The share of each frequency that stays, by its turns within the original positions."""
    turns = (scaling.original_max_positions or 0) * plain / (2.0 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return np.clip((turns - low) / (high - low), 0.0, 1.0)


def _kept_yarn(head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """The same between the pairs that make beta_fast and beta_slow turns (arXiv 2309.00071, sec.
    3.2)."""

    def pair(turns: float) -> float:
        wavelength = (scaling.original_max_positions or 0) / (turns * 2.0 * math.pi)
        return head_dim * math.log(wavelength) / (2.0 * math.log(theta))

    low, high = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.whole_pairs:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    span = max(high - low, 0.001)
    return 1.0 - np.clip((np.arange(head_dim // 2) - low) / span, 0.0, 1.0)


def rotation(
    positions: Int[Array, "R L"],
    head_dim: int,
    theta: float,
    scaling: RopeScaling | None,
    dtype: DTypeLike,
) -> Rotation:
    """Cosines and sines in float32, or in `dtype` where that is wider."""
    wide = jnp.promote_types(dtype, jnp.float32)
    speeds = jnp.asarray(frequencies(head_dim, theta, scaling), wide)
    angles = positions[..., None, None].astype(wide) * speeds
    gain = scaling.gain if scaling else 1.0
    return Rotation(jnp.cos(angles) * gain, jnp.sin(angles) * gain)


def rotate(x: Float[Array, "R L H A"], by: Rotation) -> Float[Array, "R L H A"]:
    """x turned, in the rotation's precision, then x's dtype."""
    first, second = jnp.split(exact(x), 2, -1)
    turned = first * by.cos - second * by.sin, second * by.cos + first * by.sin
    return jnp.concatenate(turned, -1).astype(x.dtype)
