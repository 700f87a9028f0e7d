"""[P] The Kimi Linear policy: blocks of a mixing layer and a SwiGLU, tied embeddings.

Modules are written in flax.nnx; `build_model` hands over pure functions of the parameter tree.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int

from models.kimi_linear.cache import cache_spec, layer_numbers
from models.kimi_linear.config import KimiLinearConfig
from models.layers.context import Rows, Step, rows_of
from models.layers.kda import KimiDeltaAttention
from models.layers.mla import LatentAttention
from models.layers.norm import RMSNorm
from models.layers.parameters import matrix
from models.layers.swiglu import SwiGLU
from rl_jax.arrays import CHUNK, Array, Tree, round_up
from rl_jax.kernels.kda import api as kda
from rl_jax.model import Model

Mixer = KimiDeltaAttention | LatentAttention


class Block(nnx.Module):
    """x + mixer(norm x), then x + SwiGLU(norm x)."""

    def __init__(self, config: KimiLinearConfig, kind: str, rngs: nnx.Rngs):
        gain = (2 * len(config.layers)) ** -0.5
        self.mixer_norm = RMSNorm(config.width, config.rms_eps, "embed")
        self.mixer = _mixer(config, kind, gain, rngs)
        self.ffn_norm = RMSNorm(config.width, config.rms_eps, "embed")
        self.ffn = SwiGLU(config.width, config.ffn_width, gain, rngs)

    def forward(self, x: Float[Array, "R L D"], rows: Rows) -> Float[Array, "R L D"]:
        x = x + self.mixer.forward(self.mixer_norm(x), rows)
        return x + self.ffn(self.ffn_norm(x))

    def extend(
        self, x: Float[Array, "R n D"], step: Step, pool: Tree, layer: int
    ) -> tuple[Float[Array, "R n D"], Tree]:
        mixed, pool = self.mixer.extend(self.mixer_norm(x), step, pool, layer)
        x = x + mixed
        return x + self.ffn(self.ffn_norm(x)), pool


def _mixer(config: KimiLinearConfig, kind: str, out_gain: float, rngs: nnx.Rngs) -> Mixer:
    shape = {"width": config.width, "heads": config.heads, "head_dim": config.head_dim}
    common = {"eps": config.rms_eps, "out_gain": out_gain, "rngs": rngs}
    if kind == "mla":
        return LatentAttention(
            **shape, latent=config.kv_latent, shared_key=config.kv_shared_key, **common
        )
    return KimiDeltaAttention(
        **shape,
        taps=config.conv_taps,
        gate_rank=config.gate_rank,
        lower_bound=config.gate_lower_bound,
        **common,
    )


class KimiLinear(nnx.Module):
    """Embedding, blocks, final norm; the head is the embedding again."""

    def __init__(self, config: KimiLinearConfig, rngs: nnx.Rngs):
        shape = (config.vocab_size, config.width)
        self.embedding = matrix(rngs, shape, ("vocab", "embed"), config.width)
        self.blocks = nnx.Dict(
            {f"block_{i}": Block(config, kind, rngs) for i, kind in enumerate(config.layers)}
        )
        self.norm = RMSNorm(config.width, config.rms_eps, "embed")
        self.layers = config.layers

    def _numbered(self):
        numbers = layer_numbers(self.layers)
        return [(self.blocks[f"block_{i}"], n) for i, n in enumerate(numbers)]

    def forward(self, tokens: Int[Array, "R L"], rows: Rows) -> Float[Array, "R L D"]:
        x = self.embedding[...][tokens]
        for block, _ in self._numbered():
            x = block.forward(x, rows)
        return self.norm(x)

    def extend(
        self, tokens: Int[Array, "R n"], step: Step, pool: Tree
    ) -> tuple[Float[Array, "R n D"], Tree]:
        x = self.embedding[...][tokens]
        for block, number in self._numbered():
            x, pool = block.extend(x, step, pool, number)
        return self.norm(x), pool


def build_model(config: KimiLinearConfig) -> Model:
    """The policy as pure functions of a nested dict of arrays."""
    graph, abstract = nnx.split(nnx.eval_shape(lambda: KimiLinear(config, nnx.Rngs(0))))

    def init(key: Array) -> Tree:
        return nnx.to_pure_dict(nnx.state(KimiLinear(config, nnx.Rngs(key))))

    def axes() -> Tree:
        named = jax.tree.map(
            lambda leaf: leaf.get_metadata("axes"),
            abstract,
            is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
        )
        return nnx.to_pure_dict(named)

    def forward(params, tokens, positions, segment_ids):
        del positions  # without positional encoding, segments say all there is to know
        return nnx.merge(graph, params).forward(tokens, rows_of(segment_ids))

    def extend(params, tokens, n_valid, positions, pages, pool, io):
        n = tokens.shape[1]
        padded = n if n <= kda.SHORT else round_up(n, CHUNK)
        tokens = jnp.pad(tokens, ((0, 0), (0, padded - n)))
        step = Step(positions, n_valid, pages, io, n)
        hidden, pool = nnx.merge(graph, params).extend(tokens, step, pool)
        return hidden[:, :n], pool

    def head(params, hidden, start, size):
        rows = jax.lax.dynamic_slice_in_dim(params["embedding"], start, size, 0)
        return jnp.dot(hidden, rows.T, preferred_element_type=jnp.float32)

    return Model(init, axes, forward, cache_spec(config), extend, head, config.vocab_size)
