"""[P] The policy of the Llama kind: equal blocks of grouped-query attention and a SwiGLU.

Modules are written in flax.nnx; `build_model` hands over pure functions of the parameter tree.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int

from models import stages
from models.execution import Execution, activations, cast
from models.layers.attention import GroupedQueryAttention
from models.layers.context import Rows, Step, rows_of
from models.layers.embedding import logits, look_up
from models.layers.norm import RMSNorm
from models.layers.parameters import matrix, noted
from models.layers.rope import Rotation, rotation
from models.layers.swiglu import SwiGLU
from models.llama.cache import cache_spec
from models.llama.config import LlamaConfig
from rl_jax.arrays import Array, Tree
from rl_jax.model import Model


class Block(nnx.Module):
    """x + attention(norm x), then x + SwiGLU(norm x)."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        gain = (2 * config.layers) ** -0.5
        self.attention_norm = RMSNorm(config.width, config.rms_eps, "embed")
        self.attention = GroupedQueryAttention(
            width=config.width,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            qk_norm=config.qk_norm,
            bias=config.qkv_bias,
            eps=config.rms_eps,
            out_gain=gain,
            rngs=rngs,
        )
        self.ffn_norm = RMSNorm(config.width, config.rms_eps, "embed")
        self.ffn = SwiGLU(config.width, config.ffn_width, gain, rngs)

    def forward(
        self, x: Float[Array, "R L D"], rows: Rows, turn: Rotation
    ) -> Float[Array, "R L D"]:
        x = x + self.attention.forward(self.attention_norm(x), rows, turn)
        return x + self.ffn(self.ffn_norm(x))

    def extend(
        self, x: Float[Array, "R n D"], step: Step, turn: Rotation, pool: Tree, layer: int
    ) -> tuple[Float[Array, "R n D"], Tree]:
        mixed, pool = self.attention.extend(self.attention_norm(x), step, turn, pool, layer)
        x = x + mixed
        return x + self.ffn(self.ffn_norm(x)), pool


class Llama(nnx.Module):
    """Embedding, blocks, final norm; the head is the embedding again where they are tied."""

    def __init__(self, config: LlamaConfig, rngs: nnx.Rngs):
        words = (config.vocab_size, config.width), ("vocab", "embed"), config.width
        self.embedding = matrix(rngs, *words, exact=True)
        self.blocks = nnx.Dict({f"block_{i}": Block(config, rngs) for i in range(config.layers)})
        self.norm = RMSNorm(config.width, config.rms_eps, "embed")
        if not config.tied:
            self.head = matrix(rngs, *words, exact=True)
        self.config = config

    def _in_order(self) -> list[Block]:
        return [self.blocks[f"block_{i}"] for i in range(self.config.layers)]

    def _begin(
        self, tokens: Int[Array, "R L"], positions: Int[Array, "R L"], execution: Execution
    ) -> tuple[Float[Array, "R L D"], Rotation]:
        table, own = self.embedding[...], self.config
        x = look_up(table, tokens, activations(table, execution))
        return x, rotation(positions, own.head_dim, own.rope_theta, own.rope_scaling, x.dtype)

    def forward(
        self, tokens: Int[Array, "R L"], positions: Int[Array, "R L"], rows: Rows, how: Execution
    ) -> Float[Array, "R L D"]:
        x, turn = self._begin(tokens, positions, how)

        def body(block: Block, x: Array, nothing: None) -> tuple[Array, None]:
            return block.forward(x, rows, turn), nothing

        blocks, nothing = self._in_order(), [None] * self.config.layers
        x, _ = stages.run(body, blocks, ("block",) * len(blocks), x, nothing, how)
        return self.norm(x)

    def extend(
        self, tokens: Int[Array, "R n"], step: Step, pool: Tree, how: Execution
    ) -> tuple[Float[Array, "R n D"], Tree]:
        x, turn = self._begin(tokens, step.places(tokens.shape[1]), how)
        for layer, block in enumerate(self._in_order()):
            x, pool = block.extend(x, step, turn, pool, layer)
        return self.norm(x), pool


def build_model(config: LlamaConfig, execution: Execution | None = None) -> Model:
    """The policy as pure functions of a nested dict of arrays, executed as by default."""
    execution = execution or Execution()
    graph, abstract = nnx.split(nnx.eval_shape(lambda: Llama(config, nnx.Rngs(0))))
    exact = noted(abstract, "exact")

    def merged(params: Tree) -> Llama:
        return nnx.merge(graph, cast(params, exact, execution))

    def init(key: Array) -> Tree:
        return nnx.to_pure_dict(nnx.state(Llama(config, nnx.Rngs(key))))

    def axes() -> Tree:
        return noted(abstract, "axes")

    def forward(params, tokens, positions, segment_ids):
        tokens, positions, segment_ids = map(jnp.asarray, (tokens, positions, segment_ids))
        return merged(params).forward(tokens, positions, rows_of(segment_ids), execution)

    def extend(params, tokens, n_valid, positions, pages, pool, io):
        tokens, n_valid, positions = map(jnp.asarray, (tokens, n_valid, positions))
        step = Step(positions, n_valid, pages, io, tokens.shape[1])
        return merged(params).extend(tokens, step, pool, execution)

    def head(params, hidden, start, size):
        table = params["embedding" if config.tied else "head"]
        return logits(table, hidden, start, size)

    return Model(init, axes, forward, cache_spec(config), extend, head, config.vocab_size)
