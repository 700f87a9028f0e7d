"""[P] The shape of a policy of the Llama kind."""

from dataclasses import dataclass

from models.layers.rope import RopeScaling

__all__ = ["LlamaConfig", "RopeScaling"]


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and options; Qwen2 has `qkv_bias`, Qwen3 `qk_norm`."""

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    """heads * head_dim need not be the width."""
    ffn_width: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    """RMSNorm of every head's queries and keys before they are turned."""
    qkv_bias: bool = False
    tied: bool = True
    """The head is the embedding."""
    rms_eps: float = 1e-5
    max_positions: int | None = None
    """What the weights were made for; nothing here depends on it."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "width", "layers", "heads", "kv_heads", "head_dim", "ffn_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} must be at least 1")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads: {self.kv_heads} must divide heads = {self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: {self.head_dim} must be even, for pairs are turned")
