"""[P] The shape of a Kimi Linear policy."""

from dataclasses import dataclass


@dataclass(frozen=True)
class KimiLinearConfig:
    """Sizes of the hybrid; the defaults are the quickstart's policy."""

    vocab_size: int = 512
    width: int = 128
    layers: tuple[str, ...] = ("kda", "kda", "kda", "mla")
    """"kda" or "mla" for each block, written out: released models do not follow a period."""
    heads: int = 4
    head_dim: int = 32
    kv_latent: int = 32
    kv_shared_key: int = 16
    ffn_width: int = 160
    conv_taps: int = 4
    gate_rank: int | None = 32
    """Width of the decay and output gates' bottleneck; None for full projections."""
    gate_lower_bound: float = -5.0
    """Log-decay per token is above this; the chunk kernel holds down to -5."""
    rms_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in self.layers:
            if name not in ("kda", "mla"):
                raise ValueError(f"layers: {name!r} is not a layer; use 'kda' or 'mla'")
        if not -5.0 <= self.gate_lower_bound < 0.0:
            raise ValueError(f"gate_lower_bound is {self.gate_lower_bound}; it must be in [-5, 0)")
