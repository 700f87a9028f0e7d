"""[P] One block of the hybrid: a mixing layer, then a feed-forward layer."""

from flax import nnx
from jaxtyping import Float, Int

from models.kimi_linear.config import KimiLinearConfig
from models.layers.context import Rows, Step
from models.layers.kda import KimiDeltaAttention
from models.layers.mla import LatentAttention
from models.layers.moe import MixtureOfExperts
from models.layers.norm import RMSNorm
from models.layers.swiglu import SwiGLU
from rl_jax.arrays import Array, Tree

Mixer = KimiDeltaAttention | LatentAttention
FeedForward = SwiGLU | MixtureOfExperts
Choices = Int[Array, "R L k"] | None
"""Of a block's experts; None where it has none."""


class Block(nnx.Module):
    """x + mixer(norm x), then x + ffn(norm x)."""

    def __init__(self, config: KimiLinearConfig, kind: tuple[str, str], rngs: nnx.Rngs):
        gain = (2 * len(config.layers)) ** -0.5
        mixer, ffn = kind
        self.mixer_norm = RMSNorm(config.width, config.rms_eps, "embed")
        self.mixer = _latent(config, gain, rngs) if mixer == "mla" else _delta(config, gain, rngs)
        self.ffn_norm = RMSNorm(config.width, config.rms_eps, "embed")
        self.ffn = _experts(config, gain, rngs) if ffn == "experts" else _dense(config, gain, rngs)

    def forward(
        self, x: Float[Array, "R L D"], rows: Rows, replayed: Choices
    ) -> tuple[Float[Array, "R L D"], Choices]:
        """Also the own choices of its experts."""
        x = x + self.mixer.forward(self.mixer_norm(x), rows)
        return self._feed(x, rows.segments >= 0, replayed)

    def extend(
        self, x: Float[Array, "R n D"], step: Step, pool: Tree, layer: int
    ) -> tuple[Float[Array, "R n D"], Tree, Choices]:
        mixed, pool = self.mixer.extend(self.mixer_norm(x), step, pool, layer)
        x, own = self._feed(x + mixed, step.valid(x.shape[1]), None)
        return x, pool, own

    def _feed(self, x: Array, valid: Array, replayed: Choices) -> tuple[Array, Choices]:
        normed = self.ffn_norm(x)
        if isinstance(self.ffn, SwiGLU):
            return x + self.ffn(normed), None
        out, own = self.ffn(normed, valid, replayed)
        return x + out, own


def _delta(config: KimiLinearConfig, out_gain: float, rngs: nnx.Rngs) -> KimiDeltaAttention:
    return KimiDeltaAttention(
        width=config.width,
        heads=config.heads,
        head_dim=config.head_dim,
        taps=config.conv_taps,
        decay_rank=config.gate_rank,
        gate_rank=None if config.full_output_gate else config.gate_rank,
        lower_bound=config.gate_lower_bound,
        write_scale=2.0 if config.negative_eigenvalues else 1.0,
        eps=config.rms_eps,
        out_gain=out_gain,
        rngs=rngs,
    )


def _latent(config: KimiLinearConfig, out_gain: float, rngs: nnx.Rngs) -> LatentAttention:
    return LatentAttention(
        width=config.width,
        heads=config.mla_heads or config.heads,
        head_dim=config.mla_head_dim or config.head_dim,
        latent=config.kv_latent,
        shared_key=config.kv_shared_key,
        eps=config.rms_eps,
        out_gain=out_gain,
        rngs=rngs,
        value_dim=config.value_dim,
        query_latent=config.query_latent,
        rope_theta=config.rope_theta,
    )


def _dense(config: KimiLinearConfig, out_gain: float, rngs: nnx.Rngs) -> SwiGLU:
    return SwiGLU(config.width, config.ffn_width, out_gain, rngs)


def _experts(config: KimiLinearConfig, out_gain: float, rngs: nnx.Rngs) -> MixtureOfExperts:
    return MixtureOfExperts(
        width=config.width,
        experts=config.experts,
        chosen=config.chosen_experts,
        hidden=config.expert_width,
        shared=config.shared_experts,
        scale=config.route_scale,
        renormalise=config.renormalise,
        out_gain=out_gain,
        rngs=rngs,
    )
