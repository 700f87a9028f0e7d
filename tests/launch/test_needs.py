"""What a loss or an advantage asks for and the configuration does not give."""

from collections.abc import Callable
from typing import Any

import pytest

from launch import build
from launch.needs import check_experts, check_frozen, check_needs
from rl_jax.advantages import Advantage, Estimates, PerToken
from rl_jax.config.base import UserError
from rl_jax.config.run import RunConfig
from rl_jax.losses.reductions import token_mean
from rl_jax.losses.types import Loss, stateless
from rl_jax.trajectories.types import Group
from tests.fakes import tiny
from tests.fakes.bigram import bigram

GAE = {"name": "length_adaptive_gae"}


def config(**sections: object) -> RunConfig:
    return RunConfig.model_validate({"name": "test", **sections})


def refused(**sections: object) -> str:
    with pytest.raises(UserError) as caught:
        check_needs(config(**sections))
    return str(caught.value)


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A loss that needs these scores."""

    def patch(*scores: str) -> None:
        transform = stateless("asking", lambda scores, terms: (terms, {}), scores)
        monkeypatch.setattr(build, "build_loss", lambda config: Loss(transform, token_mean))

    return patch


def test_what_is_provided_is_fine(asking: Callable[..., None]) -> None:
    check_needs(config())
    check_needs(config(trainer={"group_size": 1}, advantage=GAE, critic={}))
    asking("value", "entropy", "proximal", "reference", "ema(0.9, 0.0)", "teacher(a)")
    check_needs(config(advantage=GAE, critic={}, teachers={"a": "runs/a/snapshots/3"}))


def test_an_advantage_without_a_critic() -> None:
    assert refused(advantage=GAE) == (
        'advantage.name = "length_adaptive_gae" needs the values of a critic: add the section '
        "[critic]"
    )


def test_a_loss_without_a_critic(asking: Callable[..., None]) -> None:
    asking("value")
    said = 'loss.recipe = "dis" needs the values of a critic: add the section [critic]'
    assert refused() == said


def test_a_teacher_that_is_not_named(asking: Callable[..., None]) -> None:
    asking("teacher(math)")
    said = 'loss.recipe = "dis" needs teacher(math): add teachers.math = "DIR/VERSION", a published'
    assert refused(teachers={"code": "runs/a/snapshots/3"}) == said + " version"


@pytest.mark.parametrize("name", ["standardised", "group_mean"])
def test_single_rollouts_have_no_group(name: str) -> None:
    assert refused(trainer={"group_size": 1}, advantage={"name": name}) == (
        f'advantage.name = "{name}" compares the rollouts of a group: needs trainer.group_size of '
        "at least 2, not 1"
    )


def test_a_critic_with_nothing_to_learn() -> None:
    said = '[critic] has nothing to learn: advantage.name = "group_mean" gives no returns'
    assert refused(critic={}, advantage={"name": "group_mean"}) == said


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (
            ["head.*", "trunk.attention*"],
            'critic.frozen[1] = "trunk.attention*" matches no parameter; there are head.bias, '
            "trunk.table and 1 more",
        ),
        (["*"], "critic.frozen matches every parameter: the critic has nothing to learn"),
    ],
)
def test_frozen_parameters_that_are_not_there_or_are_all(patterns: list[str], said: str) -> None:
    with pytest.raises(UserError) as caught:
        check_frozen(config(critic={"frozen": patterns}), bigram(8))
    assert str(caught.value) == said
    for fine in (["head.*"], ["trunk.*", "head.bias"], []):
        check_frozen(config(critic={"frozen": fine}), bigram(8))
    check_frozen(config(), bigram(8))


def test_single_rollouts_without_a_critic(monkeypatch: pytest.MonkeyPatch) -> None:
    """An advantage that looks at each rollout alone needs nothing."""

    def of_group(group: Group, estimates: Estimates) -> PerToken:
        raise AssertionError("nobody asks it")

    monkeypatch.setattr(build, "build_advantage", lambda config: Advantage(of_group))
    check_needs(config(trainer={"group_size": 1}))


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"trainer": {"router_bias_rate": 1e-3}}, "trainer.router_bias_rate = 0.001"),
        ({"sampler": {"record_choices": True}}, "sampler.record_choices = true"),
    ],
)
def test_experts_that_the_model_lacks(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f"^{said}: needs a model with experts$"):
        check_experts(config(**sections), tiny.model())
    check_experts(config(**sections), tiny.model(tiny.ROUTED))
