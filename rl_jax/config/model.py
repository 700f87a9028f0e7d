"""[N] The section [model]: what the policy is, told by its family, and how it is executed."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from rl_jax.config.base import Count, Positive, Section

Layers = Annotated[tuple[Literal["kda", "mla"], ...], Field(strict=False, min_length=1)]


FeedForwards = Annotated[tuple[Literal["dense", "experts"], ...], Field(strict=False, min_length=1)]


class Policy(Section):
    """What policies of every family have: sizes, and how the trainer executes them."""

    width: Count = 128
    heads: Count = 4
    head_dim: Count = 32
    ffn: Count = 256
    vocab_size: Count | None = None
    """Rows of the embedding; else the tokenizer's tokens, up to a multiple of 64."""
    tied: bool = True
    """The head is the embedding."""
    rms_eps: Positive = 1e-5
    scan: bool = False
    """Repeated layers are stacked and scanned: fewer to compile, one more copy of the weights."""
    remat: Literal["none", "block", "dots"] = "none"
    """Activations kept for gradients: all, a block's input, or products with weights as well."""
    compute: Literal["float32", "bfloat16"] = "float32"
    """Of products and what lies between layers."""


class KimiLinear(Policy):
    """`layers` names the token mixer of each layer, first to last, `feed_forward` what follows it.

    What is left out and has no number here takes what `models.kimi_linear.config` says.
    """

    family: Literal["kimi_linear"] = "kimi_linear"
    layers: Layers = ("kda", "kda", "kda", "mla")
    feed_forward: FeedForwards | None = None
    conv_taps: Count = 4
    gate_rank: Count | Literal["full"] = 32
    """Width of the decay and output gates' bottleneck."""
    full_output_gate: bool = False
    gate_lower_bound: Annotated[float, Field(ge=-5, lt=0)] | Literal["softplus"] = -5.0
    """Of a token's log-decay; "softplus" has none."""
    negative_eigenvalues: bool = False
    mla_heads: Count | None = None
    mla_head_dim: Count | None = None
    value_dim: Count | None = None
    kv_latent: Count = 32
    kv_shared_key: Annotated[int, Field(ge=0)] = 16
    query_latent: Count | None = None
    rope_theta: Positive | None = None
    """Left out, MLA has no positions."""
    experts: Annotated[int, Field(ge=0)] = 0
    chosen_experts: Annotated[int, Field(ge=0)] = 0
    expert_width: Annotated[int, Field(ge=0)] = 0
    shared_experts: Annotated[int, Field(ge=0)] = 0
    route_scale: Positive = 1.0
    renormalise: bool = True

    @model_validator(mode="after")
    def _feeds_every_layer(self) -> "KimiLinear":
        kinds = self.feed_forward or ("dense",) * len(self.layers)
        if len(kinds) != len(self.layers):
            raise ValueError(f"feed_forward needs an entry for each of {len(self.layers)} layers")
        sizes = self.chosen_experts, self.expert_width
        if "experts" in kinds and not (min(sizes) and self.chosen_experts <= self.experts):
            raise ValueError("layers of experts need chosen_experts <= experts and expert_width")
        return self


class RopeScaling(Section):
    """How rotary frequencies change for contexts `factor` times those of training."""

    kind: Literal["linear", "llama3", "yarn"]
    factor: Annotated[float, Field(ge=1)]
    original_max_positions: Count | None = None
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    whole_pairs: bool = True
    attention_factor: Positive | None = None

    @model_validator(mode="after")
    def _limits(self) -> "RopeScaling":
        if self.kind != "linear" and self.original_max_positions is None:
            raise ValueError(f"kind {self.kind!r} needs original_max_positions")
        if self.kind == "llama3" and self.low_freq_factor >= self.high_freq_factor:
            raise ValueError("low_freq_factor must be below high_freq_factor")
        return self


class Llama(Policy):
    """Llama 2 and 3, SmolLM2, Qwen2 (`qkv_bias`), Qwen3 (`qk_norm`)."""

    family: Literal["llama"] = "llama"
    layers: Count = 4
    kv_heads: Count = 2
    head_dim: Annotated[int, Field(ge=2, multiple_of=2)] = 32
    rope_theta: Positive = 10000.0
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    max_positions: Count | None = None

    @model_validator(mode="after")
    def _groups(self) -> "Llama":
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} needs to divide heads {self.heads}")
        return self


def _family(value: Any) -> Any:
    """Kimi Linear where a table names no family."""
    return {"family": "kimi_linear"} | value if isinstance(value, dict) else value


Model = Annotated[KimiLinear | Llama, Field(discriminator="family"), BeforeValidator(_family)]
"""The policy, told by its `family`."""
