"""Trainer and sampler of a tiny policy, each sharded over four of eight devices; made once.

The same trainer on one device is the oracle.
"""

import re
from collections import Counter
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from launch import build
from rl_jax.advantages import LOG_RATIOS, VALUES
from rl_jax.arrays import Tree
from rl_jax.config.run import RunConfig
from rl_jax.losses import recipes
from rl_jax.model import Model
from rl_jax.sampler.programs import Programs, step_inputs
from rl_jax.sampler.scheduler import Plan
from rl_jax.sampler.words import pack
from rl_jax.sharding import make_trainer_mesh
from rl_jax.trainer.batches import Batch, Shape
from rl_jax.trainer.state import TrainState, adam
from tests.fakes.compiling import quickly
from tests.trainer.build import batch_of, random_trajectories

VOCAB = 64
SHAPE = Shape(microbatches=2, rows=2, row_length=128)
EPS = 1e-3
"""Of Adam: a gradient that rounding makes of nothing must not move a parameter by a whole step."""
ESTIMATES = frozenset({VALUES, LOG_RATIOS})
CONFIG = RunConfig.model_validate(
    {
        "name": "sharded",
        "model": {
            "width": 32,
            "layers": ["kda", "mla"],
            "heads": 4,
            "head_dim": 8,
            "ffn": 48,
            "kv_latent": 16,
            "kv_shared_key": 8,
        },
        "mesh": {"trainer": {"data": 2, "tensor": 2}, "sampler": {"data": 2, "tensor": 2}},
        "trainer": {
            "group_size": 4,
            "rows_per_microbatch": 2,
            "row_length": 128,
            "push_every": 2,
            "adam_eps": EPS,
        },
        "sampler": {
            "slots": 4,
            "prefill_rows": 2,
            "prefill_tokens": [64],
            "max_context": 128,
            "sessions": 4,
        },
        "rollout": {"in_flight": 4},
    }
)


class Trainer(NamedTuple):
    program: build.StepProgram
    params: Tree

    def start(self) -> TrainState:
        return self.program.init(self.params)


@cache
def model() -> Model:
    return build.build_policy(CONFIG, VOCAB)


def mesh(data: int, tensor: int) -> Mesh:
    """The first devices."""
    return make_trainer_mesh(jax.devices(), data=data, tensor=tensor)


@cache
def params(data: int, tensor: int, optimised: bool = False) -> Tree:
    """Version-0 parameters of seed 0; `optimised` ones have the bits of a user's."""
    with quickly(not optimised):
        return build.init_params(model(), 0, mesh(data, tensor))


@cache
def trainer(data: int, tensor: int, optimised: bool = False) -> Trainer:
    loss, optimizer = build.build_loss(CONFIG), build.build_optimizer(CONFIG)
    critic = build.Critic(recipes.critic(), adam(1e-2, eps=EPS))
    parts = model(), loss, optimizer, mesh(data, tensor), SHAPE, critic, ESTIMATES
    with quickly(not optimised):
        program = build.compile_step(*parts)
    return Trainer(program, params(data, tensor))


@cache
def sampler(optimised: bool = False) -> Programs:
    """On the devices after the trainer's."""
    with quickly(not optimised):
        return build.compile_sampler(CONFIG, model(), build.build_meshes(CONFIG).sampler)


def batch(seed: int = 0) -> Batch:
    """Both microbatches used; ratios on both sides of the band; advantages for returns."""
    own = random_trajectories([120, 90, 64, 60, 40, 30], VOCAB, seed, spread=1.5)
    advantages = [1.0, -1.0, 0.5, -0.5, 2.0, -2.0]
    made = batch_of(own, SHAPE, build.build_loss(CONFIG), advantages)
    return made._replace(returns=made.advantages)


def small_batch() -> Batch:
    """Two rows, one microbatch."""
    own = random_trajectories([120, 90], VOCAB, spread=1.5)
    return batch_of(own, SHAPE, build.build_loss(CONFIG), [1.0, -1.0])


def idle(programs: Programs) -> np.ndarray:
    """A decode step in which no row is used."""
    return pack(step_inputs(Plan(1, [None] * 4, [0] * 4), programs.layout))


def collectives(compiled: Any) -> Counter[str]:
    """How often each collective stands in a compiled program."""
    names = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    return Counter(re.findall(rf"\s({names})(?:-start)?\(", compiled.as_text()))


def distance(a: Tree, b: Tree) -> float:
    """Relative L2 over all leaves."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    apart, whole = 0.0, 0.0
    for x, y in pairs:
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        apart, whole = apart + ((x - y) ** 2).sum(), whole + (y**2).sum()
    return float(np.sqrt(apart / whole))
