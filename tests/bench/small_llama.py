"""A small policy of the Llama kind: generation, a train step, whole GRPO steps, against targets.

    python -m tests.bench.small_llama [--turns 5] [--updates 30] [--check]

Width 128, 4 layers, 4 heads on 2 KV heads, feed-forward 384, vocabulary 512, tied, float32.
Generated: 32 tokens of prompt, 64 new ones, by batches of 1 and of 64, through `Engine` as requests
come. Trained: one update of DIS on 16 rows of 256 tokens. Each turn does all; medians of turns, and
of the time of a decode step how much the compiled program takes by itself. Then `updates` GRPO
steps (`small_grpo`) of 8 prompts x 8 completions x 64 tokens: medians of a step and of its parts,
and the reward before and after. The last column is what was reached over what is wanted on two
quiet cores; with --check the exit status is 1 where one is below 1.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from statistics import median

import jax
import numpy as np

from launch import build
from rl_jax.arrays import Tree
from rl_jax.config.run import RunConfig
from rl_jax.dispatch import Dispatcher
from rl_jax.gateway.protocol import Request
from rl_jax.losses import recipes
from rl_jax.model import Model
from rl_jax.sampler.engine import Engine, Weights
from rl_jax.sampler.programs import Programs, sampled_of, step_inputs
from rl_jax.sampler.scheduler import Plan
from rl_jax.sampler.words import pack
from rl_jax.sharding import make_mesh
from rl_jax.trajectories.types import RolloutKey
from tests.bench import small_grpo
from tests.trainer.build import batch_of, random_trajectories

VOCAB, PROMPT, NEW = 512, 32, 64
ROWS, LENGTH = 16, 256
BATCHES = 1, 64
PARAMETERS = 853_120
MODEL = {"family": "llama", "width": 128, "layers": 4, "heads": 4, "kv_heads": 2}
MODEL |= {"head_dim": 32, "ffn": 384}
WANTED = {"generate 1": 2_500, "generate 64": 15_000, "train": 12_000}
"""Tokens a second."""
STEP_SECONDS, REWARD = 0.6, 0.17
"""Of a GRPO step at most, and after the updates at least (TRL's, from 0.001)."""


def configured(batch: int) -> RunConfig:
    """With as many decode slots as requests come at once."""
    sampler = {"slots": batch, "prefill_rows": min(batch, 16), "prefill_tokens": [PROMPT]}
    return RunConfig.model_validate(
        {
            "name": "small",
            "model": MODEL,
            "sampler": sampler | {"max_context": 128},
            "trainer": {"groups": ROWS, "group_size": 1, "row_length": LENGTH},
        }
    )


def generating(programs: Programs, params: Tree, batch: int) -> Callable[[], float]:
    """Seconds that `batch` requests take, from the first asked to the last done."""

    async def whole() -> float:
        engine = Engine(Weights(0, params), programs, dispatcher)
        loop, random = asyncio.create_task(engine.run()), np.random.default_rng(0)

        async def one(number: int) -> None:
            sequence = await engine.open(RolloutKey("bench", number, 0))
            prompt = tuple(random.integers(0, VOCAB, PROMPT).tolist())
            await engine.generate(sequence, Request(prompt, NEW, frozenset(), 1.0, training=True))
            await engine.close(sequence)

        begun = time.perf_counter()
        await asyncio.gather(*map(one, range(batch)))
        taken = time.perf_counter() - begun
        loop.cancel()
        await asyncio.wait([loop])
        return taken

    dispatcher = Dispatcher("sampler")
    return lambda: asyncio.run(whole())


def decoding(programs: Programs, params: Tree, batch: int) -> Callable[[], float]:
    """Seconds of a decode step's program alone, at a full batch in the middle of its requests."""
    inputs = step_inputs(Plan(1, [None] * batch, [0] * batch), programs.layout)
    tables = 1 + np.arange(inputs.pages.tokens.size).reshape(inputs.pages.tokens.shape)
    inputs = inputs._replace(
        n_valid=np.ones(batch, np.int32),
        positions=np.full(batch, PROMPT + NEW // 2, np.int32),
        pages=inputs.pages._replace(tokens=tables.astype(np.int32)),
    )
    pool = programs.make_pool()

    def call() -> float:
        nonlocal pool
        begun = time.perf_counter()
        for _ in range(NEW):
            pool, sampled = programs.steps[1](params, pool, pack(inputs))
            sampled_of(sampled)
        return (time.perf_counter() - begun) / NEW

    return call


def training(model: Model, params: Tree) -> Callable[[], float]:
    """Seconds of one update."""
    config, loss = configured(1), recipes.dis()
    own = random_trajectories([LENGTH] * ROWS, VOCAB, spread=0.3)
    batch = batch_of(own, build.rl_shape(config), loss)
    mesh = make_mesh(jax.devices(), 1, 1)
    shape = build.rl_shape(config)
    program = build.compile_step(model, loss, build.build_optimizer(config), mesh, shape)
    state, batch = program.init(params), jax.device_put(batch)

    def call() -> float:
        nonlocal state
        begun = time.perf_counter()
        state, report = program.step(state, batch)
        jax.block_until_ready((state, report))
        return time.perf_counter() - begun

    return call


def measured(turns: int) -> dict[str, float]:
    """Median seconds of each call."""
    model = build.build_policy(configured(1), VOCAB)
    mesh = make_mesh(jax.devices(), 1, 1)
    params = build.init_params(model, 0, mesh)
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == PARAMETERS
    calls: dict[str, Callable[[], float]] = {}
    for batch in BATCHES:
        programs = build.compile_sampler(configured(batch), model, mesh)
        calls[f"generate {batch}"] = generating(programs, params, batch)
        calls[f"decode {batch}"] = decoding(programs, params, batch)
    calls["train"] = training(model, params)
    taken = [{name: call() for name, call in calls.items()} for _ in range(turns + 1)][1:]
    return {name: median(turn[name] for turn in taken) for name in calls}


def speeds(seconds: dict[str, float]) -> list[float]:
    """Prints a row for each; what was reached over what is wanted, where something is."""
    tokens = {f"generate {batch}": batch * NEW for batch in BATCHES}
    tokens |= {f"decode {batch}": batch for batch in BATCHES} | {"train": ROWS * LENGTH}
    shares = []
    print("| | tokens a second | ms | of the target |\n|---|---|---|---|")
    for name, taken in seconds.items():
        speed = tokens[name] / taken
        share = f"{speed / WANTED[name]:.2f}" if name in WANTED else ""
        shares += [speed / WANTED[name]] if share else []
        told = f"{name}, program alone" if name.startswith("decode") else name
        print(f"| {told} | {speed:.0f} | {1e3 * taken:.3f} | {share} |")
    return shares


def learned(steps: list[small_grpo.Step]) -> list[float]:
    """Prints the GRPO rows; the first step, in which everything runs for the first time, is not in
    the times."""
    parts = {name: median(s.seconds[name] for s in steps[1:]) for name in small_grpo.PARTS}
    whole = median(sum(s.seconds.values()) for s in steps[1:])
    before, after = steps[0].reward, steps[-1].reward
    print("\n| GRPO step | s | share | of the target |\n|---|---|---|---|")
    for name, taken in parts.items():
        print(f"| {name} | {taken:.3f} | {taken / whole:.0%} | |")
    print(f"| whole | {whole:.3f} | 100% | {STEP_SECONDS / whole:.2f} |")
    print(
        f"| reward, {before:.3f} before, after {len(steps) - 1} updates | {after:.3f} | |", end=""
    )
    print(f" {after / REWARD:.2f} |")
    return [STEP_SECONDS / whole, after / REWARD]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--updates", type=int, default=30)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    shares = speeds(measured(given.turns))
    shares += learned(small_grpo.trained(MODEL, VOCAB, given.updates))
    sys.exit(given.check and min(shares) < 1.0)


if __name__ == "__main__":
    main()
