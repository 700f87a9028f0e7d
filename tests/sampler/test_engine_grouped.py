"""A policy of the Llama kind in the engine: 4 heads on 2 KV heads, on one device and on two."""

import asyncio

import numpy as np
import pytest

from rl_jax.gateway.protocol import Completion
from rl_jax.sampler.engine import Engine
from rl_jax.sampler.scheduler import Shapes
from tests.fakes import tiny
from tests.fakes.engine import Stepped, ask, prompt, request, run

SHAPES = Shapes(slots=4, prefill_rows=4, prefill_tokens=(16, 64))
TURNS = (request(prompt(0, 70), 9), request(prompt(1, 20), 40, temperature=1.0))


def served(tensor: int, others: int) -> list[Completion]:
    """The completions of TURNS, with other requests beside them."""
    built = tiny.compiled(tiny.LLAMA, SHAPES, 6, 192, tensor=tensor)
    weights = tiny.weights(layers=tiny.LLAMA, tensor=tensor)

    async def main(engine: Engine, _: Stepped) -> list[Completion]:
        beside = [
            asyncio.create_task(ask(engine, n, request(prompt(n, 3 + 17 * n % 90), 20 + n % 30)))
            for n in range(100, 100 + others)
        ]
        own = await ask(engine, 5, *TURNS)
        await asyncio.gather(*beside)
        return own

    return run(main, programs=built.programs, weights=weights)


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_request_is_bit_identical_alone_and_among_others(tensor: int) -> None:
    assert served(tensor, others=0) == served(tensor, others=9)


@pytest.mark.parametrize("tensor", [1, 2])
def test_logprobs_are_those_of_training(tensor: int) -> None:
    given = served(tensor, others=0)
    log = [*TURNS[0].new_tokens, *given[0].tokens, *TURNS[1].new_tokens, *given[1].tokens]
    scores = tiny.scored(tiny.params(tiny.LLAMA), log, layers=tiny.LLAMA)
    np.testing.assert_allclose(given[0].logprobs, scores[70:79], atol=1e-5)
    np.testing.assert_allclose(given[1].logprobs, scores[99:], atol=1e-5)
    assert len(log) == 70 + 9 + 20 + 40, "across the border at 128"
