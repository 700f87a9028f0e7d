"""[N] The arithmetic task as a run takes it: both splits and demonstrations, no tokenizer."""

from collections.abc import Sequence

from rl_jax.tasks.arithmetic.service import ArithmeticTask
from rl_jax.tasks.base import Message, TaskFamily
from rl_jax.tasks.dataset import prompt_indices


def family(*, seed: int, latency_median_s: float, patience: float) -> TaskFamily:
    """The same for every seed; no tool is waited for, and the demonstrator is always right."""
    del seed, latency_median_s, patience
    train = ArithmeticTask("train")

    def demonstration(index: int) -> Sequence[Message]:
        question = train.question(index)
        said = f"{question.first} {question.sign} {question.second} = {question.answer}"
        return (*train.prompt(index).messages, {"role": "assistant", "content": said})

    return TaskFamily(
        train=train,
        heldout=ArithmeticTask("heldout"),
        tokenizer_directory=None,
        demonstration=demonstration,
        order=lambda seed: prompt_indices(len(train), seed),
    )
