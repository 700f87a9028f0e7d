"""[H] From a configuration to values: the one place where names become functions and meshes."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from launch.compose import build_advantage as build_advantage
from launch.compose import build_loss as build_loss
from launch.compose import imported
from models import kimi_linear, llama
from models.execution import Execution
from models.kimi_linear.config import WORDS, KimiLinearConfig
from models.layers.rope import RopeScaling
from models.llama.config import LlamaConfig
from rl_jax import rng
from rl_jax.arrays import CHUNK, Tree, round_up
from rl_jax.config.base import UserError
from rl_jax.config.model import KimiLinear, Llama
from rl_jax.config.run import RunConfig
from rl_jax.gateway.renderer import Renderer
from rl_jax.gateway.renderer_files import load_renderer
from rl_jax.losses import recipes
from rl_jax.losses.types import Loss
from rl_jax.model import Model
from rl_jax.orchestrator.state import Limits, Pace
from rl_jax.precision import kept_in, taking_any
from rl_jax.sampler.layout import make_layout
from rl_jax.sampler.programs import Programs as SamplerPrograms
from rl_jax.sampler.programs import compile_programs
from rl_jax.sampler.scheduler import Shapes
from rl_jax.sharding import (
    CONTEXT,
    ROWS,
    check_divides,
    known,
    make_mesh,
    make_trainer_mesh,
    param_shardings,
    replicated,
)
from rl_jax.staleness import Admit, drop_stale, take_all, wait_for_stragglers
from rl_jax.tasks.base import TaskFamily
from rl_jax.trainer.anchors import first_anchors, kept, teachers
from rl_jax.trainer.batches import Batch, Shape, batch_shape, empty_batch
from rl_jax.trainer.critic import Estimate, first_critic, make_critic_step, make_estimates
from rl_jax.trainer.log_softmax import chunk_rows
from rl_jax.trainer.loop import Audit
from rl_jax.trainer.placement import place, place_scalar
from rl_jax.trainer.scores import audit
from rl_jax.trainer.state import (
    CRITIC,
    FLOAT32,
    POLICY,
    Optimizer,
    Storage,
    TrainState,
    adam,
    after_push,
    init_state,
    path_of,
)
from rl_jax.trainer.step import OWN_CHOICES, Experts, TrainStep, make_train_step

TASKS = {
    "lookup": "rl_jax.tasks.lookup.family:family",
    "arithmetic": "rl_jax.tasks.arithmetic.family:family",
}

ROUTER_BIASES = ("*.router_bias",)
"""Correction biases have no gradient: only `Routing.balance` moves them, and no weight decay."""


class Meshes(NamedTuple):
    trainer: Mesh
    sampler: Mesh


def build_meshes(config: RunConfig) -> Meshes:
    """Disjoint meshes: the trainer's devices first, then the sampler's."""
    return Meshes(build_trainer_mesh(config), build_sampler_mesh(config, placed=False))


def build_sampler_mesh(config: RunConfig, *, placed: bool) -> Mesh:
    """A sampler's alone: after the trainer's devices, or the first where all are its own
    (`placed`)."""
    own = config.mesh.sampler
    return make_mesh(
        jax.devices()[0 if placed else config.mesh.trainer.size :], own.data, own.tensor
    )


def build_trainer_mesh(config: RunConfig) -> Mesh:
    """The trainer's alone: the first devices of this process, or of each in a world."""
    own, processes = config.mesh.trainer, range(jax.process_count())
    each = own.size // len(processes)
    devices = [d for i in processes for d in jax.local_devices(i)[:each]]
    return make_trainer_mesh(devices, **own.model_dump())


def build_task(config: RunConfig) -> TaskFamily:
    """Calls what `task.name` names. UserError where it cannot be imported."""
    make = imported(TASKS.get(config.task.name, config.task.name), "task.name")
    family = make(
        seed=config.seed,
        latency_median_s=config.task.tool_latency_median_s,
        patience=config.warm_start.patience,
    )
    named = config.task.tokenizer
    return family if named is None else family._replace(tokenizer_directory=Path(named))


def build_renderer(family: TaskFamily) -> Renderer:
    """The renderer of the task's tokenizer. UserError where there is none, or a file is wrong."""
    if family.tokenizer_directory is None:
        raise UserError(
            f"task.tokenizer: the task {family.train.name} has none of its own; name the directory "
            "of the policy's, as rl-jax import leaves it"
        )
    try:
        return load_renderer(family.tokenizer_directory)
    except ValueError as error:
        raise UserError(f"tokenizer of the task: {error}") from error


def policy_config(config: RunConfig, vocab_size: int) -> LlamaConfig | KimiLinearConfig:
    """The policy's shape; a vocabulary that the configuration does not tell is padded to a multiple
    of 64.

    UserError where the policy knows fewer tokens than the `vocab_size` of the tokenizer.
    """
    own = config.model
    rows = own.vocab_size or round_up(vocab_size, CHUNK)
    if rows < vocab_size:
        raise UserError(
            f"model.vocab_size = {rows}: needs at least {vocab_size}, the entries of the tokenizer"
        )
    sizes = own.model_dump(exclude={"family", "ffn", *vars(Execution())})
    sizes |= {"vocab_size": rows, "ffn_width": own.ffn}
    match own:
        case Llama(rope_scaling=scaling):
            sizes["rope_scaling"] = RopeScaling(**scaling.model_dump()) if scaling else None
            return LlamaConfig(**sizes)
        case KimiLinear():
            sizes |= {key: None for key, word in WORDS.items() if sizes[key] == word}
            return KimiLinearConfig(**sizes)


def build_policy(config: RunConfig, vocab_size: int) -> Model:
    """The policy of `policy_config`, executed as the configuration says."""
    own, shape = config.model, policy_config(config, vocab_size)
    execution = Execution(own.scan, own.remat, own.compute)
    if isinstance(shape, LlamaConfig):
        return taking_any(llama.build_model(shape, execution))
    return taking_any(kimi_linear.build_model(shape, execution))


def abstract_params(model: Model, mesh: Mesh | AbstractMesh, dtype: str = "float32") -> Tree:
    """Shapes, dtypes and shardings of the parameters on a mesh, matrices in `dtype`.

    ValueError naming a parameter that does not divide over it.
    """
    shapes = jax.eval_shape(lambda key: kept_in(model.init(key), dtype), jax.random.key(0))
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
        frozen=ROUTER_BIASES,
        moment_dtype=own.moment_dtype,
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
        frozen=(*own.frozen, *ROUTER_BIASES),
        moment_dtype=config.trainer.moment_dtype,
    )
    return Critic(recipes.critic(), optimizer)


def rl_shape(config: RunConfig) -> Shape:
    """The fixed batch shape of an update."""
    own = config.trainer
    members = own.groups * own.group_size
    return batch_shape(members, config.sampler.max_context, own.rows_per_microbatch, own.row_length)


class StepOptions(NamedTuple):
    """What the trainer's programs are compiled for, beside model, loss and shape."""

    storage: Storage = FLOAT32
    experts: Experts = OWN_CHOICES
    choices: tuple[int, int] | None = None
    """(layers, choices of a token) that batches have room for."""


PLAIN = StepOptions()


def step_options(config: RunConfig, model: Model) -> StepOptions:
    """Of a run."""
    own, routing = config.trainer, model.routing
    experts = Experts(own.replay_choices, own.router_bias_rate)
    recorded = routing is not None and config.sampler.record_choices
    choices = (routing.layers, routing.chosen) if routing and recorded else None
    return StepOptions(Storage(own.param_dtype, own.masters), experts, choices)


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


def _first_state(
    model: Model,
    loss: Loss,
    optimizers: Mapping[str, Optimizer],
    critic: Critic | None,
    storage: Storage,
) -> Callable[[Tree, Mapping[str, Tree]], TrainState]:
    """(version-0 parameters, teachers by name) -> the state that training begins with."""
    losses = {POLICY: loss} | ({CRITIC: critic.loss} if critic else {})

    def init(params: Tree, teachers: Mapping[str, Tree]) -> TrainState:
        own = kept_in(params, storage.trained)
        trees = {POLICY: own} | kept(first_anchors(loss.transform.needs, own, teachers), storage)
        if critic is not None:
            trees[CRITIC] = first_critic(model, own)
        return init_state(trees, optimizers, {n: own.transform.init() for n, own in losses.items()})

    return init


def abstract_state(
    model: Model,
    loss: Loss,
    optimizer: Optimizer,
    mesh: Mesh | AbstractMesh,
    critic: Critic | None = None,
    storage: Storage = FLOAT32,
) -> TrainState:
    """Shapes, dtypes and shardings of the trainer's state on a mesh."""
    optimizers = {POLICY: optimizer} | ({CRITIC: critic.optimizer} if critic else {})
    params = abstract_params(model, mesh)
    known = dict.fromkeys(teachers(loss.transform.needs), params)
    shapes = jax.eval_shape(_first_state(model, loss, optimizers, critic, storage), params, known)
    return _abstract(shapes, state_shardings(shapes, params, mesh))


def compile_step(
    model: Model,
    loss: Loss,
    optimizer: Optimizer,
    mesh: Mesh,
    shape: Shape,
    critic: Critic | None = None,
    estimates: frozenset[str] = frozenset(),
    options: StepOptions = PLAIN,
) -> StepProgram:
    """Compiled ahead of time for `mesh`; the state is donated at every call but estimates.

    `estimates` is what the advantage needs beside rewards.
    """
    storage, experts, choices = options
    optimizers = {POLICY: optimizer} | ({CRITIC: critic.optimizer} if critic else {})
    init = _first_state(model, loss, optimizers, critic, storage)
    state = abstract_state(model, loss, optimizer, mesh, critic, storage)
    placed = jax.tree.map(lambda leaf: leaf.sharding, state)
    batch = _abstract_batch(shape, mesh, choices)

    def stepping(step: TrainStep) -> TrainStep:
        own = jax.jit(step, donate_argnums=0, out_shardings=(placed, replicated(mesh)))
        with jax.set_mesh(mesh):
            return _placing(own.lower(state, batch).compile(), mesh)

    started = jax.jit(init, out_shardings=placed)
    pushed = partial(after_push, optimizers=optimizers)
    chunk = vocab_chunk(model)
    how = {"vocab_chunk": chunk, "storage": storage}
    estimate = make_estimates(model, estimates, replay=experts.replay, **how)
    step = make_train_step(model, loss, optimizers, experts=experts, **how)

    def estimating() -> Any:
        own = jax.jit(estimate, out_shardings=replicated(mesh))
        with jax.set_mesh(mesh):
            return _placing(own.lower(state.params, batch).compile(), mesh)

    return StepProgram(
        init=lambda params, teachers=MappingProxyType({}): started(params, dict(teachers)),
        step=stepping(step),
        after_push=jax.jit(pushed, donate_argnums=0, out_shardings=placed).lower(state).compile(),
        abstract=state,
        critic=stepping(make_critic_step(model, critic.loss, optimizers, storage))
        if critic
        else None,
        estimate=estimating() if estimates else None,
    )


def compile_audit(
    model: Model,
    mesh: Mesh,
    shape: Shape,
    served: str = "float32",
    options: StepOptions = PLAIN,
) -> Audit:
    """The check of fresh tokens, for one microbatch of `shape`, under versions published in the
    dtype `served`."""

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
            choices=part.choices if options.experts.replay else None,
        )

    part = _abstract_batch(shape, mesh, options.choices, microbatch=True)
    lag = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(mesh))
    jitted = jax.jit(run, out_shardings=replicated(mesh))
    with jax.set_mesh(mesh):
        program = jitted.lower(abstract_params(model, mesh, served), part, lag).compile()
    if jax.process_count() == 1:
        return program
    return lambda params, part, lag: program(params, place(part, mesh), place_scalar(lag, mesh))


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
    params = abstract_params(model, mesh, own.param_dtype)
    record = own.record_choices
    return compile_programs(model, params, layout, shapes, mesh, config.seed, record=record)


def _placing(program: Any, mesh: Mesh) -> Any:
    """`program`, whose second argument is a batch on the host, in a world of any size."""
    if jax.process_count() == 1:  # not mesh.is_multi_process: so is a mesh of described devices
        return program
    return lambda first, batch: program(first, place(batch, mesh))


def state_shardings(state: TrainState, params: Tree, mesh: Mesh | AbstractMesh) -> TrainState:
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
    def one(path: tuple[Any, ...], leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        check_divides(path_of(path), leaf.shape, sharding.spec, sharding.mesh)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree_util.tree_map_with_path(one, shapes, shardings)


def _abstract_batch(
    shape: Shape,
    mesh: Mesh,
    choices: tuple[int, int] | None = None,
    *,
    microbatch: bool = False,
) -> Batch:
    axes = (ROWS, CONTEXT) if microbatch else (None, ROWS, CONTEXT)
    rows, whole = NamedSharding(mesh, known(PartitionSpec(*axes), mesh)), replicated(mesh)

    def one(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = rows if leaf.ndim else whole
        return jax.ShapeDtypeStruct(leaf.shape[microbatch:], leaf.dtype, sharding=sharding)

    return jax.tree.map(one, empty_batch(shape, choices))


def vocab_chunk(model: Model) -> int:
    """Rows of the vocabulary that a step takes at once, at most 4096."""
    return chunk_rows(model.vocab_size, 4096)
