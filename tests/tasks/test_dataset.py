"""The prompt stream: a permutation an epoch, seeded, resumable through JSON."""

import json

from rl_jax.tasks.dataset import prompt_indices


def take(stream, count: int) -> list[int]:
    return [next(stream) for _ in range(count)]


def test_each_prompt_once_an_epoch_and_epochs_differ():
    stream = prompt_indices(50, seed=3)
    first, second = take(stream, 50), take(stream, 50)
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second and first != list(range(50))


def test_the_seed_sets_the_order():
    assert take(prompt_indices(50, seed=3), 20) == take(prompt_indices(50, seed=3), 20)
    assert take(prompt_indices(50, seed=3), 20) != take(prompt_indices(50, seed=4), 20)


def test_resumes_anywhere_with_the_same_continuation():
    whole = take(prompt_indices(50, seed=3), 130)
    for cut in (0, 1, 49, 50, 77):
        stream = prompt_indices(50, seed=3)
        assert take(stream, cut) == whole[:cut]
        state = json.loads(json.dumps(stream.get_state()))
        take(stream, 9)
        resumed = prompt_indices(50, seed=3)
        resumed.set_state(state)
        assert take(resumed, 50) == whole[cut : cut + 50]
        stream.set_state(state)
        assert take(stream, 50) == whole[cut : cut + 50]
