"""Our models against transformers' on the checkpoints of tests/golden/hf, imported as runs do it.

`tests/interop/hf_models.py` made them and recorded what transformers computes, in float32.
"""

import json
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import kimi_linear, llama
from models.checkpoint.layout import Table, restore
from models.checkpoint.load import load_params, open_checkpoint
from rl_jax.arrays import Array, Tree, round_up
from rl_jax.model import Model
from tests.fakes.cache import DENSE, dense_pool
from tests.fakes.compiling import QUICK

GOLDEN = Path(__file__).parents[1] / "golden" / "hf"
SLOW = ("llama2", "smollm2")
"""What they have others have as well."""
NAMES = [
    pytest.param(path.parent.name, marks=[pytest.mark.slow] * (path.parent.name in SLOW))
    for path in sorted(GOLDEN.glob("*/expected.safetensors"))
]
BUILD = {"llama": llama.build_model, "kimi_linear": kimi_linear.build_model}
BOUND = {"llama": 1e-5, "kimi_linear": 1e-4}
"""Of the largest difference of a logit over the largest logit, and of a gradient's relative L2.
Seen: 2e-6 and 4e-6, and 2e-5 for both; transformers' own prefill and decode of Kimi Linear differ
by 2e-5 too."""


class Case(NamedTuple):
    bound: float
    model: Model
    params: Tree
    table: Table
    expected: dict[str, np.ndarray]


def read(file: Path) -> dict[str, np.ndarray]:
    """A safetensors file, by its specification alone."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    kinds = {"F32": np.float32, "I32": np.int32}
    return {
        name: np.frombuffer(data[start + own["data_offsets"][0] : start + own["data_offsets"][1]],
                            kinds[own["dtype"]]).reshape(own["shape"])
        for name, own in json.loads(data[8:start]).items()
        if name != "__metadata__"
    }  # fmt: skip


@cache
def case(name: str) -> Case:
    checkpoint = open_checkpoint(GOLDEN / name)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = load_params(checkpoint, lambda path: device)
    model = BUILD[checkpoint.family.name](checkpoint.config)
    bound = BOUND[checkpoint.family.name]
    return Case(
        bound, model, params, checkpoint.table, read(GOLDEN / name / "expected.safetensors")
    )


compiled = partial(jax.jit, static_argnums=0, compiler_options=QUICK)
"""Compiling is most of what these tests take."""


def logits_of(model: Model, params: Tree, tokens: Array) -> Array:
    padded = round_up(len(tokens), 64)
    row = jnp.zeros((1, padded), jnp.int32).at[0, : len(tokens)].set(tokens)
    place = jnp.arange(padded)[None]
    hidden = model.forward(params, row, place, jnp.where(place < len(tokens), 0, -1))
    return model.head(params, hidden[0, : len(tokens)], jnp.int32(0), model.vocab_size)


@compiled
def forward(model: Model, params: Tree, tokens: Array) -> tuple[Array, Tree]:
    """The logits and the gradients of the mean cross-entropy of the next token."""

    def loss(params: Tree) -> tuple[Array, Array]:
        logits = logits_of(model, params, tokens)
        scores = jax.nn.log_softmax(logits[:-1])
        return -jnp.mean(jnp.take_along_axis(scores, tokens[1:, None], -1)), logits

    slopes, logits = jax.grad(loss, has_aux=True)(params)
    return logits, slopes


@compiled
def step(model: Model, params: Tree, token: Array, position: Array, pool: Tree) -> Tree:
    rows = jnp.arange(1)
    hidden, pool = model.extend(
        params, token[None, None], jnp.ones(1, jnp.int32), position[None], rows, pool, DENSE
    )
    return model.head(params, hidden[0, 0], jnp.int32(0), model.vocab_size), pool


@cache
def prefilled(name: str) -> tuple[Array, Tree]:
    own = case(name)
    return forward(own.model, own.params, own.expected["tokens"])


def distance(ours: Array, theirs: np.ndarray) -> float:
    return float(np.abs(np.asarray(ours) - theirs).max() / np.abs(theirs).max())


@pytest.mark.parametrize("name", NAMES)
def test_prefill_and_gradients(name: str) -> None:
    own = case(name)
    ours, slopes = prefilled(name)
    assert distance(ours, own.expected["prefill"]) < own.bound
    check_gradients(own, slopes)


@pytest.mark.parametrize("name", NAMES)
def test_decode_token_by_token(name: str) -> None:
    own = case(name)
    tokens, theirs = own.expected["tokens"], own.expected["decode"]
    pool, ours = dense_pool(own.model.cache_spec, 1, round_up(len(tokens), 64)), []
    for position, token in enumerate(tokens):
        logits, pool = step(own.model, own.params, token, jnp.int32(position), pool)
        ours.append(logits)
    assert distance(jnp.stack(ours[-len(theirs) :]), theirs) < own.bound


def check_gradients(own: Case, ours: Tree) -> None:
    wanted = {
        key.removeprefix("gradient "): value
        for key, value in own.expected.items()
        if key.startswith("gradient ")
    }
    assert len(wanted) > 10
    found = {tensor: np.full(value.shape, np.nan) for tensor, value in wanted.items()}
    for path, leaf in own.table.items():
        mine = np.asarray(flat(ours, path))
        for part in leaf.parts:
            if part.tensor in found:
                restore(part, mine, found[part.tensor])
    for tensor, theirs in wanted.items():
        error = np.linalg.norm(found[tensor] - theirs) / np.linalg.norm(theirs)
        assert error < own.bound, (tensor, error)


@pytest.mark.parametrize("name", ["kimi_linear", "llama3", "qwen3"])
def test_every_parameter_is_seen(name: str) -> None:
    """The comparison would fail if any one were something else: where its numbers move by 0.1 along
    the slope the loss moves by 0.1 |slope|_1, and no loss moves by more than twice a logit."""
    own = case(name)
    largest, (_, slopes) = np.abs(own.expected["prefill"]).max(), prefilled(name)
    for path in own.table:
        told = 0.1 * np.abs(flat(slopes, path)).sum() / 2 / largest
        if told < 10 * own.bound:
            ours, _ = forward(own.model, moved(own.params, path), own.expected["tokens"])
            told = distance(ours, own.expected["prefill"])
        assert told > 10 * own.bound, path


def moved(params: Tree, path: str) -> Tree:
    """With a wave added to one parameter: a router's bias changes choices and has no slope."""
    *parents, last = path.split("/")
    params = jax.tree.map(lambda leaf: leaf, params)
    inside = flat(params, "/".join(parents)) if parents else params
    wave = 0.1 * np.cos(np.arange(inside[last].size, dtype=np.float32))
    inside[last] = inside[last] + wave.reshape(inside[last].shape)
    return params


def flat(tree: Tree, path: str) -> Array:
    for name in path.split("/"):
        tree = tree[name]
    return tree
