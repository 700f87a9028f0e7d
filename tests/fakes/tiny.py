"""Tiny policies and their compiled programs, each made once a session."""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from launch import build
from models import kimi_linear, llama
from rl_jax.arrays import CHUNK, Tree, round_up
from rl_jax.model import Model
from rl_jax.sampler.engine import Weights
from rl_jax.sampler.layout import make_layout
from rl_jax.sampler.programs import Programs, compile_programs
from rl_jax.sampler.scheduler import Shapes
from rl_jax.sharding import make_mesh, param_shardings
from rl_jax.trainer.scores import token_logprobs

SHORT = ("kda", "mla")
HYBRID = ("kda", "kda", "kda", "mla")
LLAMA = ("llama", "llama")
"""Two layers of 4 heads and 2 KV heads."""
ROUTED = ("kda", "mla", "experts")
"""SHORT with 6 experts after each mixer, 2 for a token; its sampler records which."""
VOCAB = 64
SEED = 7
SHAPES = Shapes(slots=64, prefill_rows=8, prefill_tokens=(16, 64))
FEW = Shapes(slots=4, prefill_rows=2, prefill_tokens=(64,))


@cache
def model(layers: tuple[Any, ...] = SHORT) -> Model:
    if layers == LLAMA:
        sizes = {"heads": 4, "kv_heads": 2, "head_dim": 16, "ffn_width": 48}
        return llama.build_model(llama.LlamaConfig(VOCAB, width=32, layers=2, **sizes))
    experts = {
        "feed_forward": ("experts", "experts"), "experts": 6, "chosen_experts": 2,
        "expert_width": 16, "shared_experts": 1,
    }  # fmt: skip
    return kimi_linear.build_model(
        kimi_linear.KimiLinearConfig(
            vocab_size=VOCAB,
            width=32,
            layers=SHORT if layers == ROUTED else layers,
            heads=4,
            head_dim=8,
            kv_latent=16,
            kv_shared_key=8,
            ffn_width=48,
            gate_rank=8,
            **(experts if layers == ROUTED else {}),
        )
    )


@cache
def mesh(data: int = 1, tensor: int = 1) -> Mesh:
    return make_mesh(jax.devices(), data, tensor)


@cache
def params(layers: tuple[Any, ...] = SHORT, seed: int = 0, data: int = 1, tensor: int = 1) -> Tree:
    """The weights of seed `seed`."""
    return random_params(model(layers), seed, mesh(data, tensor))


def random_params(model: Model, seed: int, mesh: Mesh) -> Tree:
    """Random weights from the host: compiling an initialiser takes longer than most tests."""
    random = np.random.default_rng(seed)

    def one(path: Any, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        noise = random.normal(size=leaf.shape)
        match path[-1].key:
            case "decay_bias":
                value = noise * 0.5 - 4.0  # as at initialisation: most of a state survives a token
            case "decay_rate_log":
                value = noise * 0.1
            case _:
                value = noise * 0.25 if leaf.ndim > 1 else noise * 0.1 + 1.0
        return value.astype(leaf.dtype)

    made = jax.tree_util.tree_map_with_path(one, jax.eval_shape(model.init, jax.random.key(0)))
    return jax.device_put(made, param_shardings(model.axes(), mesh))


class Compiled(NamedTuple):
    model: Model
    programs: Programs


@cache
def compiled(
    layers: tuple[Any, ...] = SHORT,
    shapes: Shapes = SHAPES,
    sequences: int = 72,
    max_context: int = 192,
    data: int = 1,
    tensor: int = 1,
) -> Compiled:
    """The sampler's programs."""
    own, place = model(layers), mesh(data, tensor)
    layout = make_layout(
        own.cache_spec, data=data, tensor=tensor, sequences=sequences, max_context=max_context
    )
    shapes = shapes._replace(shards=data)
    abstract = build.abstract_params(own, place)
    record = own.routing is not None
    arrays = own, abstract, layout, shapes, place
    return Compiled(own, compile_programs(*arrays, SEED, record=record))


@cache
def _forward(layers: tuple[Any, ...], length: int) -> Any:
    own = model(layers)

    def logits(params: Tree, tokens: Any, segments: Any) -> Any:
        hidden = own.forward(params, tokens, jax.numpy.arange(length)[None], segments)
        return own.head(params, hidden, jax.numpy.int32(0), VOCAB)

    return jax.jit(logits)


def teacher_forced(
    params: Tree,
    tokens: Sequence[int],
    temperature: float = 1.0,
    layers: tuple[Any, ...] = SHORT,
) -> np.ndarray:
    """float64[T, VOCAB]: log-probabilities of each place of a log by training's forward pass.

    Entry t is of the token at t, given those before; entry 0 means nothing.
    """
    length = round_up(len(tokens), 4 * CHUNK)
    row = np.zeros((1, length), np.int32)
    row[0, : len(tokens)] = tokens
    segments = np.where(np.arange(length) < len(tokens), 0, -1).astype(np.int32)[None]
    logits = np.float64(_forward(layers, length)(params, row, segments))[0] / temperature
    scores = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    return np.roll(scores, 1, axis=0)[: len(tokens)]


def scored(params: Tree, tokens: Sequence[int], **rest: Any) -> np.ndarray:
    """float64[T]: those of the tokens that the log has."""
    return np.take_along_axis(
        teacher_forced(params, tokens, **rest), np.asarray(tokens)[:, None], axis=1
    )[:, 0]


def trainer_scores(params: Tree, tokens: Sequence[int]) -> np.ndarray:
    """float32[T]: the same by the trainer's own function, in vocabulary chunks of 16."""
    length = round_up(len(tokens), CHUNK)
    row = np.pad(np.asarray(tokens, np.int32), (0, length - len(tokens)))[None]
    segments = np.where(np.arange(length) < len(tokens), 0, -1).astype(np.int32)[None]
    heat = np.ones((1, length), np.float32)

    def score(params: Tree, *arrays: Any) -> Any:
        return token_logprobs(model(), params, *arrays, vocab_chunk=16)

    places = np.arange(length, dtype=np.int32)[None]
    return np.asarray(jax.jit(score)(params, row, places, segments, heat))[0, : len(tokens)]


def weights(version: int = 0, layers: tuple[Any, ...] = SHORT, **place: int) -> Weights:
    """Version n has the weights of seed n."""
    return Weights(version, params(layers, version, **place))
