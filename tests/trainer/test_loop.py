"""The trainer program with programs in numpy: who is called, when, and with what."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_jax.advantages import group_mean
from rl_jax.arrays import Tree
from rl_jax.dispatch import Dispatcher
from rl_jax.losses.reductions import token_mean
from rl_jax.metrics import names
from rl_jax.metrics.states import Mean
from rl_jax.trainer.batches import Batch, Shape, build_batch
from rl_jax.trainer.critic import Estimate
from rl_jax.trainer.loop import (
    Auditor,
    Critic,
    Hooks,
    NotFinite,
    Programs,
    Pushed,
    Schedule,
    Taken,
    shuffle_rewards,
    train,
)
from rl_jax.trainer.state import TrainState
from rl_jax.trainer.step import StepReport
from rl_jax.trajectories.types import Group, Origin, Segment, copy_of
from tests.trajectories.build import group, steady, trajectory

SHAPE = Shape(microbatches=1, rows=4, row_length=128)


def batch_of(groups: Sequence[Group], published: int = 0) -> Batch:
    members = [m for g in groups for m in g.members]
    return build_batch(members, token_mean, published, SHAPE).batch


def recomputed(group: Group) -> Group:
    """The group, its caches made anew at the push between its members' two tokens."""
    version = group.oldest_version
    segments = (
        Segment(0, 1, version, Origin.PREFILL),
        Segment(0, 3, version + 1, Origin.RECOMPUTE),
    )
    return replace(group, members=tuple(replace(m, segments=segments) for m in group.members))


class World:
    """Programs and hooks that write down, in one list, what happens."""

    def __init__(self, updates: int = 5, push_every: int = 2, groups: int = 1) -> None:
        self.log: list[str] = []
        self.version = 0
        self.batches: list[Batch] = []
        self.updates: list[Mapping[str, float]] = []
        self.audits: list[tuple[Tree, int]] = []
        self.schedule = Schedule(updates, push_every, 30.0)
        made = [group(prompt=i) for i in range(updates * groups)]
        self.batches_to_take = [made[i : i + groups] for i in range(0, len(made), groups)]
        self.auditor: Auditor | None = Auditor("weights 0", 0)
        self.stop_before = updates + 1
        self.done = 0
        self.finite, self.bad_column = True, -1
        self.means: dict[str, Mean] = {}
        self.critic: Critic | None = None
        self.estimate: Estimate | None = None
        self.advantage = group_mean()

    def _step(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        self.log.append("step")
        self.batches.append(batch)
        moved = {"policy": state.params["policy"] + 1}
        state = state._replace(params=moved, step=state.step + 1, optimizer=state.optimizer + 1)
        finite = {"policy.a": np.array(True), "policy.b": np.array(self.finite)}
        columns = np.array([[-1, self.bad_column, -1, -1]], np.int32)
        metrics = {"m": Mean(np.float32(6), np.float32(4)), "none": Mean(0.0, 0.0)} | self.means
        return state, StepReport(np.float32(0.5), np.float32(2.0), metrics, finite, columns)

    def _reset(self, state: TrainState) -> TrainState:
        self.log.append("reset")
        return state._replace(optimizer=0)

    def _audit(self, params: Tree, batch: Batch, lag: np.int32) -> tuple[Any, Any]:
        self.log.append(f"audit {params}")
        self.audits.append((params, int(lag)))
        return np.float32(1e-6), np.int32((batch.mask & (batch.lag == lag)).sum())

    async def _take(self, update: int) -> Taken | None:
        if update == self.stop_before:
            return None
        groups = self.batches_to_take[update - 1]
        self.log.append(f"batch {update}: {[g.prompt for g in groups]}")
        return Taken(groups, self.version)

    async def _on_update(self, update: int, metrics: Mapping[str, float]) -> None:
        self.log.append(f"update {update}")
        self.updates.append(metrics)

    async def _push(self, params: Tree, update: int) -> Pushed:
        self.log.append(f"push {params} at {update}")
        self.version += 1
        return Pushed(self.version, f"weights {self.version}")

    async def _checkpoint(self, state: TrainState, update: int) -> None:
        self.log.append(f"checkpoint {update}")

    def run(self, save: Path = Path("unused"), shuffle_seed: int | None = None) -> TrainState:
        dispatcher = Dispatcher("test")
        state = TrainState({"policy": 0}, 0, {}, np.int32(0))
        hooks = Hooks(
            self._take,
            self._on_update,
            self._push,
            lambda update, groups: self.log.append(f"settled {len(groups)}"),
            self._checkpoint,
        )
        try:
            state, self.last = asyncio.run(
                train(
                    state,
                    Programs(self._step, self._reset, self._audit, self.critic, self.estimate),
                    self.schedule,
                    hooks,
                    dispatcher,
                    done=self.done,
                    advantage=self.advantage,
                    reduction=token_mean,
                    shape=SHAPE,
                    auditor=self.auditor,
                    shuffle_seed=shuffle_seed,
                    save_bad_batch=save,
                )
            )
            return state
        finally:
            dispatcher.close()

    def without_audits(self) -> list[str]:
        return [entry for entry in self.log if not entry.startswith("audit")]


def test_a_push_every_k_updates_and_at_the_end() -> None:
    world = World(updates=5, push_every=2)
    state = world.run()
    plain = ["step", "update {0}", "settled 1"]
    push = ["step", "reset", "push {0} at {0}", "update {0}", "settled 1", "checkpoint {0}"]
    want = []
    for update, kind in enumerate([plain, push, plain, push, push], 1):
        want.append(f"batch {update}: [{update - 1}]")
        want += [entry.format(update) for entry in kind]
    assert world.without_audits() == want
    assert state.params == {"policy": 5}
    assert (state.step, state.optimizer) == (5, 0)
    assert world.last == 5


def test_a_stop_comes_before_an_update() -> None:
    world = World(updates=5, push_every=2)
    world.stop_before = 4
    state = world.run()
    assert world.last == 3 and state.params == {"policy": 3}
    assert "batch 4" not in " ".join(world.log)


def test_going_on_after_an_update_keeps_the_schedule() -> None:
    world = World(updates=5, push_every=2)
    world.done = 3
    world.run()
    pushes = [e for e in world.without_audits() if e.startswith(("push", "batch"))]
    assert pushes == ["batch 4: [3]", "push 1 at 4", "batch 5: [4]", "push 2 at 5"]
    assert world.last == 5


def test_a_step_that_does_not_end_is_named() -> None:
    world = World(updates=2)
    world.schedule = world.schedule._replace(step_timeout_s=0.01)
    ended = threading.Event()
    world._step = lambda state, batch: ended.wait(60.0)
    # The dispatcher's thread is busy until the test lets it go.
    threading.Timer(0.2, ended.set).start()
    with pytest.raises(TimeoutError, match=r"update 1 has not ended in 0\.01 s"):
        world.run()


def test_no_second_push_where_the_end_is_a_push() -> None:
    world = World(updates=4, push_every=2)
    world.run()
    assert [e for e in world.log if e.startswith("push")] == ["push 2 at 2", "push 4 at 4"]
    assert world.log.count("reset") == 2


def test_optimizer_state_lives_from_push_to_push() -> None:
    world = World(updates=7, push_every=3)
    seen = []
    inner = world._step
    world._step = lambda state, batch: (seen.append(state.optimizer), inner(state, batch))[1]
    world.run()
    assert seen == [0, 1, 2, 0, 1, 2, 0]


def test_metrics_of_an_update_by_hand() -> None:
    world = World(updates=1)
    # One prompt token, versions 0 and 1.
    own = recomputed(group(version=0, rewards=(1.0, 0.0, 0.5)))
    own = replace(own, members=(*own.members, copy_of(own.members[0])))
    world.batches_to_take = [[own]]
    world.version = 2
    # Weights 1, 1/2, 0, 0: their sum squared over the sum of squares is 9/5, of four tokens.
    world.means = {
        names.ESS_WEIGHT: Mean(np.float32(1.5), np.float32(4)),
        names.ESS_WEIGHT_SQUARED: Mean(np.float32(1.25), np.float32(4)),
    }
    world.run()
    metrics = dict(world.updates[0])
    assert metrics.pop(names.STEP_SECONDS) > 0 and metrics.pop(names.PUSH_SECONDS) > 0
    assert metrics.pop(names.WAIT_SECONDS) >= 0
    assert metrics == {
        "m": 1.5,
        "none": 0.0,
        names.ESS_WEIGHT: 0.375,
        names.ESS_WEIGHT_SQUARED: 0.3125,
        names.ESS_SHARE: pytest.approx(9 / 5 / 4),
        names.LOSS: 0.5,
        names.GRAD_NORM: 2.0,
        names.REWARD: 0.5,
        names.LAG_MEAN: 1.5,
        names.LAG_MAX: 2.0,
        names.TRAINED_TOKENS: 6.0,
        names.TRAINED_TRAJECTORIES: 3.0,
        names.TRAINED_LENGTH: 3.0,
        names.PADDING_SHARE: 1 - 12 / 512,
        names.DLOGP_FRESH: pytest.approx(1e-6),
        names.FRESH_TOKENS: 4.0,
    }
    mask = world.batches[0].mask
    want = {0.5, -0.5, 0.0}  # reward minus the mean of three; the copy adds nothing to it
    assert set(world.batches[0].advantages[mask].tolist()) == want


@pytest.mark.parametrize("culprit", [True, False])
def test_what_is_not_finite_is_named_and_saved(tmp_path: Path, culprit: bool) -> None:
    world = World(updates=3)
    own = Group(
        "lookup", 9, (trajectory(0, versions=(0,) * 127, prompt=9), trajectory(5, prompt=9))
    )
    world.batches_to_take = [[own]] * 3
    world.finite, world.bad_column = False, 1 if culprit else -1
    saved = tmp_path / "bad.npz"
    with pytest.raises(NotFinite) as caught:
        world.run(saved)
    said = str(caught.value)
    assert "update not applied: the gradient of policy.b is not finite" in said
    assert str(own.members[1].key) in said if culprit else "no single trajectory" in said
    assert str(own.members[0].key) not in said
    assert str(saved) in said
    with np.load(saved) as arrays:
        for name, array in world.batches[0]._asdict().items():
            assert name not in arrays if array is None else (arrays[name] == array).all()
    assert world.log == ["batch 1: [9]", "audit weights 0", "step"]


def test_a_loss_that_is_not_finite_is_named(tmp_path: Path) -> None:
    world = World()
    inner = world._step

    def infinite(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        state, report = inner(state, batch)
        return state, report._replace(loss=np.float32(np.inf))

    world._step = infinite
    with pytest.raises(NotFinite, match="update not applied: the loss is not finite, no single"):
        world.run(tmp_path / "bad.npz")


def test_a_fault_of_the_step_ends_the_program() -> None:
    world = World()

    def broken(state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        raise ZeroDivisionError("of its own")

    world._step = broken
    with pytest.raises(ZeroDivisionError, match="of its own"):
        world.run()


rewards = st.lists(st.floats(0, 1, width=16), min_size=2, max_size=4)


@steady
@given(st.lists(rewards, min_size=1, max_size=4), st.integers(0, 2**32), st.integers(1, 99))
def test_shuffling_permutes_rewards_and_copies_follow(
    by_group: list[list[float]], seed: int, update: int
) -> None:
    groups = []
    for prompt, own in enumerate(by_group):
        made = group(prompt, rewards=tuple(own))
        groups.append(replace(made, members=(*made.members, copy_of(made.members[0]))))
    shuffled = shuffle_rewards(groups, seed, update)
    originals = [m for g in shuffled for m in g.members if m.copy_of is None]
    assert sorted(m.reward for m in originals) == sorted(r for own in by_group for r in own)
    for before, after in zip(groups, shuffled, strict=True):
        assert after.members[-1].reward == after.members[0].reward
        assert [m.key for m in after.members] == [m.key for m in before.members]
        assert all(a.tokens is b.tokens for a, b in zip(after.members, before.members, strict=True))
    again = shuffle_rewards(groups, seed, update)
    assert [m.reward for g in again for m in g.members] == [
        m.reward for g in shuffled for m in g.members
    ]


def test_shuffles_reach_across_groups_and_differ_by_update() -> None:
    groups = [group(p, rewards=(1.0,) * 4 if p == 0 else (0.0,) * 4) for p in range(4)]
    moved = [
        [sum(m.reward for m in g.members) for g in shuffle_rewards(groups, 0, update)]
        for update in (1, 2, 3)
    ]
    assert all(sum(m) == 4 for m in moved)
    assert len(set(map(tuple, moved))) > 1
    assert any(sum(m[1:]) for m in moved)


def test_a_shuffled_run_trains_on_shuffled_rewards() -> None:
    true, shuffled = World(updates=1, groups=4), World(updates=1, groups=4)
    true.run()
    shuffled.run(shuffle_seed=3)
    assert shuffled.updates[0][names.REWARD] == true.updates[0][names.REWARD] == 0.5
    assert (shuffled.batches[0].advantages != true.batches[0].advantages).any()
    assert (shuffled.batches[0].tokens == true.batches[0].tokens).all()


def test_auditor_takes_the_newest_version_with_tokens() -> None:
    auditor = Auditor("weights 0", 0)
    auditor.hold("weights 1", 1)
    old, new = recomputed(group(0, version=0)), recomputed(group(1, version=1))  # 0, 1; 1, 2
    batch, members = batch_of([old, new], published=2), [*old.members, *new.members]
    due = auditor.due(batch, 2, members)
    assert due is not None
    params, part, lag = due
    assert (params, int(lag)) == ("weights 1", 1)
    assert part.tokens.shape == SHAPE[1:]
    assert (part.lag[part.mask] == 1).sum() == 4
    # Version 1 is spent; version 0 is next, then nothing.
    params, _, lag = auditor.due(batch, 2, members)
    assert (params, int(lag)) == ("weights 0", 2)
    assert auditor.due(batch, 2, members) is None


def test_auditor_waits_for_tokens_and_keeps_the_newest_two() -> None:
    auditor = Auditor("weights 0", 0)
    for version in (1, 2, 3):
        auditor.hold(f"weights {version}", version)
    gone, kept = recomputed(group(0, version=0)), recomputed(group(0, version=2))
    assert auditor.due(batch_of([gone], published=3), 3, gone.members) is None, "0 and 1"
    params, _, lag = auditor.due(batch_of([kept], published=3), 3, kept.members)
    assert (params, int(lag)) == ("weights 3", 0)


def test_auditor_leaves_out_what_a_cache_of_older_versions_helped_to_sample() -> None:
    """A member kept its cache over the push, another made it anew: one token each of version 1,
    of which the second alone can be compared. No version has only tokens of the first sort."""
    fresh, kept = recomputed(group(0, version=0)), group(1, version=0)
    segments = (Segment(0, 2, 0, Origin.PREFILL), Segment(2, 3, 1, Origin.DECODE))
    kept = replace(kept, members=tuple(replace(m, segments=segments) for m in kept.members))
    batch = batch_of([fresh, kept], published=1)
    params, part, lag = Auditor("weights 1", 1).due(batch, 1, [*fresh.members, *kept.members])
    assert (params, int(lag)) == ("weights 1", 0)
    compared = np.unique(part.segment_ids[part.mask & (part.lag == lag)])
    assert compared.tolist() == [0, 1], "members of the first group"
    only = batch_of([kept], published=1)
    auditor = Auditor("weights 1", 1)
    assert auditor.due(only, 1, kept.members) is None
    assert auditor.due(batch, 1, [*fresh.members, *kept.members]), "it waits for better ones"


def test_auditor_takes_the_microbatch_with_most_of_the_tokens() -> None:
    # One long trajectory of version 0 and version 1 fills the first microbatch.
    few = trajectory(0, versions=(0,) * 120 + (1,) * 5)
    many = trajectory(1, versions=(1,) * 100)
    shape = Shape(microbatches=2, rows=1, row_length=128)
    batch = build_batch([few, many], token_mean, 1, shape).batch
    _, part, lag = Auditor("weights 1", 1).due(batch, 1, [few, many])
    assert int((part.mask & (part.lag == lag)).sum()) == 100


def test_every_version_is_audited_once_in_a_run() -> None:
    world = World(updates=6, push_every=2)
    fresh = [recomputed(group(prompt=i, version=v)) for i, v in enumerate([0, 0, 0, 1, 2, 2])]
    world.batches_to_take = [[g] for g in fresh]
    world.run()
    assert world.audits == [("weights 0", 0), ("weights 1", 0), ("weights 2", 0)]
    assert [names.DLOGP_FRESH in m for m in world.updates] == [
        True,
        False,
        True,
        False,
        True,
        False,
    ]
