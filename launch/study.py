"""[H] A recorded run opened for study: its batches under any of its versions, and what any loss
makes of them. For notebooks; nothing is written.
"""

from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from launch import build, compose
from launch.code import config_of
from launch.finish import decoder
from launch.replay import read_recording
from rl_jax.advantages import LOG_RATIOS, Advantage
from rl_jax.arrays import AnyArray, Array, Tree
from rl_jax.config.base import UserError
from rl_jax.losses.evaluate import evaluate
from rl_jax.losses.reductions import token_mean
from rl_jax.losses.types import ENTROPY, PROXIMAL, REFERENCE, Loss, Scores, Terms
from rl_jax.model import Model
from rl_jax.replay.events import GroupId, group_id
from rl_jax.replay.trajectory_log import read_groups
from rl_jax.sharding import make_mesh
from rl_jax.snapshots.store import SnapshotStore
from rl_jax.trainer.batches import (
    Batch,
    advantaged,
    build_batch,
    cut,
    host_microbatch,
    per_group,
    reduce,
)
from rl_jax.trainer.scores import Scored, scores_of_batch, token_scores
from rl_jax.trajectories.types import Group, Trajectory


class ScoredBatch(NamedTuple):
    """What an update trained on, scored under a version: the rows of all microbatches."""

    trajectories: tuple[Trajectory, ...]
    scores: Scores
    """Besides current and behavior: proximal, reference and entropy."""
    current: int
    """The version under which `current` was taken."""
    parts: tuple[Batch, ...]
    """The microbatches as the model takes them."""

    def of(self, array: AnyArray, number: int) -> np.ndarray:
        """Of an array like those of `scores`, the tokens of a trajectory."""
        return np.asarray(array)[np.asarray(self.scores.segments) == number]

    def weights(self, loss: Loss) -> np.ndarray:
        """float32[rows, tokens]: what the loss's reduction weighs each token with."""
        segments = np.asarray(self.scores.segments)
        whole = np.zeros(segments.shape, np.float32)
        for number, own in enumerate(reduce(loss.reduction, self.trajectories)):
            whole[segments == number] = own
        return whole


class Judged(NamedTuple):
    """What a loss makes of a batch."""

    loss: float
    params: Tree
    """The gradient with respect to the parameters."""
    terms: Terms
    metrics: dict[str, float]


class Study:
    """A run on the disk; made by `open_run`."""

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir
        self.config = config_of(run_dir)
        recording = read_recording(run_dir)
        self._batches = {s: b for s, b in recording.batches.items() if s in recording.updates}
        self._store = SnapshotStore(run_dir / "snapshots")
        kept = self._store.versions()
        self._versions = {v: told for v, told in recording.versions.items() if v in kept}
        family = build.build_task(self.config)
        self.text = decoder(family)
        """The text of token ids, control tokens included."""
        vocabulary = build.build_renderer(family).vocab_size
        self.model: Model = build.build_policy(self.config, vocabulary)

    @property
    def updates(self) -> tuple[int, ...]:
        """Those whose batch is on record."""
        return tuple(sorted(self._batches))

    @property
    def versions(self) -> tuple[int, ...]:
        """Those whose weights are there."""
        return tuple(sorted(self._versions))

    @cached_property
    def loss(self) -> Loss:
        """The one that the run trained with."""
        return compose.build_loss(self.config)

    def params(self, version: int) -> Tree:
        """The weights of a version."""
        if version not in self._versions:
            raise UserError(f"{self.path} has no version {version}; it has {list(self.versions)}")
        mesh = make_mesh(jax.devices(), 1, 1)
        return self._store.load(version, build.abstract_params(self.model, mesh))

    def groups(self, update: int) -> list[Group]:
        """What an update trained on, in the order of its batch."""
        if update not in self._batches:
            raise UserError(f"{self.path} has no update {update}; it has {list(self.updates)}")
        return [self._groups[name] for name in self._batches[update].groups]

    def batch(
        self,
        update: int,
        *,
        current: int | None = None,
        proximal: int | None = None,
        advantage: Advantage | None = None,
    ) -> ScoredBatch:
        """The batch of an update, scored under the versions `current`, `proximal` and, as the
        reference, 0.

        Versions that are not given are the newest that the trainer had made before the update. So
        the scores are those that it saw only in the first update after a push; in a later one it
        had moved on from that version, and no record has those weights. Lags are those of the run,
        and so is the advantage where none is given.
        """
        groups = self.groups(update)
        newest = max(v for v, told in self._versions.items() if told.step < update)
        current = newest if current is None else current
        proximal = newest if proximal is None else proximal
        members = [member for group in groups for member in group.members]
        published = self._batches[update].published_version
        options = build.step_options(self.config, self.model)
        choices = options.choices if options.experts.replay else None
        shape = build.rl_shape(self.config)
        built = build_batch(members, token_mean, published, shape, choices)
        scored = {v: self._scored(v, built.batch) for v in {current, proximal, 0}}
        logprobs, entropy = scored[current]
        moved = np.where(built.batch.mask, logprobs - built.batch.behavior, 0.0)
        # What an advantage may ask for; a record has no critic.
        known = per_group(groups, {LOG_RATIOS: cut(moved, built.places, members)})
        chosen = advantage or compose.build_advantage(self.config)
        parts = _parts(advantaged(built, chosen, groups, known))
        others = {PROXIMAL: scored[proximal][0], REFERENCE: scored[0][0], ENTROPY: entropy}
        each = []
        for i, part in enumerate(parts):
            own = {name: jnp.asarray(array[i]) for name, array in others.items()}
            each.append(scores_of_batch(part, jnp.asarray(logprobs[i]), own))
        scores = jax.tree.map(lambda *rows: jnp.concatenate(rows), *each)
        return ScoredBatch(tuple(members), scores, current, parts)

    def judge(self, loss: Loss, batch: ScoredBatch) -> Judged:
        """Value, gradient, terms and metrics of `loss` on a batch, in a fresh state."""
        transform, weights = loss.transform, batch.weights(loss)
        stats = transform.stats(batch.scores) if transform.stats else ()

        def objective(own: Scored) -> tuple[Array, tuple[Terms, dict]]:
            others = {**batch.scores.others, ENTROPY: own.entropy}
            scores = batch.scores._replace(current=own.logprobs, others=others)
            terms, metrics = evaluate(transform, scores, stats, transform.init())
            return jnp.sum(weights * terms.loss), (terms, metrics)

        own = Scored(batch.scores.current, batch.scores.others[ENTROPY])
        (value, (terms, metrics)), slope = jax.value_and_grad(objective, has_aux=True)(own)
        params, rows = self.params(batch.current), len(batch.scores.current) // len(batch.parts)
        total = None
        for i, part in enumerate(batch.parts):
            piece = jax.tree.map(lambda a, i=i: a[i * rows : (i + 1) * rows], slope)
            grads = self._pulled(params, part, piece)
            total = grads if total is None else jax.tree.map(jnp.add, total, grads)
        numbers = {name: float(metric.compute()) for name, metric in metrics.items()}
        return Judged(float(value), total, terms, numbers)

    @cached_property
    def _groups(self) -> dict[GroupId, Group]:
        return {group_id(group): group for group, _ in read_groups(self.path)}

    def _forward(self, params: Tree, part: Batch) -> Scored:
        arrays = part.tokens, part.positions, part.segment_ids, part.temperature
        chunk = build.vocab_chunk(self.model)
        how = {"vocab_chunk": chunk, "entropy": True, "choices": part.choices}
        return token_scores(self.model, params, *arrays, **how)

    @cached_property
    def _score(self):
        return jax.jit(self._forward)

    @cached_property
    def _pulled(self):
        def pulled(params: Tree, part: Batch, slope: Scored) -> Tree:
            _, back = jax.vjp(lambda own: self._forward(own, part), params)
            return back(slope)[0]

        return jax.jit(pulled)

    def _scored(self, version: int, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities and entropies [M, R, L]; microbatches that are not used are zero."""
        params = self.params(version)
        logprobs, entropy = np.zeros((2, *batch.tokens.shape), np.float32)
        for i, part in enumerate(_parts(batch)):
            logprobs[i], entropy[i] = self._score(params, part)
        return logprobs, entropy


def _parts(batch: Batch) -> tuple[Batch, ...]:
    """The microbatches that are used."""
    return tuple(host_microbatch(batch, i) for i in range(int(batch.count)))


def open_run(path: str | Path) -> Study:
    """The run in a directory. UserError where it is none, or nothing was trained in it."""
    return Study(Path(path))
