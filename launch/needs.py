"""[H] Whether a configuration provides what its loss and its advantage need."""

from fnmatch import fnmatchcase

import jax

from launch import build
from rl_jax.advantages import VALUES
from rl_jax.config.base import UserError, toml_value
from rl_jax.config.run import RunConfig
from rl_jax.losses.types import VALUE
from rl_jax.model import Model
from rl_jax.trainer.anchors import teachers
from rl_jax.trainer.critic import first_critic
from rl_jax.trainer.state import path_of, trained


def check_needs(config: RunConfig) -> None:
    """UserError naming the key that is lacking."""
    loss = f"loss.recipe = {toml_value(config.loss.recipe)}"
    needs = build.build_loss(config).transform.needs
    for name in teachers(needs):
        if name not in config.teachers:
            raise UserError(
                f'{loss} needs teacher({name}): add teachers.{name} = "DIR/VERSION", a published '
                "version"
            )
    advantage = f"advantage.name = {toml_value(config.advantage.name)}"
    own = build.build_advantage(config)
    asking = (loss, VALUE in needs), (advantage, VALUES in own.needs)
    for who in (key for key, asks in asking if asks and config.critic is None):
        raise UserError(f"{who} needs the values of a critic: add the section [critic]")
    if own.within_group and config.trainer.group_size == 1:
        raise UserError(
            f"{advantage} compares the rollouts of a group: needs trainer.group_size of at least "
            "2, not 1"
        )
    if config.critic is not None and own.returns is None:
        raise UserError(f"[critic] has nothing to learn: {advantage} gives no returns")


def check_experts(config: RunConfig, model: Model) -> None:
    """UserError naming a key that asks for experts where the model has none."""
    for key, value in (
        ("trainer.router_bias_rate", config.trainer.router_bias_rate),
        ("trainer.replay_choices", config.trainer.replay_choices),
        ("sampler.record_choices", config.sampler.record_choices),
    ):
        if value and model.routing is None:
            raise UserError(f"{key} = {toml_value(value)}: needs a model with experts")


def check_frozen(config: RunConfig, model: Model) -> None:
    """UserError for a pattern of `critic.frozen` that matches nothing, and where all is frozen."""
    if config.critic is None:
        return
    policy = jax.eval_shape(model.init, jax.random.key(0))
    tree = jax.eval_shape(lambda params: first_critic(model, params), policy)
    paths = [path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    for number, pattern in enumerate(config.critic.frozen):
        if not any(fnmatchcase(path, pattern) for path in paths):
            raise UserError(
                f"critic.frozen[{number}] = {toml_value(pattern)} matches no parameter; there are "
                f"{paths[0]}, {paths[-1]} and {len(paths) - 2} more"
            )
    if not jax.tree.leaves(trained(tree, config.critic.frozen)):
        raise UserError("critic.frozen matches every parameter: the critic has nothing to learn")
