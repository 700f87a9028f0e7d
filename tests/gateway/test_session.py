"""A session's log is what the sampler saw, id for id, and every column fits it."""

import numpy as np
import pytest

from rl_jax.gateway.protocol import Completion, Finish, Request, RequestFailed
from rl_jax.gateway.session import Session
from rl_jax.trajectories.types import NOT_SAMPLED, Origin, RolloutKey, Segment, Status
from tests.fakes.client import FakeSampler, Turn
from tests.queues.clock import run

KEY = RolloutKey("t", 3, 1)
STOP = 9


def session(sampler: FakeSampler, *, temperature: float = 0.5, training: bool = True) -> Session:
    return Session(
        sampler, KEY, temperature=temperature, stop_ids=frozenset({STOP}), training=training
    )


def saying(*turns: Turn) -> FakeSampler:
    return FakeSampler(lambda key: iter(turns))


def test_ids_go_in_and_out_as_they_are() -> None:
    """Two turns and an answer between them: each request sends what is new, once."""
    current = 4
    sampler = saying((7, 7, STOP), (8, STOP))
    sampler.version = lambda: current

    async def main() -> None:
        nonlocal current
        async with session(sampler) as own:
            assert own.oldest_version == NOT_SAMPLED
            own.append([1, 2])
            own.append([3])
            first = await own.generate(20)
            assert own.oldest_version == 4
            own.append([5, 6])
            current = 5
            await own.generate(30)
            assert own.oldest_version == 4
            made = own.trajectory(Status.COMPLETED, 1.0, turns=2)
        assert first == Completion(
            (7, 7, STOP), (-0.125, -0.25, -0.375), (-0.125, -0.25, -0.375), (4, 4, 4), Finish.STOP
        )
        assert [(k, r.new_tokens, r.max_new_tokens) for k, r in sampler.requests] == [
            (KEY, (1, 2, 3), 20),
            (KEY, (5, 6), 30),
        ]
        assert sampler.closed == [0]
        n = NOT_SAMPLED
        assert made.tokens.tolist() == [1, 2, 3, 7, 7, STOP, 5, 6, 8, STOP]
        assert made.versions.tolist() == [n, n, n, 4, 4, 4, n, n, 5, 5]
        assert made.loss_mask.tolist() == [v != n for v in made.versions]
        expected = [0, 0, 0, -0.125, -0.25, -0.375, 0, 0, -0.125, -0.25]
        assert made.behavior_logprobs.tolist() == expected
        dtypes = (made.tokens.dtype, made.versions.dtype, made.behavior_logprobs.dtype)
        assert dtypes == (np.int32, np.int32, np.float32)
        assert (made.key, made.temperature, made.reward, made.turns) == (KEY, 0.5, 1.0, 2)
        assert made.segments == (Segment(0, 1, 5, Origin.PREFILL),)

    run(main)


def test_requests_carry_the_sessions_parameters() -> None:
    async def main() -> None:
        for temperature, training in ((0.7, True), (0.0, False)):
            sampler = saying((1,))
            async with session(sampler, temperature=temperature, training=training) as own:
                own.append([1])
                await own.generate(5)
            ((_, sent),) = sampler.requests
            assert sent == Request((1,), 5, frozenset({STOP}), temperature, training=training)

    run(main)


def test_what_the_context_has_no_room_for_is_not_in_the_log() -> None:
    """Such a trajectory is as long as the sampler's log, which is at most the context."""

    async def main() -> None:
        async with session(saying((7, STOP), ())) as own:
            own.append([1, 2])
            await own.generate(5)
            own.append([3] * 500)
            given = await own.generate(5)
            assert (given.tokens, given.finish) == ((), Finish.LENGTH)
            made = own.trajectory(Status.TRUNCATED, 0.0)
        assert made.tokens.tolist() == [1, 2, 7, STOP]
        assert made.loss_mask.tolist() == [False, False, True, True]

    run(main)


def test_a_log_that_nothing_was_sampled_in() -> None:
    async def main() -> None:
        async with session(saying(RequestFailed("no"))) as own:
            own.append([1, 2])
            with pytest.raises(RequestFailed):
                await own.generate(5)
            made = own.trajectory(Status.FAILED, None, reason="no")
        assert made.tokens.tolist() == [1, 2]
        assert not made.loss_mask.any() and made.oldest_version == NOT_SAMPLED

    run(main)


def test_a_session_closes_however_it_ends() -> None:
    async def main() -> None:
        sampler = saying()
        with pytest.raises(ZeroDivisionError):
            async with session(sampler):
                raise ZeroDivisionError
        assert sampler.closed == [0]

    run(main)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"top_p": 0.9}, "top_p must be 1.0, got 0.9: a truncated distribution biases the"),
        ({"temperature": 0.0}, "temperature must be above 0 in a training request, got 0.0"),
        ({"temperature": -1.0}, "temperature must be above 0 in a training request, got -1.0"),
        ({"temperature": -1.0, "training": False}, "temperature must be at least 0, got -1.0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
    ],
)
def test_a_request_that_would_bias_training_is_refused_in_one_line(
    wrong: dict[str, float], said: str
) -> None:
    fields = {"new_tokens": (1,), "max_new_tokens": 4, "stop_ids": frozenset(), "temperature": 1.0}
    with pytest.raises(ValueError) as caught:
        Request(**(fields | wrong))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_greedy_is_for_evaluation() -> None:
    assert Request((1,), 4, frozenset(), 0.0, training=False).temperature == 0.0


class Recording(FakeSampler):
    """Its n-th completion has n rows of experts, all n."""

    async def generate(self, sequence: int, request: Request) -> Completion:
        given = await super().generate(sequence, request)
        n = len(self.requests)
        return given._replace(choices=np.full((n, 2, 1), n, np.uint8))


@pytest.mark.parametrize("training", [True, False])
def test_choices_of_all_turns_are_in_the_trajectory_of_training(training: bool) -> None:
    async def main() -> None:
        sampler = Recording(lambda key: iter([(7, 7, STOP), (8, STOP)]))
        async with session(sampler, temperature=0.5, training=training) as own:
            own.append([1, 2])
            await own.generate(20)
            own.append([5])
            await own.generate(30)
            made = own.trajectory(Status.COMPLETED, 1.0, turns=2)
        if training:
            assert made.choices is not None and made.choices.dtype == np.uint8
            assert made.choices[:, :, 0].tolist() == [[1, 1], [2, 2], [2, 2]]
        else:
            assert made.choices is None

    run(main)
