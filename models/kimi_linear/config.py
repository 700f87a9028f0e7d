"""[P] The shape of a Kimi Linear policy."""

from dataclasses import dataclass

MIXERS = ("kda", "mla")
FEED_FORWARDS = ("dense", "experts")
WORDS = {"gate_rank": "full", "gate_lower_bound": "softplus"}
"""What a configuration file says where these are None, which is not their default."""


@dataclass(frozen=True)
class KimiLinearConfig:
    """Sizes of the hybrid; the defaults are the quickstart's policy.

    Fields that are None take what the comment says.
    """

    vocab_size: int = 512
    width: int = 128
    layers: tuple[str, ...] = ("kda", "kda", "kda", "mla")
    """"kda" or "mla" for each block, written out: released models do not follow a period."""
    feed_forward: tuple[str, ...] | None = None
    """"dense" or "experts" for each block; dense everywhere."""
    tied: bool = True
    """The head is the embedding."""
    rms_eps: float = 1e-5

    heads: int = 4
    """Of KDA, and of MLA where `mla_heads` says nothing else."""
    head_dim: int = 32
    conv_taps: int = 4
    gate_rank: int | None = 32
    """Width of the decay and output gates' bottleneck; None for full projections."""
    full_output_gate: bool = False
    """The output gate alone is a full projection (arXiv 2607.24653)."""
    gate_lower_bound: float | None = -5.0
    """Log-decay per token is above this; the chunk kernel holds down to -5. None for the softplus
    gate without a bound (arXiv 2510.26692)."""
    negative_eigenvalues: bool = False
    """Writes with 2 sigmoid, not sigmoid (arXiv 2411.12537)."""

    mla_heads: int | None = None
    """`heads`."""
    mla_head_dim: int | None = None
    """A head's own part of query and key; `head_dim`."""
    value_dim: int | None = None
    """What a head attends for; the head's own part of the key."""
    kv_latent: int = 32
    kv_shared_key: int = 16
    query_latent: int | None = None
    """Width of the queries' normed bottleneck; a full projection."""
    rope_theta: float | None = None
    """Base of the rotary positions on the shared part of queries and keys; without positions."""

    ffn_width: int = 160
    experts: int = 0
    chosen_experts: int = 0
    expert_width: int = 0
    shared_experts: int = 0
    """Experts that every token takes; one SwiGLU of so many times `expert_width`."""
    route_scale: float = 1.0
    renormalise: bool = True
    """Weights of a token's experts add up to `route_scale`."""

    def __post_init__(self) -> None:
        _check_kinds("layers", self.layers, MIXERS)
        _check_kinds("feed_forward", self.feed_forwards, FEED_FORWARDS)
        if len(self.feed_forwards) != len(self.layers):
            raise ValueError(
                f"feed_forward: {len(self.feed_forwards)} entries must be as many as "
                f"layers, {len(self.layers)}"
            )
        if self.gate_lower_bound is not None and not -5.0 <= self.gate_lower_bound < 0.0:
            raise ValueError(f"gate_lower_bound is {self.gate_lower_bound}; it must be in [-5, 0)")
        if self.rope_theta is not None and (self.kv_shared_key % 2 or self.kv_shared_key == 0):
            raise ValueError(f"kv_shared_key: {self.kv_shared_key} must be even, to be rotated")
        if "experts" in self.feed_forwards:
            self._check_experts()

    def _check_experts(self) -> None:
        for name in ("experts", "chosen_experts", "expert_width"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name}: {getattr(self, name)} must be at least 1 where feed_forward has "
                    "'experts'"
                )
        if self.chosen_experts > self.experts:
            raise ValueError(
                f"chosen_experts: {self.chosen_experts} must be at most experts, {self.experts}"
            )

    @property
    def feed_forwards(self) -> tuple[str, ...]:
        """The kind of every block's feed-forward layer."""
        return ("dense",) * len(self.layers) if self.feed_forward is None else self.feed_forward

    @property
    def kinds(self) -> tuple[tuple[str, str], ...]:
        """(mixer, feed-forward layer) of every block: blocks of one kind have equal shapes."""
        return tuple(zip(self.layers, self.feed_forwards, strict=True))


def _check_kinds(name: str, given: tuple[str, ...], allowed: tuple[str, ...]) -> None:
    for kind in given:
        if kind not in allowed:
            use = " or ".join(map(repr, allowed))
            raise ValueError(f"{name}: {kind!r} is not a layer; use {use}")


def kimi_linear_48b() -> KimiLinearConfig:
    """Kimi-Linear-48B-A3B as released: 20 KDA and 7 MLA layers, the last one MLA."""
    latent_attention = (4, 8, 12, 16, 20, 24, 27)
    return KimiLinearConfig(
        vocab_size=163840,
        width=2304,
        layers=tuple("mla" if i in latent_attention else "kda" for i in range(1, 28)),
        feed_forward=("dense",) + ("experts",) * 26,
        tied=False,
        rms_eps=1e-5,
        heads=32,
        head_dim=128,
        conv_taps=4,
        gate_rank=128,
        gate_lower_bound=None,
        kv_latent=512,
        kv_shared_key=64,
        ffn_width=9216,
        experts=256,
        chosen_experts=8,
        expert_width=1024,
        shared_experts=1,
        route_scale=2.446,
    )
