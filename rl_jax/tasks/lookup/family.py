"""[H] The lookup task as a run takes it: both splits, the tokenizer, demonstrations."""

from pathlib import Path

from rl_jax.tasks.base import TaskFamily
from rl_jax.tasks.dataset import prompt_indices
from rl_jax.tasks.lookup.expert import demonstration
from rl_jax.tasks.lookup.service import LookupTask


def family(*, seed: int, latency_median_s: float, patience: float) -> TaskFamily:
    """`patience` is the demonstrator's: the share of long questions it follows to their end."""
    train = LookupTask("train", seed=seed, median_latency=latency_median_s)
    return TaskFamily(
        train=train,
        heldout=LookupTask("heldout", seed=seed, median_latency=latency_median_s),
        tokenizer_directory=Path(__file__).parent,
        demonstration=lambda index: demonstration(
            train.question(index), patience=patience, seed=seed
        ),
        order=lambda seed: prompt_indices(len(train), seed),
    )
