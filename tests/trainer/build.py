"""Trajectories of chosen tokens, and train steps of the bigram model."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rl_jax.losses.types import Loss
from rl_jax.trainer.batches import Batch, Shape, build_batch, with_advantages
from rl_jax.trainer.state import Optimizer, TrainState, init_state
from rl_jax.trainer.step import TrainStep, make_train_step
from rl_jax.trajectories.types import NOT_SAMPLED, RolloutKey, Status, Trajectory
from tests.fakes.bigram import bigram, table
from tests.fakes.compiling import QUICK

VOCAB = 8


def trajectory_of(
    tokens: Sequence[int],
    sampled: Sequence[bool] | None = None,
    *,
    sample: int = 0,
    prompt: int = 0,
    version: int = 0,
    behavior: float | Sequence[float] = -1.0,
    temperature: float = 1.0,
    reward: float = 1.0,
) -> Trajectory:
    """All but the first token sampled, unless `sampled` says otherwise."""
    mask = np.arange(len(tokens)) > 0 if sampled is None else np.asarray(sampled, bool)
    return Trajectory(
        key=RolloutKey("lookup", prompt, sample),
        tokens=np.asarray(tokens, np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, np.float32(behavior), np.float32(0)),
        versions=np.where(mask, np.int32(version), np.int32(NOT_SAMPLED)),
        segments=(),
        temperature=temperature,
        reward=reward,
        status=Status.COMPLETED,
    )


def random_trajectories(
    lengths: Sequence[int], vocab: int = VOCAB, seed: int = 0, spread: float = 0.5
) -> list[Trajectory]:
    """Random tokens, about two thirds of them sampled; behavior near a uniform policy's."""
    draws = np.random.default_rng(seed)
    return [
        trajectory_of(
            draws.integers(vocab, size=n),
            (draws.random(n) < 2 / 3) & (np.arange(n) > 0),
            sample=i,
            version=int(draws.integers(3)),
            behavior=draws.normal(-np.log(vocab), spread, n),
        )
        for i, n in enumerate(lengths)
    ]


def batch_of(
    trajectories: Sequence[Trajectory],
    shape: Shape,
    loss: Loss,
    advantages: Sequence[float] | None = None,
    published: int = 2,
) -> Batch:
    """One advantage for all tokens of a trajectory; 1.0 unless told."""
    per_token = [
        np.full(len(t.tokens), a, np.float32)
        for t, a in zip(trajectories, advantages or [1.0] * len(trajectories), strict=True)
    ]
    built = build_batch(trajectories, loss.reduction, published, shape)
    nothing = [np.zeros_like(a) for a in per_token]
    return with_advantages(built.batch, built.places, per_token, nothing)


def descent() -> Optimizer:
    """Plain gradient descent of rate 1: parameters before minus after is the gradient."""
    return Optimizer(optax.scale(-1.0), lambda step: jnp.float32(1.0))


def start(loss: Loss, optimizer: Optimizer, params: Any = None) -> TrainState:
    tree = table(VOCAB) if params is None else params
    return init_state({"policy": tree}, {"policy": optimizer}, {"policy": loss.transform.init()})


@cache
def bigram_step(loss: Loss, optimizer: Optimizer) -> TrainStep:
    made = make_train_step(bigram(VOCAB), loss, {"policy": optimizer}, vocab_chunk=4)
    return jax.jit(made, compiler_options=QUICK)
