"""[P] The Kimi Linear policy: blocks of a mixing layer and a SwiGLU or a mixture of experts.

Modules are written in flax.nnx; `build_model` hands over pure functions of the parameter tree.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Float, Int

from models import stages
from models.execution import Execution, activations, cast
from models.kimi_linear.block import Block, Choices
from models.kimi_linear.cache import cache_spec, layer_numbers
from models.kimi_linear.config import KimiLinearConfig
from models.layers.context import Rows, Step, rows_of
from models.layers.embedding import logits, look_up
from models.layers.moe import balanced
from models.layers.norm import RMSNorm
from models.layers.parameters import matrix, noted
from rl_jax.arrays import CHUNK, Array, Tree, round_up
from rl_jax.kernels.kda import api as kda
from rl_jax.model import Model, Routing


class KimiLinear(nnx.Module):
    """Embedding, blocks, final norm; the head is the embedding again where they are tied."""

    def __init__(self, config: KimiLinearConfig, rngs: nnx.Rngs):
        words = (config.vocab_size, config.width), ("vocab", "embed"), config.width
        self.embedding = matrix(rngs, *words, exact=True)
        self.blocks = nnx.Dict(
            {f"block_{i}": Block(config, kind, rngs) for i, kind in enumerate(config.kinds)}
        )
        self.norm = RMSNorm(config.width, config.rms_eps, "embed")
        if not config.tied:
            self.head = matrix(rngs, *words, exact=True)
        self.kinds = config.kinds

    def _in_order(self) -> list[Block]:
        return [self.blocks[f"block_{i}"] for i in range(len(self.kinds))]

    def _embed(self, tokens: Int[Array, "R L"], execution: Execution) -> Float[Array, "R L D"]:
        table = self.embedding[...]
        return look_up(table, tokens, activations(table, execution))

    def forward(
        self, tokens: Int[Array, "R L"], rows: Rows, replayed: list[Choices], execution: Execution
    ) -> tuple[Float[Array, "R L D"], list[Choices]]:
        """`replayed` and what comes back are one entry per block."""

        def body(block: Block, x: Array, choices: Choices) -> tuple[Array, Choices]:
            return block.forward(x, rows, choices)

        x = self._embed(tokens, execution)
        x, own = stages.run(body, self._in_order(), self.kinds, x, replayed, execution)
        return self.norm(x), own

    def extend(
        self, tokens: Int[Array, "R n"], step: Step, pool: Tree, execution: Execution
    ) -> tuple[Float[Array, "R n D"], Tree, list[Choices]]:
        x, own = self._embed(tokens, execution), []
        numbers = layer_numbers(tuple(mixer for mixer, _ in self.kinds))
        for block, number in zip(self._in_order(), numbers, strict=True):
            x, pool, choices = block.extend(x, step, pool, number)
            own.append(choices)
        return self.norm(x), pool, own


class _Functions(NamedTuple):
    """Pure functions of the parameters; `Model` and `Routing` say what they take."""

    config: KimiLinearConfig
    execution: Execution
    graph: Any
    abstract: nnx.State

    def init(self, key: Array) -> Tree:
        return nnx.to_pure_dict(nnx.state(KimiLinear(self.config, nnx.Rngs(key))))

    def axes(self) -> Tree:
        return noted(self.abstract, "axes")

    def _merged(self, params: Tree) -> KimiLinear:
        exact = noted(self.abstract, "exact")
        return nnx.merge(self.graph, cast(params, exact, self.execution))

    def routed(self, params, tokens, positions, segment_ids, choices):
        rows = rows_of(segment_ids, positions if self.config.rope_theta else None)
        replayed: list[Choices] = [None] * len(self.config.layers)
        if choices is not None:
            for number, layer in enumerate(self.expert_layers):
                replayed[layer] = jnp.asarray(choices)[:, :, number]
        return self._merged(params).forward(tokens, rows, replayed, self.execution)

    def extended(self, params, tokens, n_valid, positions, pages, pool, io):
        n = tokens.shape[1]
        padded = n if n <= kda.SHORT else round_up(n, CHUNK)
        tokens = jnp.pad(tokens, ((0, 0), (0, padded - n)))
        step = Step(positions, n_valid, pages, io, n)
        hidden, pool, own = self._merged(params).extend(tokens, step, pool, self.execution)
        return hidden[:, :n], pool, [choices[:, :n] for choices in own if choices is not None]

    def head(self, params, hidden, start, size):
        table = params["embedding" if self.config.tied else "head"]
        return logits(table, hidden, start, size)

    @property
    def expert_layers(self) -> list[int]:
        return [i for i, kind in enumerate(self.config.feed_forwards) if kind == "experts"]

    def routing(self) -> Routing | None:
        """None without experts."""
        layers, config = self.expert_layers, self.config
        if not layers:
            return None

        def forward(params, tokens, positions, segment_ids, choices):
            hidden, own = self.routed(params, tokens, positions, segment_ids, choices)
            return hidden, jnp.stack([choices for choices in own if choices is not None], 2)

        def extend(*arguments):
            hidden, pool, own = self.extended(*arguments)
            return hidden, pool, jnp.stack(own, 2)

        def balance(params, load, rate):
            blocks = dict(params["blocks"])
            for number, layer in enumerate(layers):
                block = blocks[f"block_{layer}"]
                bias = balanced(block["ffn"]["router_bias"], load[number], rate)
                blocks[f"block_{layer}"] = block | {"ffn": block["ffn"] | {"router_bias": bias}}
            return params | {"blocks": blocks}

        return Routing(len(layers), config.experts, config.chosen_experts, forward, extend, balance)


def build_model(config: KimiLinearConfig, execution: Execution | None = None) -> Model:
    """The policy as pure functions of a nested dict of arrays; `execution` None is the default."""
    graph, abstract = nnx.split(nnx.eval_shape(lambda: KimiLinear(config, nnx.Rngs(0))))
    made = _Functions(config, execution or Execution(), graph, abstract)

    def forward(params, tokens, positions, segment_ids):
        return made.routed(params, tokens, positions, segment_ids, None)[0]

    def extend(*arguments):
        return made.extended(*arguments)[:2]

    return Model(
        made.init,
        made.axes,
        forward,
        cache_spec(config),
        extend,
        made.head,
        config.vocab_size,
        made.routing(),
    )
