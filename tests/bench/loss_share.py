"""What a loss costs of a train step: value and gradient on ready scores against the whole step.

    python -m tests.bench.loss_share [configs/quickstart.toml] [--repeats 50]

At the size of the configuration's update, on one device, by turns; medians. A loss is taken over
all microbatches of the batch, its first pass for statistics included where it has one. The step is
that of DIS, which needs no forward pass under other weights: the cheapest there is.
Exit status 1 where a loss costs more than the bound.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from launch import build
from rl_jax.arrays import Array, Tree
from rl_jax.config.load import load
from rl_jax.config.run import RunConfig
from rl_jax.losses import recipes
from rl_jax.losses.evaluate import evaluate
from rl_jax.losses.types import Loss, Scores
from rl_jax.sharding import make_mesh
from rl_jax.trainer.batches import Batch
from rl_jax.trainer.step import make_train_step
from tests.trainer.build import batch_of, random_trajectories, start

BOUND = 0.02
WARM_UP = 2
RECIPES: dict[str, Callable[[], Loss]] = {
    "dis": recipes.dis,
    "grpo": recipes.grpo,
    "gspo": recipes.gspo,
    "m2po": recipes.m2po,
}


def full_batch(config: RunConfig, vocab: int) -> Batch:
    """As many trajectories as an update has, each as long as the context allows."""
    members = config.trainer.groups * config.trainer.group_size
    own = random_trajectories([config.sampler.max_context] * members, vocab, spread=0.3)
    advantages = np.random.default_rng(0).choice([-1.0, 1.0], members).tolist()
    return batch_of(own, build.rl_shape(config), recipes.dis(), advantages)


def ready_scores(batch: Batch, needs: frozenset[str]) -> Scores:
    """[M, R, L]: log-probabilities some way off those that were recorded."""
    draws = np.random.default_rng(1)

    def near() -> np.ndarray:
        noise = draws.normal(0.0, 0.1, batch.mask.shape)
        return np.where(batch.mask, batch.behavior + noise, 0.0).astype(np.float32)

    return Scores(
        current=near(),
        behavior=batch.behavior,
        mask=batch.mask,
        advantages=batch.advantages,
        lag=batch.lag,
        segments=batch.segment_ids,
        tasks=np.zeros_like(batch.lag),
        returns=np.zeros_like(batch.advantages),
        others={name: near() for name in sorted(needs)},
    )


def loss_program(loss: Loss) -> Callable[[Scores, Array], tuple[Array, Array]]:
    """(scores, weights) [M, R, L] -> (loss, gradient in `current`), one microbatch at a time."""
    transform = loss.transform

    def value(current: Array, part: Scores, weights: Array, stats: Any) -> Array:
        terms, _ = evaluate(transform, part._replace(current=current), stats, transform.init())
        return jnp.sum(weights * terms.loss)

    def run(scores: Scores, weights: Array) -> tuple[Array, Array]:
        stats = ()
        if transform.stats:
            each = jax.lax.map(transform.stats, scores)
            stats = jax.tree.map(lambda leaf: leaf.sum(axis=0), each)

        def one(part: tuple[Scores, Array]) -> tuple[Array, Array]:
            return jax.value_and_grad(value)(part[0].current, part[0], part[1], stats)

        losses, gradients = jax.lax.map(one, (scores, weights))
        return losses.sum(), gradients

    return jax.jit(run)


def step_program(config: RunConfig, vocab: int, batch: Batch) -> Callable[[], Tree]:
    """A train step that goes on from the state that the call before left."""
    model, loss = build.build_policy(config, vocab), recipes.dis()
    optimizer = build.build_optimizer(config)
    step = make_train_step(model, loss, {"policy": optimizer}, vocab_chunk=model.vocab_size)
    compiled = jax.jit(step, donate_argnums=0)
    params = build.init_params(model, config.seed, make_mesh(jax.devices(), 1, 1))
    state = start(loss, optimizer, params)

    def call() -> Tree:
        nonlocal state
        state, report = compiled(state, batch)
        return state, report

    return call


def milliseconds(call: Callable[[], Tree]) -> float:
    begun = time.perf_counter()
    jax.block_until_ready(call())
    return 1e3 * (time.perf_counter() - begun)


def measure(config: RunConfig, repeats: int) -> dict[str, float]:
    """Median milliseconds by recipe, and of the `step`."""
    vocab = build.build_renderer(build.build_task(config)).vocab_size
    batch = full_batch(config, vocab)
    calls = {"step": step_program(config, vocab, batch)}
    for name, recipe in RECIPES.items():
        loss = recipe()
        inputs = jax.device_put((ready_scores(batch, loss.transform.needs), batch.weights))
        calls[name] = partial(loss_program(loss), *inputs)
    taken = [{n: milliseconds(call) for n, call in calls.items()} for _ in range(repeats + WARM_UP)]
    return {name: median(turn[name] for turn in taken[WARM_UP:]) for name in calls}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", type=Path, nargs="?", default=Path("configs/quickstart.toml"))
    parser.add_argument("--repeats", type=int, default=50)
    given = parser.parse_args()
    medians = measure(load(given.config), given.repeats)
    step = medians.pop("step")
    print(f"| recipe | loss, ms | step, ms | share (bound {BOUND:.0%}) |\n|---|---|---|---|")
    for name, loss in medians.items():
        print(f"| {name} | {loss:.3f} | {step:.1f} | {loss / step:.2%} |")
    return int(max(medians.values()) > BOUND * step)


if __name__ == "__main__":
    sys.exit(main())
