"""Whole GRPO steps of a small policy, of the run's own parts, and where their time goes.

Prompts are letters, the reward is the share of the letter a in what was written. A step generates
through `Engine`, assembles groups, packs a batch with advantages, updates, copies the parameters
and swaps them into the engine. Ratios are those to the sampler's own log-probabilities: every step
pushes, so the proximal policy is the sampler's, and a pass for it would say the same.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from launch import build
from rl_jax import rng
from rl_jax.advantages import Estimates, standardised
from rl_jax.arrays import Tree
from rl_jax.config.run import RunConfig
from rl_jax.dispatch import Dispatcher
from rl_jax.gateway.protocol import Request
from rl_jax.losses.combine import chain
from rl_jax.losses.objectives import clipped
from rl_jax.losses.ratios import current_over_behavior
from rl_jax.losses.reductions import sequence_mean_token_mean
from rl_jax.losses.types import Loss
from rl_jax.model import Model
from rl_jax.sampler.engine import Engine, Weights
from rl_jax.sharding import make_mesh
from rl_jax.snapshots.publisher import served_copy
from rl_jax.trainer.batches import advantaged, build_batch
from rl_jax.trajectories.types import NOT_SAMPLED, Group, RolloutKey, Status, Trajectory

PROMPTS, MEMBERS, NEW, PROMPT = 8, 8, 64, 32
PARTS = "generation", "batch", "train step", "push"
"""Of a step, in order."""


class Step(NamedTuple):
    """Of one step: the mean reward before its update, and seconds of its parts."""

    reward: float
    seconds: dict[str, float]


def configured(model: dict[str, object]) -> RunConfig:
    """All completions at once; two chunks of 64 tokens hold a prompt and what follows."""
    sampler = {"slots": PROMPTS * MEMBERS, "prefill_rows": 16, "prefill_tokens": [PROMPT]}
    trainer = {"groups": PROMPTS, "group_size": MEMBERS, "row_length": 128}
    adam = {"learning_rate": 1e-3, "adam_b2": 0.999, "weight_decay": 0.01, "reset_at_push": False}
    return RunConfig.model_validate(
        {
            "name": "small",
            "model": model,
            "sampler": sampler | {"max_context": 128},
            "trainer": trainer | adam,
        }
    )


def letters(count: int) -> Tokenizer:
    """A tokenizer with a letter for each id: a to z, then those from U+0100 on."""
    known = [chr(ord("a") + i) for i in range(26)] + [chr(0x100 + i) for i in range(count - 26)]
    made = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(known)}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    return made


class Grpo:
    """A policy under training and the engine that samples it; `step` does one whole step."""

    def __init__(self, config: RunConfig, model: Model, params: Tree, mesh: Mesh) -> None:
        self._tokenizer = letters(model.vocab_size)
        objective = chain(current_over_behavior(), clipped(0.2, 0.2))
        self._loss = Loss(objective, sequence_mean_token_mean)
        self._shape, self._advantage = build.rl_shape(config), standardised()
        optimizer = build.build_optimizer(config)
        self._program = build.compile_step(model, self._loss, optimizer, mesh, self._shape)
        self._state = self._program.init(params)
        programs = build.compile_sampler(config, model, mesh)
        self._trainer = Dispatcher("trainer")
        self.engine = Engine(Weights(0, self._copy()), programs, Dispatcher("sampler"))

    async def step(self, number: int) -> Step:
        """Its prompts are its own."""
        seconds: dict[str, float] = {}
        with _timed(seconds, "generation"):
            rollouts = self._prompts(number)
            groups = list(await asyncio.gather(*(self._group(*own) for own in rollouts)))
        with _timed(seconds, "batch"):
            members = [member for group in groups for member in group.members]
            built = build_batch(members, self._loss.reduction, number, self._shape)
            batch = advantaged(built, self._advantage, groups, [Estimates()] * len(groups))
        with _timed(seconds, "train step"):
            self._state, _ = await self._trainer.run(self._program.step, self._state, batch)
        with _timed(seconds, "push"):
            self._state = await self._trainer.run(self._program.after_push, self._state)
            pushed = await self._trainer.run(self._copy)
            await self.engine.swap(Weights(number + 1, pushed))
        reward = float(np.mean([member.reward or 0.0 for member in members]))
        return Step(reward, seconds)

    def _copy(self) -> Tree:
        return served_copy(self._state.params["policy"], "float32")

    def _prompts(self, number: int) -> Iterator[tuple[int, str]]:
        draws = rng.host(0, rng.Purpose.PROMPTS, number)
        for prompt in range(number * PROMPTS, (number + 1) * PROMPTS):
            ids = draws.integers(0, self._tokenizer.get_vocab_size(), PROMPT)
            yield prompt, self._tokenizer.decode(ids.tolist())

    async def _group(self, prompt: int, text: str) -> Group:
        keys = [RolloutKey("letters", prompt, sample) for sample in range(MEMBERS)]
        members = await asyncio.gather(*(self._rollout(key, text) for key in keys))
        return Group("letters", prompt, tuple(members))

    async def _rollout(self, key: RolloutKey, text: str) -> Trajectory:
        ids = self._tokenizer.encode(text).ids
        sequence = await self.engine.open(key)
        asked = Request(tuple(ids), NEW, frozenset(), 1.0, training=True)
        done = await self.engine.generate(sequence, asked)
        segments = self.engine.segments(sequence)
        await self.engine.close(sequence)
        written = self._tokenizer.decode(list(done.tokens))
        known = len(ids)
        return Trajectory(
            key=key,
            tokens=np.array([*ids, *done.tokens], np.int32),
            loss_mask=np.arange(known + NEW) >= known,
            behavior_logprobs=np.array([0.0] * known + list(done.logprobs), np.float32),
            versions=np.array([NOT_SAMPLED] * known + list(done.versions), np.int32),
            segments=segments,
            temperature=1.0,
            reward=written.count("a") / len(written),
            status=Status.COMPLETED,
            turns=1,
        )


@contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[part] = time.perf_counter() - began


async def run(grpo: Grpo, updates: int) -> list[Step]:
    """One step after the other, one more than `updates`: its reward is that after them."""
    loop = asyncio.create_task(grpo.engine.run())
    done = [await grpo.step(number) for number in range(updates + 1)]
    loop.cancel()
    await asyncio.wait([loop])
    return done


def trained(model: dict[str, object], vocab_size: int, updates: int) -> list[Step]:
    """What `run` gives of a fresh policy of the `model` section."""
    config, mesh = configured(model), make_mesh(jax.devices(), 1, 1)
    policy = build.build_policy(config, vocab_size)
    params = build.init_params(policy, 0, mesh)
    return asyncio.run(run(Grpo(config, policy, params, mesh), updates))
