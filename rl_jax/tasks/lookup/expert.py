"""[N] Scripted demonstrations of the lookup task, perfect or careless, for a supervised start."""

from rl_jax.tasks.base import Message
from rl_jax.tasks.lookup.questions import Question, hash_of, opening

TIRES_AFTER = 2
"""Hops after which a careless demonstrator may stop and answer with what it has."""


def demonstration(
    question: Question, *, patience: float = 1.0, seed: int = 0
) -> tuple[Message, ...]:
    """The finished conversation: one call a hop, then the answer.

    `patience` is the share of questions longer than TIRES_AFTER hops that are followed to their
    end; the others are answered after TIRES_AFTER hops, and so wrongly. Which ones follows from
    `seed` and the question alone.
    """
    messages: list[Message] = [opening(question)]
    entity = question.start
    tires = hash_of("patience", seed, question.text) >= patience * 2.0**64
    hops = min(question.hops, TIRES_AFTER) if tires else question.hops
    for relation, found in zip(question.relations[:hops], question.path, strict=False):
        call = {"name": relation, "arguments": entity}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "content": found})
        entity = found
    messages.append({"role": "assistant", "content": entity})
    return tuple(messages)
