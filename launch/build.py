"""[H] From a configuration to values: the one place where names become functions and meshes."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.kimi_linear.config import KimiLinearConfig
from models.kimi_linear.module import build_model
from rl_jax import rng
from rl_jax.advantages import Advantage, group_mean, standardised
from rl_jax.arrays import CHUNK, Tree, round_up
from rl_jax.config.base import UserError
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
from rl_jax.trainer.batches import Batch, Shape, batch_shape, empty_batch
from rl_jax.trainer.loop import Audit
from rl_jax.trainer.scores import audit
from rl_jax.trainer.state import Optimizer, TrainState, adam, init_state, reset_optimizers
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


def imported(name: str, key: str) -> Any:
    """The object behind `package.module:name` or `path/to/file.py:name`.

    Raises UserError, naming `key`, where there is none.
    """
    module_name, _, attribute = name.partition(":")
    try:
        if module_name.endswith(".py"):
            module = _executed(Path(module_name))
        else:
            module = importlib.import_module(module_name)
        return getattr(module, attribute)
    except (ImportError, OSError, AttributeError, SyntaxError) as error:
        raise UserError(f"{key} = {name!r} cannot be imported: {error}") from error


def _executed(path: Path) -> ModuleType:
    """The module of a file that no package holds; dataclasses in it look it up by its name."""
    spec = importlib.util.spec_from_file_location(f"file:{path}", path)
    assert spec and spec.loader, "a .py file always has a loader"
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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


def build_loss(config: RunConfig) -> Loss:
    match config.loss.recipe:
        case "dis":
            masks = config.staleness.when_stale == "mask"
            mask_above = config.staleness.tau if masks else None
            return recipes.dis(config.loss.eps_low, config.loss.eps_high, mask_above=mask_above)


def build_advantage(config: RunConfig) -> Advantage:
    match config.advantage.name:
        case "standardised":
            return standardised
        case "group_mean":
            return group_mean


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
    own = config.trainer
    return adam(
        own.learning_rate,
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


def rl_shape(config: RunConfig) -> Shape:
    """The fixed batch shape of an update."""
    own = config.trainer
    members = own.groups * own.group_size
    return batch_shape(members, config.sampler.max_context, own.rows_per_microbatch, own.row_length)


class StepProgram(NamedTuple):
    """A compiled trainer step and what makes its first state from parameters."""

    init: Callable[[Tree], TrainState]
    step: TrainStep
    reset: Callable[[TrainState], TrainState]
    abstract: TrainState
    """Shapes, dtypes and shardings of the state."""


def compile_step(
    model: Model, loss: Loss, optimizer: Optimizer, mesh: Mesh, shape: Shape
) -> StepProgram:
    """Compiled ahead of time for `mesh`; the state is donated at every call."""
    optimizers = {"policy": optimizer}

    def init(params: Tree) -> TrainState:
        return init_state({"policy": params}, optimizers, loss.transform.init())

    params = abstract_params(model, mesh)
    placed = state_shardings(jax.eval_shape(init, params), params, mesh)
    state = _abstract(jax.eval_shape(init, params), placed)
    step = make_train_step(model, loss, optimizers, vocab_chunk=_vocab_chunk(model))
    batch = _abstract_batch(shape, mesh)
    reset = partial(reset_optimizers, optimizers=optimizers)
    step = jax.jit(step, donate_argnums=0, out_shardings=(placed, replicated(mesh)))
    return StepProgram(
        init=jax.jit(init, out_shardings=placed),
        step=step.lower(state, batch).compile(),
        reset=jax.jit(reset, donate_argnums=0, out_shardings=placed).lower(state).compile(),
        abstract=state,
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
            vocab_chunk=_vocab_chunk(model),
        )

    part = _abstract_batch(shape, mesh, microbatch=True)
    lag = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(mesh))
    jitted = jax.jit(run, out_shardings=replicated(mesh))
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


def _vocab_chunk(model: Model) -> int:
    """The largest divisor of the vocabulary that is at most 4096."""
    return max(n for n in range(1, min(model.vocab_size, 4096) + 1) if model.vocab_size % n == 0)
