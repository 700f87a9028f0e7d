"""[H] From a configuration to values: the one place where names become functions and meshes."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from launch.compose import build_advantage as build_advantage
from launch.compose import build_loss as build_loss
from launch.compose import imported
from models.kimi_linear.config import KimiLinearConfig
from models.kimi_linear.module import build_model
from rl_jax import rng
from rl_jax.arrays import CHUNK, Tree, round_up
from rl_jax.config.run import RunConfig
from rl_jax.losses import recipes
from rl_jax.losses.types import Loss
from rl_jax.model import Model
from rl_jax.orchestrator.state import Limits, Pace
from rl_jax.sampler.layout import make_layout
from rl_jax.sampler.programs import Programs as SamplerPrograms
from rl_jax.sampler.programs import compile_programs
from rl_jax.sampler.scheduler import Shapes
from rl_jax.sharding import DATA, make_mesh, param_shardings, replicated
from rl_jax.staleness import Admit, drop_stale, take_all, wait_for_stragglers
from rl_jax.tasks.base import TaskFamily
from rl_jax.trainer.anchors import first_anchors, teachers
from rl_jax.trainer.batches import Batch, Shape, batch_shape, empty_batch
from rl_jax.trainer.critic import Estimate, first_critic, make_critic_step, make_estimates
from rl_jax.trainer.loop import Audit
from rl_jax.trainer.scores import audit
from rl_jax.trainer.state import (
    CRITIC,
    POLICY,
    Optimizer,
    TrainState,
    adam,
    after_push,
    init_state,
)
from rl_jax.trainer.step import TrainStep, make_train_step

TASKS = {"lookup": "rl_jax.tasks.lookup.family:family"}


class Meshes(NamedTuple):
    trainer: Mesh
    sampler: Mesh


def build_meshes(config: RunConfig) -> Meshes:
    """Disjoint meshes: the trainer's devices first, then the sampler's."""
    devices = jax.devices()
    trainer, sampler = config.mesh.trainer, config.mesh.sampler
    return Meshes(
        make_mesh(devices, trainer.data, trainer.tensor),
        make_mesh(devices[trainer.size :], sampler.data, sampler.tensor),
    )


def build_task(config: RunConfig) -> TaskFamily:
    """Calls what `task.name` names. UserError where it cannot be imported."""
    make = imported(TASKS.get(config.task.name, config.task.name), "task.name")
    return make(
        seed=config.seed,
        latency_median_s=config.task.tool_latency_median_s,
        patience=config.warm_start.patience,
    )


def build_policy(config: RunConfig, vocab_size: int) -> Model:
    """The policy; the vocabulary is padded to a multiple of 64."""
    sizes = config.model
    return build_model(
        KimiLinearConfig(
            vocab_size=round_up(vocab_size, CHUNK),
            width=sizes.width,
            layers=sizes.layers,
            heads=sizes.heads,
            head_dim=sizes.head_dim,
            kv_latent=sizes.kv_latent,
            kv_shared_key=sizes.kv_shared_key,
            ffn_width=sizes.ffn,
        )
    )


def abstract_params(model: Model, mesh: Mesh) -> Tree:
    """Shapes, dtypes and shardings of the parameters on a mesh."""
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return _abstract(shapes, param_shardings(model.axes(), mesh))


def init_params(model: Model, seed: int, mesh: Mesh) -> Tree:
    """Version-0 parameters on the trainer's mesh, the same for every mesh."""
    shardings = param_shardings(model.axes(), mesh)
    return jax.jit(model.init, out_shardings=shardings)(rng.base(seed, rng.Purpose.INIT))


def build_admit(config: RunConfig, oldest_in_flight: Callable[[], Iterable[int]]) -> Admit:
    """The staleness policy that the configuration names; `oldest_in_flight` gives, for each group
    under way, the oldest version that sampled a token of it."""
    own = config.staleness
    match own.when_stale:
        case "drop" | "pace":
            return drop_stale(own.tau)
        case "mask":
            return take_all
        case "wait":
            return wait_for_stragglers(own.tau, oldest_in_flight, own.wait_deadline_s)


def build_limits(config: RunConfig) -> Limits:
    """How much the orchestrator may have under way."""
    own, rollout, stale = config.trainer, config.rollout, config.staleness
    return Limits(
        own.group_size,
        own.groups,
        rollout.in_flight,
        rollout.ahead,
        rollout.over_sample,
        Pace(stale.tau, own.push_every) if stale.when_stale == "pace" else None,
        rollout.retry_pause_s,
    )


def build_optimizer(config: RunConfig) -> Optimizer:
    """The policy's. It rests while a new critic warms up."""
    own = config.trainer
    return adam(
        own.learning_rate,
        hold_steps=config.critic.warmup_updates if config.critic else 0,
        warmup_steps=own.lr_warmup_updates,
        total_steps=max(own.updates, 1),
        final_share=own.lr_final_share,
        b1=own.adam_b1,
        b2=own.adam_b2,
        eps=own.adam_eps,
        weight_decay=own.weight_decay,
        max_grad_norm=own.max_grad_norm,
        reset_at_push=own.reset_at_push,
    )


class Critic(NamedTuple):
    """How a critic is trained."""

    loss: Loss
    optimizer: Optimizer


def build_critic(config: RunConfig) -> Critic | None:
    """None where the configuration has none."""
    own = config.critic
    if own is None:
        return None
    optimizer = adam(
        own.learning_rate,
        b1=own.adam_b1,
        b2=own.adam_b2,
        eps=own.adam_eps,
        weight_decay=own.weight_decay,
        max_grad_norm=own.max_grad_norm,
        reset_at_push=own.reset_at_push,
        updates_per_step=own.updates_per_step,
        frozen=own.frozen,
    )
    return Critic(recipes.critic(), optimizer)


def rl_shape(config: RunConfig) -> Shape:
    """The fixed batch shape of an update."""
    own = config.trainer
    members = own.groups * own.group_size
    return batch_shape(members, config.sampler.max_context, own.rows_per_microbatch, own.row_length)


class StepProgram(NamedTuple):
    """A compiled trainer step and what makes its first state from parameters."""

    init: Callable[..., TrainState]
    """(parameters, teachers by name) -> the state; no teachers where the loss asks for none."""
    step: TrainStep
    after_push: Callable[[TrainState], TrainState]
    abstract: TrainState
    """Shapes, dtypes and shardings of the state."""
    critic: TrainStep | None = None
    estimate: Estimate | None = None


def compile_step(
    model: Model,
    loss: Loss,
    optimizer: Optimizer,
    mesh: Mesh,
    shape: Shape,
    critic: Critic | None = None,
    estimates: frozenset[str] = frozenset(),
) -> StepProgram:
    """Compiled ahead of time for `mesh`; the state is donated at every call but estimates.

    `estimates` is what the advantage needs beside rewards.
    """
    losses, optimizers = {POLICY: loss}, {POLICY: optimizer}
    if critic is not None:
        losses[CRITIC], optimizers[CRITIC] = critic

    def init(params: Tree, teachers: Mapping[str, Tree]) -> TrainState:
        trees = {POLICY: params} | first_anchors(loss.transform.needs, params, teachers)
        if critic is not None:
            trees[CRITIC] = first_critic(model, params)
        return init_state(trees, optimizers, {n: own.transform.init() for n, own in losses.items()})

    params = abstract_params(model, mesh)
    known = dict.fromkeys(teachers(loss.transform.needs), params)
    shapes = jax.eval_shape(init, params, known)
    placed = state_shardings(shapes, params, mesh)
    state, batch = _abstract(shapes, placed), _abstract_batch(shape, mesh)

    def stepping(step: TrainStep) -> TrainStep:
        own = jax.jit(step, donate_argnums=0, out_shardings=(placed, replicated(mesh)))
        with jax.set_mesh(mesh):
            return own.lower(state, batch).compile()

    started = jax.jit(init, out_shardings=placed)
    pushed = partial(after_push, optimizers=optimizers)
    chunk = vocab_chunk(model)
    estimate = make_estimates(model, estimates, vocab_chunk=chunk)

    def estimating() -> Any:
        own = jax.jit(estimate, out_shardings=replicated(mesh))
        with jax.set_mesh(mesh):
            return own.lower(state.params, batch).compile()

    return StepProgram(
        init=lambda params, teachers=MappingProxyType({}): started(params, dict(teachers)),
        step=stepping(make_train_step(model, loss, optimizers, vocab_chunk=chunk)),
        after_push=jax.jit(pushed, donate_argnums=0, out_shardings=placed).lower(state).compile(),
        abstract=state,
        critic=stepping(make_critic_step(model, critic.loss, optimizers)) if critic else None,
        estimate=estimating() if estimates else None,
    )


def compile_audit(model: Model, mesh: Mesh, shape: Shape) -> Audit:
    """The check of fresh tokens, for one microbatch of `shape`."""

    def run(params: Tree, part: Batch, lag: jax.Array) -> tuple[jax.Array, jax.Array]:
        return audit(
            model,
            params,
            part.tokens,
            part.positions,
            part.segment_ids,
            part.temperature,
            part.behavior,
            part.mask & (part.lag == lag),
            vocab_chunk=vocab_chunk(model),
        )

    part = _abstract_batch(shape, mesh, microbatch=True)
    lag = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(mesh))
    jitted = jax.jit(run, out_shardings=replicated(mesh))
    with jax.set_mesh(mesh):
        return jitted.lower(abstract_params(model, mesh), part, lag).compile()


def compile_sampler(config: RunConfig, model: Model, mesh: Mesh) -> SamplerPrograms:
    """Every shape of the sampler, for its pool of pages."""
    own = config.sampler
    layout = make_layout(
        model.cache_spec,
        data=config.mesh.sampler.data,
        tensor=config.mesh.sampler.tensor,
        sequences=round_up(own.sessions, config.mesh.sampler.data),
        max_context=own.max_context,
    )
    shapes = Shapes(own.slots, own.prefill_rows, own.prefill_tokens, config.mesh.sampler.data)
    params = abstract_params(model, mesh)
    return compile_programs(model, params, layout, shapes, mesh, config.seed)


def state_shardings(state: TrainState, params: Tree, mesh: Mesh) -> TrainState:
    """Moments beside their parameters, scalars everywhere. Both trees are abstract."""
    own = jax.tree_util.tree_leaves_with_path(params)
    by_path = dict(own)

    def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        for start in range(len(path)):
            match = by_path.get(path[start:])
            if match is not None and match.shape == leaf.shape:
                return match.sharding
        return replicated(mesh)

    return jax.tree_util.tree_map_with_path(place, state)


def _abstract(shapes: Tree, shardings: Tree) -> Tree:
    def one(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(one, shapes, shardings)


def _abstract_batch(shape: Shape, mesh: Mesh, *, microbatch: bool = False) -> Batch:
    axes = PartitionSpec(DATA) if microbatch else PartitionSpec(None, DATA)
    rows, whole = NamedSharding(mesh, axes), replicated(mesh)

    def one(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = rows if leaf.ndim else whole
        return jax.ShapeDtypeStruct(leaf.shape[microbatch:], leaf.dtype, sharding=sharding)

    return jax.tree.map(one, empty_batch(shape))


def vocab_chunk(model: Model) -> int:
    """The largest divisor of the vocabulary that is at most 4096."""
    return max(n for n in range(1, min(model.vocab_size, 4096) + 1) if model.vocab_size % n == 0)
