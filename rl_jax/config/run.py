"""[N] What one run is made of: the sections of its TOML file, their defaults and their limits.

Limits of one key stand at the key, those between keys in `RunConfig`. What only the machine can
tell is checked later: devices by `check_devices`, files by `load`, imports by the launcher.
"""

import re
from collections.abc import Mapping
from math import isfinite, prod
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)

from rl_jax.config.base import Count, NonNegative, Positive, Section, UserError
from rl_jax.config.launch import Launch
from rl_jax.config.model import KimiLinear, Llama, Model

CHUNK = 64
"""`rl_jax.arrays.CHUNK`, repeated because a configuration is read without jax."""

TASKS = ("lookup", "arithmetic")
"""The tasks that a bare name means."""
RECIPES = (
    "ppo", "grpo", "dual_clip", "dapo", "dr_grpo", "gspo", "gmpo", "cispo", "tis", "mis", "icepop",
    "dis", "k2_5", "k1_5", "dppo", "ipo", "aipo", "decoupled_ppo", "ppo_ewma", "m2po", "sapo",
    "opsm", "dro", "opd", "mopd",
)  # fmt: skip
"""The losses that a bare name means: functions of `rl_jax.losses.recipes`."""
ADVANTAGES = (
    "group_mean", "standardised", "leave_one_out", "batch_standardised", "max_rl",
    "reinforce_plus_plus", "gae", "length_adaptive_gae", "vtrace", "single",
)  # fmt: skip
"""The advantages that a bare name means: functions of `rl_jax.advantages`."""

NAMING = {"task": "name", "loss": "recipe", "advantage": "name"}
"""Section -> its key that may name an object of the user's own."""

Chunked = Annotated[int, Field(ge=CHUNK, multiple_of=CHUNK)]
Buckets = Annotated[tuple[Count, ...], Field(strict=False, min_length=1)]
Dtype = Literal["float32", "bfloat16"]


def _one_of(kind: str, known: tuple[str, ...]) -> AfterValidator:
    """A name out of `known`, or what names an object of the user's own."""

    def check(value: str) -> str:
        if value in known or re.fullmatch(r".+\.py:\w+|\w+(\.\w+)*:\w+", value):
            return value
        raise ValueError(
            f"no such {kind}; there is {', '.join(known)}, and your own as path/to/file.py:name or "
            "package.module:name"
        )

    return AfterValidator(check)


def _keyword(value: Any) -> Any:
    """What a file can say of a function's keyword; lists become tuples, which nobody changes."""
    if isinstance(value, list | tuple):
        return tuple(map(_keyword, value))
    if isinstance(value, str | int) or (isinstance(value, float) and isfinite(value)):
        return value
    raise ValueError("needs a finite number, a string, true or false, or a list of them")


class Call(Section):
    """A section that names a function; its further keys are keywords of that function."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Annotated[Any, AfterValidator(_keyword)]] = Field(init=False)

    @property
    def keywords(self) -> dict[str, Any]:
        return dict(self.__pydantic_extra__)


class Task(Section):
    """What the agent is trained on."""

    name: Annotated[str, _one_of("task", TASKS)] = "lookup"
    tokenizer: str | None = None
    """Directory of the policy's own tokenizer, as `rl-jax import` leaves it; else the task's."""
    tool_latency_median_s: NonNegative = 0.02
    """Lognormal, p99 = 10 x median."""


class MeshShape(Section):
    """One program's devices: the product of all axes."""

    data: Count = 1
    tensor: Count = 1

    @property
    def size(self) -> int:
        return prod(self.model_dump().values())

    def __str__(self) -> str:
        return " x ".join(f"{axis} {size}" for axis, size in self.model_dump().items())


class TrainerMesh(MeshShape):
    """Rows lie over data, fsdp and expert; `fsdp` cuts parameters and optimizer besides."""

    fsdp: Count = 1
    expert: Count = 1
    """Cuts experts."""
    context: Count = 1
    """Cuts the tokens of a row, in multiples of 64."""

    @property
    def rows(self) -> int:
        """Over how many devices the rows of a microbatch lie."""
        return self.data * self.fsdp * self.expert


class Mesh(Section):
    """Trainer and sampler stand on devices of their own."""

    trainer: TrainerMesh = TrainerMesh()
    sampler: MeshShape = MeshShape()


class WarmStart(Section):
    """Supervised steps on demonstrations before RL, or weights that are there; 0 steps: neither."""

    snapshot: str | None = None
    """Directory of a published version, as runs/quickstart/snapshots/0: start from it."""
    steps: Annotated[int, Field(ge=0)] = 150
    trajectories: Count = 128
    """Per step."""
    learning_rate: NonNegative = 2e-3
    patience: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the long questions that the demonstrator follows to their end; 1: a perfect one."""


class Trainer(Section):
    """An update trains `groups` x `group_size` trajectories; every `push_every` updates push."""

    updates: Annotated[int, Field(ge=0)] = 60
    groups: Count = 16
    group_size: Count = 8
    """1: single rollouts, which need an advantage that does not compare within the group."""
    push_every: Count = 4
    learning_rate: NonNegative = 1e-4
    reset_at_push: bool = True
    """Re-initialise Adam's moments and their bias-correction count at every push."""
    max_grad_norm: Positive = 1.0
    adam_b1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_b2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    adam_eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0
    lr_warmup_updates: Annotated[int, Field(ge=0)] = 0
    lr_final_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The learning rate falls linearly to this share of itself at the last update."""
    row_length: Chunked = 256
    rows_per_microbatch: Count = 16
    param_dtype: Dtype = "float32"
    """What matrices are scored and differentiated in, and kept in where they are not trained."""
    masters: bool = True
    """Trained parameters are kept in float32, whatever `param_dtype` is; without, updates smaller
    than a rounding of bfloat16 are lost."""
    moment_dtype: Dtype = "float32"
    """What the optimizer's moments are kept in."""
    router_bias_rate: NonNegative = 0.0
    """With experts: what an update moves their correction biases by, towards an even load."""
    replay_choices: bool = False
    """With `sampler.record_choices`: tokens go to the experts that the sampler chose for them."""


class Loss(Call):
    """What an update minimises: a recipe, called with the section's other keys.

    Those are checked where the recipe is imported; the recipe's defaults are the section's.
    """

    recipe: Annotated[str, _one_of("recipe", RECIPES)] = "dis"


class Advantage(Call):
    """What a token's gradient is multiplied by, made by a function that gets the other keys."""

    name: Annotated[str, _one_of("advantage", ADVANTAGES)] = "standardised"


class Critic(Section):
    """A critic of the policy's shape, its trunk a copy of version 0; no section: no critic."""

    learning_rate: NonNegative = 1e-3
    updates_per_step: Count = 2
    """On every batch, before the policy's."""
    warmup_updates: Annotated[int, Field(ge=0)] = 10
    """First updates of the run in which the policy rests."""
    frozen: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Patterns of parameters that keep their values, as "trunk.blocks.*.mixer.*"."""
    reset_at_push: bool = False
    max_grad_norm: Positive = 1.0
    adam_b1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_b2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    adam_eps: Positive = 1e-8
    weight_decay: NonNegative = 0.0


class Directories(dict[str, str]):
    """Directories by name; nobody changes one, so a configuration can be a key."""

    def __hash__(self) -> int:
        return hash(frozenset(self.items()))


def _teachers(value: dict[str, str]) -> Directories:
    for name in value:
        if not name.isidentifier():
            raise ValueError(f"{name!r}: needs names of letters, digits and _")
    return Directories(value)


class Staleness(Section):
    """No token that lags more than `tau` pushes is trained on."""

    tau: Count = 4
    when_stale: Literal["drop", "wait", "mask", "pace"] = "drop"
    """Groups with such a token are dropped, or awaited before a push would make them so ("wait"),
    or taken with such tokens masked ("mask"), or never come to be: no group starts that could end
    up with one ("pace")."""
    wait_deadline_s: Positive = 60.0
    """Longest that "wait" holds back the trainer for one group."""


class Sampler(Section):
    """The decode batch, the prefill buckets and the pages of the sampler."""

    slots: Count = 64
    """Requests that decode at once."""
    prefill_rows: Count = 16
    prefill_tokens: Buckets = (16, 64)
    """Compiled prefill lengths, ascending."""
    max_context: Chunked = 128
    on_push: Literal["recompute", "drain", "keep"] = "recompute"
    """Running requests rebuild their cache under new weights, or finish first ("drain"), or go on
    with the cache of the old ones ("keep")."""
    sessions: Count = 384
    """Sequences that hold pages at once."""
    param_dtype: Dtype = "float32"
    """What matrices of a published version are rounded to: samplers, snapshots and their digests,
    and the policy that training begins with."""
    record_choices: bool = False
    """With experts: which of them every token goes to is part of its trajectory."""

    @field_validator("prefill_tokens")
    @classmethod
    def _ascending(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if list(value) != sorted(set(value)):
            raise ValueError("must ascend, each length once")
        return value


class Rollout(Section):
    """The agents that run at once, and the limits of each."""

    in_flight: Count = 256
    temperature: Positive = 1.0
    top_p: float = 1.0
    max_new_tokens: Count = 12
    """Per turn."""
    max_turns: Count = 10
    tool_deadline_s: Positive = 5.0
    ahead: NonNegative = 2.0
    """Batches that may be finished or under way before the trainer asks for them."""
    over_sample: NonNegative = 0.0
    """With ahead = 0: share of a batch's groups that is started on top; those still under way once
    the batch is trained on are cancelled."""
    retry_pause_s: Positive = 1.0
    """No group starts for so long after one whose rollouts the environment broke; doubles while
    that goes on."""

    @field_validator("top_p")
    @classmethod
    def _whole_distribution(cls, value: float) -> float:
        if value != 1.0:
            raise ValueError(
                "must be 1.0: training requests take temperature only, since top-p divides every "
                "probability by the mass it keeps and biases the importance ratio by that factor"
            )
        return value


class Evaluation(Section):
    """Greedy, on held-out questions, before the first and after the last update."""

    questions: Count = 256


class Deadlines(Section):
    """How long a wait may take before it is a failure; a step's includes its compilation."""

    queue_get_s: Positive = 300.0
    put_s: Positive = 300.0
    step_s: Positive = 300.0
    start_s: Positive = 1800.0
    """From the start of a process until all others are there."""


class Processes(Section):
    """Of `rl-jax run --roles processes`."""

    trainers: Count = 1
    """Processes of the trainer, which share its mesh: one `jax.distributed` world."""
    samplers: Count = 1
    """Sampler processes, each with a mesh of its own."""
    address: Annotated[str, Field(pattern=r"^(unix|tcp:[0-9A-Za-z.-]*:[0-9]{1,5})$")] = "unix"
    """How they talk: Unix sockets, or tcp:HOST:PORT, the first of 2 + samplers ports."""
    restarts: Annotated[int, Field(ge=0)] = 3
    """Of each role, within ten minutes."""


class Checkpoint(Section):
    """What a resumed run starts from. One is written whenever a run stops, too."""

    every: Count = 4
    """Pushes between two."""
    keep: Count = 2


class Control(Section):
    """Control runs: rewards `shuffled` within each batch must teach nothing."""

    rewards: Literal["true", "shuffled"] = "true"


class RunConfig(Section):
    """One run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    task: Task = Task()
    model: Model = KimiLinear()
    mesh: Mesh = Mesh()
    warm_start: WarmStart = WarmStart()
    trainer: Trainer = Trainer()
    loss: Loss = Loss()
    advantage: Advantage = Advantage()
    critic: Critic | None = None
    teachers: Annotated[dict[str, str], AfterValidator(_teachers)] = Directories()
    """What a loss calls teacher(NAME): NAME = the directory of a published version. It is no part
    of the run's record: resume and replay need it where it was, and as it was."""
    staleness: Staleness = Staleness()
    sampler: Sampler = Sampler()
    rollout: Rollout = Rollout()
    evaluation: Evaluation = Evaluation()
    deadlines: Deadlines = Deadlines()
    checkpoint: Checkpoint = Checkpoint()
    processes: Processes = Processes()
    launch: Launch = Launch()
    control: Control = Control()

    @property
    def devices_needed(self) -> int:
        return self.mesh.trainer.size + self.mesh.sampler.size

    @property
    def imports(self) -> dict[str, str]:
        """Section -> what it names: a name of ours, or file.py:name, or package.module:name."""
        return {section: getattr(getattr(self, section), key) for section, key in NAMING.items()}

    def with_imports(self, names: Mapping[str, str]) -> "RunConfig":
        """The same, naming other objects in the sections that `names` has."""
        changed = {
            section: getattr(self, section).model_copy(update={NAMING[section]: name})
            for section, name in names.items()
        }
        return self.model_copy(update=changed)

    @model_validator(mode="after")
    def _limits(self) -> "RunConfig":
        trainer, sampler, rollout = self.trainer, self.sampler, self.rollout
        for key, value, limit_key, limit in (
            ("sampler.max_context", sampler.max_context, "trainer.row_length", trainer.row_length),
            (
                "rollout.max_new_tokens", rollout.max_new_tokens,
                "sampler.max_context", sampler.max_context,
            ),
            ("trainer.group_size", trainer.group_size, "rollout.in_flight", rollout.in_flight),
            ("rollout.in_flight", rollout.in_flight, "sampler.sessions", sampler.sessions),
            ("sampler.slots", sampler.slots, "sampler.sessions", sampler.sessions),
        ):  # fmt: skip
            if value > limit:
                raise ValueError(f"{key} = {value}: needs at most {limit_key} = {limit}")
        fresh = self.staleness.tau * trainer.push_every
        if rollout.ahead > fresh:
            raise ValueError(
                f"rollout.ahead = {rollout.ahead}: needs at most staleness.tau x "
                f"trainer.push_every = {fresh}, or batches are stale before they are trained on"
            )
        if not trainer.masters and trainer.param_dtype == "float32":
            raise ValueError(
                'trainer.masters = false: needs trainer.param_dtype = "bfloat16"; parameters in '
                "float32 are their own masters"
            )
        if trainer.replay_choices and not sampler.record_choices:
            raise ValueError(
                "trainer.replay_choices = true: needs sampler.record_choices = true, or there is "
                "nothing to replay"
            )
        if rollout.over_sample and rollout.ahead:
            raise ValueError(
                f"rollout.over_sample = {rollout.over_sample}: needs rollout.ahead = 0, not "
                f"{rollout.ahead}: ahead of the trainer there is no batch to cancel the rest of"
            )
        return self

    @model_validator(mode="after")
    def _shards(self) -> "RunConfig":
        trainer, sampler = self.mesh.trainer, self.mesh.sampler
        kv_heads = self.model.kv_heads if isinstance(self.model, Llama) else 1
        kept = () if kv_heads == 1 else (("model.kv_heads", kv_heads),)
        for key, value, whole_key, whole in (
            *(("trainer.tensor", trainer.tensor, *own) for own in kept),
            *(("sampler.tensor", sampler.tensor, *own) for own in kept),
            ("trainer.tensor", trainer.tensor, "model.heads", self.model.heads),
            ("trainer.tensor", trainer.tensor, "model.ffn", self.model.ffn),
            ("sampler.tensor", sampler.tensor, "model.heads", self.model.heads),
            ("sampler.tensor", sampler.tensor, "model.ffn", self.model.ffn),
            (
                "trainer.fsdp x context", trainer.fsdp * trainer.context,
                "model.width", self.model.width,
            ),
            (
                "trainer.data x fsdp x expert", trainer.rows,
                "trainer.rows_per_microbatch", self.trainer.rows_per_microbatch,
            ),
            (
                "trainer.context x 64", trainer.context * 64,
                "trainer.row_length", self.trainer.row_length,
            ),
            ("sampler.data", sampler.data, "sampler.slots", self.sampler.slots),
            ("sampler.data", sampler.data, "sampler.prefill_rows", self.sampler.prefill_rows),
        ):  # fmt: skip
            if whole % value:
                raise ValueError(f"mesh.{key} = {value}: needs a divisor of {whole_key} = {whole}")
        if trainer.size % self.processes.trainers:
            raise ValueError(
                f"processes.trainers = {self.processes.trainers}: needs a divisor of the devices "
                f"of mesh.trainer = {trainer.size} ({trainer})"
            )
        return self


def file_of(name: str) -> Path | None:
    """The file in "path/to/file.py:name"; None for every other sort of name."""
    file = Path(name.rpartition(":")[0])
    return file if file.suffix == ".py" else None


def check_devices(config: RunConfig, available: int) -> None:
    """Raises UserError where the two meshes together exceed the `available` devices."""
    trainer, sampler = config.mesh.trainer, config.mesh.sampler
    if config.devices_needed <= available:
        return
    key, other = ("trainer", "sampler") if trainer.size > sampler.size else ("sampler", "trainer")
    own, taken = getattr(config.mesh, key), getattr(config.mesh, other).size
    raise UserError(
        f"mesh.{key} needs {own.size} devices ({own}) besides the {taken} of mesh.{other}, "
        f"{available} available: make the product of mesh.{key} at most {max(available - taken, 1)}"
    )


def check_own_devices(config: RunConfig, role: str, available: int, processes: int = 1) -> None:
    """Raises UserError where a role's process has too few `available` devices of its own; it is one
    of `processes`. A role that has no mesh needs none."""
    own = getattr(config.mesh, role, None)
    if own is not None and available * processes < own.size:
        each = f", so {own.size // processes} of each of its {processes} processes"
        raise UserError(
            f"mesh.{role} needs {own.size} devices ({own}){each if processes > 1 else ''}; this "
            f"process has {available}"
        )
