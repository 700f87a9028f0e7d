"""The trainer program with programs in numpy: who is called, when, and with what."""

import asyncio
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
from rl_jax.queues.memory import MemoryQueue
from rl_jax.staleness import Admit, drop_stale
from rl_jax.trainer.batches import Batch, Shape, build_batch
from rl_jax.trainer.loop import (
    Auditor,
    Hooks,
    NotFinite,
    Programs,
    Schedule,
    shuffle_rewards,
    train,
)
from rl_jax.trainer.state import TrainState
from rl_jax.trainer.step import StepReport
from rl_jax.trajectories.types import Group, copy_of
from tests.trajectories.build import group, steady, trajectory

SHAPE = Shape(microbatches=1, rows=4, row_length=128)
ADMIT = drop_stale(4)


def batch_of(groups: Sequence[Group], published: int = 0) -> Batch:
    members = [m for g in groups for m in g.members]
    nothing = [np.zeros(len(m.tokens), np.float32) for m in members]
    return build_batch(members, nothing, token_mean, published, SHAPE)[0]


class ScriptedQueue:
    """Hands out the groups it was made of; notes what is asked of it."""

    def __init__(self, groups: Sequence[Group], log: list[str]) -> None:
        self._groups, self._log = list(groups), log
        self.asked: list[tuple[int, int, float]] = []

    async def get(self, n: int, admit: Admit, *, step: int, timeout: float) -> list[Group]:
        self.asked.append((n, step, timeout))
        taken, self._groups = self._groups[:n], self._groups[n:]
        return taken

    def ack(self, step: int) -> None:
        self._log.append(f"ack {step}")


class World:
    """Programs and hooks that write down, in one list, what happens."""

    def __init__(self, updates: int = 5, push_every: int = 2, groups: int = 1) -> None:
        self.log: list[str] = []
        self.version = 0
        self.batches: list[Batch] = []
        self.updates: list[Mapping[str, float]] = []
        self.audits: list[tuple[Tree, int]] = []
        self.schedule = Schedule(updates, groups, push_every, 1.5, 30.0)
        self.queue: Any = ScriptedQueue(
            [group(prompt=9 - i) for i in range(updates * groups)], self.log
        )
        self.auditor = Auditor("weights 0", 0)
        self.finite, self.bad_column = True, -1

    def _step(self, state: TrainState, batch: Batch) -> tuple[TrainState, StepReport]:
        self.log.append("step")
        self.batches.append(batch)
        moved = {"policy": state.params["policy"] + 1}
        state = state._replace(params=moved, step=state.step + 1, optimizer=state.optimizer + 1)
        finite = {"policy.a": np.array(True), "policy.b": np.array(self.finite)}
        columns = np.array([[-1, self.bad_column, -1, -1]], np.int32)
        metrics = {"m": Mean(np.float32(6), np.float32(4)), "none": Mean(0.0, 0.0)}
        return state, StepReport(np.float32(0.5), np.float32(2.0), metrics, finite, columns)

    def _reset(self, state: TrainState) -> TrainState:
        self.log.append("reset")
        return state._replace(optimizer=0)

    def _audit(self, params: Tree, batch: Batch, lag: np.int32) -> tuple[Any, Any]:
        self.log.append(f"audit {params}")
        self.audits.append((params, int(lag)))
        return np.float32(1e-6), np.int32((batch.mask & (batch.lag == lag)).sum())

    async def _on_batch(self, update: int, groups: Sequence[Group]) -> None:
        self.log.append(f"batch {update}: {[g.prompt for g in groups]}")

    async def _on_update(self, update: int, metrics: Mapping[str, float]) -> None:
        self.log.append(f"update {update}")
        self.updates.append(metrics)

    async def _push(self, params: Tree, update: int) -> Tree:
        self.log.append(f"push {params} at {update}")
        self.version += 1
        return f"weights {self.version}"

    def run(self, save: Path = Path("unused"), shuffle_seed: int | None = None) -> TrainState:
        dispatcher = Dispatcher("test")
        state = TrainState({"policy": 0}, 0, (), np.int32(0))
        hooks = Hooks(
            lambda: self.version,
            self._on_batch,
            self._on_update,
            self._push,
            lambda groups: self.log.append(f"settled {groups}"),
        )
        try:
            return asyncio.run(
                train(
                    state,
                    Programs(self._step, self._reset, self._audit),
                    self.schedule,
                    hooks,
                    self.queue,
                    ADMIT,
                    dispatcher,
                    advantage=group_mean,
                    reduction=token_mean,
                    shape=SHAPE,
                    auditor=self.auditor,
                    shuffle_seed=shuffle_seed,
                    save_bad_batch=save,
                )
            )
        finally:
            dispatcher.close()

    def without_audits(self) -> list[str]:
        return [entry for entry in self.log if not entry.startswith("audit")]


def test_a_push_every_k_updates_and_at_the_end() -> None:
    world = World(updates=5, push_every=2)
    state = world.run()
    plain = ["step", "update {0}", "settled 1"]
    push = ["step", "reset", "push {0} at {0}", "ack {0}", "update {0}", "settled 1"]
    want = []
    for update, kind in enumerate([plain, push, plain, push, push], 1):
        want.append(f"batch {update}: [{10 - update}]")
        want += [entry.format(update) for entry in kind]
    assert world.without_audits() == want
    assert state.params == {"policy": 5}
    assert (state.step, state.optimizer) == (5, 0)
    assert world.queue.asked == [(1, n, 1.5) for n in range(1, 6)]


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


def test_groups_come_in_the_order_of_their_prompts() -> None:
    world = World(updates=2, groups=3)
    world.run()
    assert [e for e in world.log if e.startswith("batch")] == [
        "batch 1: [7, 8, 9]",
        "batch 2: [4, 5, 6]",
    ]
    assert [e for e in world.log if e.startswith("settled")] == ["settled 3", "settled 3"]


def test_metrics_of_an_update_by_hand() -> None:
    world = World(updates=1)
    own = group(version=0, rewards=(1.0, 0.0, 0.5))  # one prompt token, versions 0 and 1
    own = replace(own, members=(*own.members, copy_of(own.members[0])))
    world.queue = ScriptedQueue([own], world.log)
    world.version = 2
    world.run()
    (metrics,) = world.updates
    assert metrics == {
        "m": 1.5,
        "none": 0.0,
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
    world.queue = ScriptedQueue([own], world.log)
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
            assert (arrays[name] == array).all()
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


def test_an_empty_queue_ends_in_a_timeout() -> None:
    world = World()
    world.schedule = world.schedule._replace(queue_timeout_s=0.01)

    async def durable(group: Group) -> None: ...

    world.queue = MemoryQueue(4, lambda: 0, durable, lambda group, reason: None)
    with pytest.raises(TimeoutError):
        world.run()
    assert world.log == []


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
    old, new = group(0, version=0), group(1, version=1)  # versions 0 and 1; 1 and 2
    batch = batch_of([old, new], published=2)
    due = auditor.due(batch, 2)
    assert due is not None
    params, part, lag = due
    assert (params, int(lag)) == ("weights 1", 1)
    assert part.tokens.shape == SHAPE[1:]
    assert (part.lag[part.mask] == 1).sum() == 4
    # Version 1 is spent; version 0 is next, then nothing.
    params, _, lag = auditor.due(batch, 2)
    assert (params, int(lag)) == ("weights 0", 2)
    assert auditor.due(batch, 2) is None


def test_auditor_waits_for_tokens_and_keeps_the_newest_two() -> None:
    auditor = Auditor("weights 0", 0)
    for version in (1, 2, 3):
        auditor.hold(f"weights {version}", version)
    assert auditor.due(batch_of([group(0, version=0)], published=3), 3) is None  # 0 and 1 are gone
    params, _, lag = auditor.due(batch_of([group(0, version=2)], published=3), 3)
    assert (params, int(lag)) == ("weights 3", 0)


def test_auditor_takes_the_microbatch_with_most_of_the_tokens() -> None:
    # One long trajectory of version 0 and version 1 fills the first microbatch.
    few = trajectory(0, versions=(0,) * 120 + (1,) * 5)
    many = trajectory(1, versions=(1,) * 100)
    shape = Shape(microbatches=2, rows=1, row_length=128)
    nothing = [np.zeros(len(m.tokens), np.float32) for m in (few, many)]
    batch, _ = build_batch([few, many], nothing, token_mean, 1, shape)
    _, part, lag = Auditor("weights 1", 1).due(batch, 1)
    assert int((part.mask & (part.lag == lag)).sum()) == 100


def test_every_version_is_audited_once_in_a_run() -> None:
    world = World(updates=6, push_every=2)
    fresh = [group(prompt=i, version=v) for i, v in enumerate([0, 0, 0, 1, 2, 2])]
    world.queue = ScriptedQueue(fresh, world.log)
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
