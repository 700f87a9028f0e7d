"""Requests against a real tiny policy: the same bits in any company, the trainer's numbers."""

import asyncio

import jax
import numpy as np
import pytest

from rl_jax import rng
from rl_jax.gateway.protocol import Completion, Finish, Request
from rl_jax.sampler.engine import Engine
from rl_jax.sampler.programs import step_inputs
from rl_jax.sampler.scheduler import Plan
from rl_jax.sampler.words import pack
from rl_jax.trajectories.types import Origin, Segment
from tests.fakes import tiny
from tests.fakes.engine import Stepped, ask, key, prompt, request, run

TOLERANCE = 1e-5
TURNS = (
    request(prompt(0, 37), 40),
    request(prompt(1, 20), 11, temperature=1.0),
    request(prompt(2, 1), 5),
)


def log_of(requests: tuple[Request, ...], completions: list[Completion]) -> list[int]:
    log: list[int] = []
    for asked, given in zip(requests, completions, strict=True):
        log += [*asked.new_tokens, *given.tokens]
    return log


def alone() -> list[Completion]:
    return run(lambda engine, _: ask(engine, 5, *TURNS))


@pytest.fixture(scope="module")
def expected() -> list[Completion]:
    return alone()


# --- the same bits, and the right ones -----------------------------------------------------------


def test_a_request_is_bit_identical_alone_and_among_64(expected: list[Completion]) -> None:
    """In the middle of 64 others of every length and pace: other slot, other neighbours."""

    async def main(engine: Engine, _: Stepped) -> tuple[list[Completion], int]:
        others = [
            (request(prompt(n, 3 + 5 * n % 90), 20 + n % 30, temperature=0.5 + n % 3), n)
            for n in range(100, 164)
        ]
        tasks = [asyncio.create_task(ask(engine, n, r)) for r, n in others[:40]]
        own = asyncio.create_task(ask(engine, 5, *TURNS))
        tasks += [asyncio.create_task(ask(engine, n, r)) for r, n in others[40:]]
        got = await own
        most = len([t for t in tasks if not t.done()])
        await asyncio.gather(*tasks)
        return got, most

    got, beside = run(main)
    assert got == expected
    assert beside > 0, "others were still running when it ended"


def test_an_engine_repeats_itself(expected: list[Completion]) -> None:
    assert alone() == expected


def test_logprobs_are_those_of_the_trainer(expected: list[Completion]) -> None:
    """Three turns, the second across the border at 64: prefill and decode against one forward."""
    log = log_of(TURNS, expected)
    scores = tiny.trainer_scores(tiny.params(), log)
    np.testing.assert_allclose(scores[1:], tiny.scored(tiny.params(), log)[1:], atol=TOLERANCE)
    at = 0
    for asked, given in zip(TURNS, expected, strict=True):
        at += len(asked.new_tokens)
        np.testing.assert_allclose(given.logprobs, scores[at : at + len(given.tokens)], atol=1e-5)
        assert given.logprobs == given.raw_logprobs
        at += len(given.tokens)
    assert at == len(log) == 37 + 40 + 20 + 11 + 1 + 5


def test_temperature_is_in_the_logprobs_and_not_in_the_raw_ones() -> None:
    asked = request(prompt(3, 30), 30, temperature=0.7)
    (given,) = run(lambda engine, _: ask(engine, 6, asked))
    log = [*asked.new_tokens, *given.tokens]
    for temperature, recorded in ((0.7, given.logprobs), (1.0, given.raw_logprobs)):
        scores = tiny.scored(tiny.params(), log, temperature=temperature)
        np.testing.assert_allclose(recorded, scores[30:], atol=TOLERANCE)


def test_greedy_takes_the_likeliest_token_of_the_trainer() -> None:
    asked = request(prompt(4, 10), 12, temperature=0.0, training=False)
    (given,) = run(lambda engine, _: ask(engine, 7, asked))
    log = [*asked.new_tokens, *given.tokens]
    best = tiny.teacher_forced(tiny.params(), log).argmax(axis=-1)
    assert best[10:].tolist() == list(given.tokens)


def test_a_token_is_the_one_that_its_own_uniform_draws(expected: list[Completion]) -> None:
    """By inversion in float64, with uniforms of (seed, key, request's number, place in the log)."""
    log = log_of(TURNS, expected)
    cumulative = np.exp(tiny.teacher_forced(tiny.params(), log)).cumsum(axis=-1)
    at = clear = 0
    for ordinal, (asked, given) in enumerate(zip(TURNS, expected, strict=True)):
        at += len(asked.new_tokens)
        places = np.arange(at, at + len(given.tokens))
        streams = np.array([rng.stream(key(5), ordinal)] * len(places), np.uint32)
        uniforms = rng.uniforms(rng.base(tiny.SEED, rng.Purpose.SAMPLE), streams, places)
        for place, uniform, token in zip(places, np.float64(uniforms), given.tokens, strict=True):
            if np.abs(cumulative[place] - uniform).min() > 1e-4:  # else rounding decides
                assert np.searchsorted(cumulative[place], uniform, side="right") == token
                clear += 1
        at += len(given.tokens)
    assert clear > 0.8 * 56


def test_the_hybrid_of_three_kda_layers_and_one_mla() -> None:
    asked = (request(prompt(8, 70), 20), request(prompt(9, 9), 10))
    built = tiny.compiled(tiny.HYBRID, tiny.FEW, 4, 128)
    weights = tiny.weights(layers=tiny.HYBRID)
    given = run(lambda engine, _: ask(engine, 8, *asked), programs=built.programs, weights=weights)
    log = log_of(asked, given)
    scores = tiny.scored(weights.params, log, layers=tiny.HYBRID)
    np.testing.assert_allclose(given[0].logprobs, scores[70:90], atol=TOLERANCE)
    np.testing.assert_allclose(given[1].logprobs, scores[99:], atol=TOLERANCE)


def test_the_uniform_depends_on_key_ordinal_and_position_only() -> None:
    """Another sample of the same prompt differs; a retry under the same key does not."""

    async def main(engine: Engine, _: Stepped) -> list[list[Completion]]:
        asked = request(prompt(0, 20), 20)
        return [await ask(engine, number, asked) for number in (1, 2, 1)]

    first, other, again = run(main)
    assert first == again
    assert first[0].tokens != other[0].tokens


# --- ends ----------------------------------------------------------------------------------------


def test_a_stop_token_ends_a_request_and_is_its_last_token(expected: list[Completion]) -> None:
    tokens = expected[0].tokens
    stop = tokens[7]
    first = tokens.index(stop)
    asked = request(prompt(0, 37), 40, stop=[stop])
    (given,) = run(lambda engine, _: ask(engine, 5, asked))
    assert given.finish is Finish.STOP
    assert given.tokens == tokens[: first + 1]
    assert given.logprobs == expected[0].logprobs[: first + 1]


def test_limits_of_the_request_and_of_the_context(expected: list[Completion]) -> None:
    assert [len(c.tokens) for c in expected] == [40, 11, 5]
    assert {c.finish for c in expected} == {Finish.LENGTH}

    async def main(engine: Engine, _: Stepped) -> list[Completion]:
        assert engine.max_context == 192
        sequence = await engine.open(key(1))
        given = [await engine.generate(sequence, request(prompt(0, 150), 10))]
        # 160 in the log: these do not fit, so they are not added, and shorter ones still do.
        given.append(await engine.generate(sequence, request(prompt(1, 32), 10)))
        given.append(await engine.generate(sequence, request(prompt(2, 20), 50)))
        given.append(await engine.generate(sequence, request((), 50)))
        assert max(s.end for s in engine.segments(sequence)) == 191
        return given

    given = run(main)
    assert [len(c.tokens) for c in given] == [10, 0, 12, 0]
    assert {c.finish for c in given} == {Finish.LENGTH}
    log = [*prompt(0, 150), *given[0].tokens, *prompt(2, 20), *given[2].tokens]
    assert len(log) == 192
    scores = tiny.scored(tiny.params(), log)
    np.testing.assert_allclose(given[2].logprobs, scores[180:], atol=TOLERANCE)


def test_segments_of_prefill_and_decode() -> None:
    async def main(engine: Engine, _: Stepped) -> tuple[Segment, ...]:
        sequence = await engine.open(key(1))
        await engine.generate(sequence, request(prompt(0, 70), 5))
        await engine.generate(sequence, request(prompt(1, 10), 3))
        return engine.segments(sequence)

    # The last sampled token of a request enters the cache with what follows it.
    assert run(main) == (
        Segment(0, 70, 0, Origin.PREFILL),
        Segment(70, 74, 0, Origin.DECODE),
        Segment(74, 85, 0, Origin.PREFILL),
        Segment(85, 87, 0, Origin.DECODE),
    )


def test_what_a_client_may_not_ask() -> None:
    async def main(engine: Engine, _: Stepped) -> None:
        sequence = await engine.open(key(1))
        with pytest.raises(ValueError, match="is empty: nothing to sample after"):
            await engine.generate(sequence, request(()))
        first = asyncio.create_task(engine.generate(sequence, request(prompt(0, 5))))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="has a request under way"):
            await engine.generate(sequence, request(prompt(0, 5)))
        assert len((await first).tokens) == 8

    run(main)


# --- pages and programs --------------------------------------------------------------------------


def test_open_waits_for_room_and_goes_on_when_one_closes() -> None:
    async def main(engine: Engine, _: Stepped) -> None:
        held = [await engine.open(key(n)) for n in range(72)]
        lost, first, second = (asyncio.create_task(engine.open(key(n))) for n in (80, 81, 82))
        await asyncio.sleep(0)
        await engine.close(held[3])
        lost.cancel()  # as it was about to wake: its place goes to the next
        await asyncio.sleep(0)
        await asyncio.wait([first])
        assert lost.cancelled() and not second.done()
        await engine.close(held[4])
        await engine.close(held[4])
        given = await engine.generate(await second, request(prompt(0, 30)))
        assert len(given.tokens) == 8

    run(main)


def test_there_are_pages_for_every_sequence_at_the_longest_context() -> None:
    """Twice as many as there is room for, so half of them wait for pages."""

    async def main(engine: Engine, _: Stepped) -> list[list[Completion]]:
        asked = [request(prompt(n, 100), 50) for n in range(8)]
        return await asyncio.gather(*(ask(engine, n, asked[n]) for n in range(8)))

    programs = tiny.compiled(tiny.HYBRID, tiny.FEW, 4, 128).programs
    given = run(main, programs=programs, weights=tiny.weights(layers=tiny.HYBRID))
    assert [len(c.tokens) for (c,) in given] == [28] * 8


def test_used_pages_are_as_good_as_new(expected: list[Completion]) -> None:
    """Pages that held another sequence's state and latents: the newcomer starts from zero."""

    async def main(engine: Engine, _: Stepped) -> list[Completion]:
        await asyncio.gather(*(ask(engine, n, request(prompt(n, 150), 40)) for n in range(20)))
        return await ask(engine, 5, *TURNS)

    assert run(main) == expected


def test_programs_take_their_shapes_only() -> None:
    """Compiled ahead: another shape is an error, never a retrace."""
    programs = tiny.compiled().programs
    inputs = pack(step_inputs(Plan(1, [None] * 32, [0] * 32), programs.layout))
    with pytest.raises(TypeError, match="was compiled"):
        programs.steps[1](tiny.params(), programs.make_pool(), inputs)
    other = jax.tree.map(lambda leaf: leaf[..., :1], tiny.params())
    inputs = pack(step_inputs(Plan(1, [None] * 64, [0] * 64), programs.layout))
    with pytest.raises(TypeError, match="was compiled"):
        programs.steps[1](other, programs.make_pool(), inputs)
