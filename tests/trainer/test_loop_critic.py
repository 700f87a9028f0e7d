"""An update with a critic: estimates, advantages, the critic's updates, the policy's, in order."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rl_jax.advantages import VALUES, Advantage, Estimates
from rl_jax.metrics import names
from rl_jax.metrics.states import Mean
from rl_jax.trainer.batches import Batch
from rl_jax.trainer.loop import Critic, NotFinite
from rl_jax.trainer.state import TrainState
from rl_jax.trainer.step import StepReport
from rl_jax.trajectories.types import Group, Trajectory
from tests.trainer.test_loop import World
from tests.trajectories.build import trajectory

MEANS = {
    names.CRITIC_RETURNS: Mean(np.float32(6), np.float32(4)),
    names.CRITIC_RETURNS_SQUARED: Mean(np.float32(25), np.float32(4)),
    names.CRITIC_ERROR: Mean(np.float32(2), np.float32(4)),
    names.CRITIC_ERROR_SQUARED: Mean(np.float32(8), np.float32(4)),
}


def marked(trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
    """Weights that tell the critic's reduction from the policy's."""
    return [np.full(len(t.tokens), 100.0 + i, np.float32) for i, t in enumerate(trajectories)]


class Learner(World):
    """A world with a critic whose values are the tokens' places in the batch."""

    def __init__(self, updates: int = 2, critic_updates: int = 2) -> None:
        super().__init__(updates=updates, push_every=2, groups=2)
        self.critic = Critic(self._critic_step, critic_updates, marked)
        self.estimate = self._estimate
        self.advantage = Advantage(self._of_group, frozenset({VALUES}), returns=self._returns)
        self.critic_batches: list[Batch] = []
        self.seen: list[tuple[Group, Estimates]] = []
        self.critic_finite = True

    def _critic_step(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        number = len(self.critic_batches)
        self.log.append("critic step")
        self.critic_batches.append(batch)
        finite = {"critic.head.bias": np.array(self.critic_finite)}
        columns = np.full(batch.tokens.shape[:2], -1, np.int32)
        loss = np.float32(0.25 + number)
        return state, StepReport(loss, np.float32(3.0 + number), MEANS, finite, columns)

    def _estimate(self, params, batch: Batch) -> dict[str, np.ndarray]:
        self.log.append("estimate")
        self.values = np.arange(batch.tokens.size, dtype=np.float32).reshape(batch.tokens.shape)
        return {VALUES: self.values}

    def _of_group(self, group: Group, estimates: Estimates) -> tuple[np.ndarray, ...]:
        self.log.append("advantages")
        self.seen.append((group, estimates))
        assert estimates.values is not None and estimates.log_ratios is None
        return tuple(10 * values for values in estimates.values)

    def _returns(self, group: Group, estimates: Estimates) -> tuple[np.ndarray, ...]:
        assert estimates.values is not None
        return tuple(values + 0.5 for values in estimates.values)


def test_the_critics_reduction_is_checked() -> None:
    world = Learner()
    world.critic = world.critic._replace(reduction=lambda own: marked(own)[1:])
    with pytest.raises(ValueError, match=r"test_the_critics_reduction.*: 3 arrays for 4 traj"):
        world.run()


def test_the_order_of_an_update() -> None:
    world = Learner()
    world.run()
    update = ["estimate", "advantages", "advantages", "critic step", "critic step", "step"]
    log = [entry for entry in world.without_audits() if entry in update]
    assert log == update + update


def test_estimates_are_those_of_the_groups_own_tokens() -> None:
    world = Learner(updates=1)
    world.run()
    batch = world.batches[0]
    assert [g.prompt for g, _ in world.seen] == [0, 1]
    for number, (group, estimates) in enumerate(world.seen):
        assert estimates.values is not None and len(estimates.values) == len(group.members)
        for place, (member, values) in enumerate(zip(group.members, estimates.values, strict=True)):
            own = batch.segment_ids == len(group.members) * number + place
            assert len(values) == len(member.tokens)
            assert values.tolist() == world.values[own].tolist()


def test_both_steps_see_advantages_and_returns_and_each_its_own_weights() -> None:
    world = Learner(updates=1)
    world.run()
    (policy,), (first, second) = world.batches, world.critic_batches
    mask = policy.mask
    assert (policy.advantages[mask] == 10 * world.values[mask]).all()
    assert (first.returns[mask] == world.values[mask] + 0.5).all()
    assert first.weights[mask].min() >= 100.0 and policy.weights.max() <= 1.0
    assert second is first


def test_metrics_are_those_before_the_critic_was_trained_on_the_batch() -> None:
    world = Learner(updates=1)
    world.run()
    metrics = world.updates[0]
    assert metrics[names.CRITIC_LOSS] == 0.25
    assert metrics[names.CRITIC_GRAD_NORM] == 3.0
    # Returns: mean 1.5, mean square 6.25, variance 4. Errors: 1/2, 2, 7/4.
    assert metrics[names.CRITIC_EXPLAINED_VARIANCE] == 1.0 - 1.75 / 4.0
    assert metrics[names.LOSS] == 0.5, "the policy's"


def test_a_critic_that_is_not_finite_ends_the_run_before_the_policy_steps(tmp_path: Path) -> None:
    world = Learner()
    world.critic_finite = False
    saved = tmp_path / "bad.npz"
    said = "update not applied: the gradient of critic.head.bias is not finite"
    with pytest.raises(NotFinite, match=said):
        world.run(saved)
    assert world.log[-1] == "critic step" and world.log.count("critic step") == 1
    with np.load(saved) as arrays:
        assert (arrays["weights"] == world.critic_batches[0].weights).all()


def test_without_a_critic_nothing_more_runs() -> None:
    world = World(updates=1)
    world.run()
    assert not [name for name in world.updates[0] if name.startswith("critic/")]
    assert not world.batches[0].returns.any()


def test_a_critic_without_estimates() -> None:
    """Returns that ask for no values are trained on all the same."""
    world = Learner(updates=1)
    world.estimate = None

    def returns(group: Group, estimates: Estimates) -> tuple[np.ndarray, ...]:
        return tuple(np.full(len(m.tokens), m.reward, np.float32) for m in group.members)

    world.advantage = Advantage(returns, returns=returns)
    world.batches_to_take = [[Group("lookup", 0, (trajectory(0, reward=0.75),))]]
    world.run()
    batch = world.critic_batches[0]
    assert set(batch.returns[batch.mask].tolist()) == {0.75}
