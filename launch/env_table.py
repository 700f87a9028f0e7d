"""[N] The one table of environment variables and compiler flags: platform, kind of role, reason.

Flags are a process's own: what helps a trainer is not what a sampler needs, and a flag of one
platform aborts a process of another. Settings are merged so that the user's win; only what places
a process (`PLACEMENT`) is ours.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from rl_jax.config.base import UserError

Platform = Literal["cpu", "gpu", "tpu"]
Kind = Literal["trainer", "sampler", "host"]
"""Of a role; "host" has no device."""

PLACEMENT = frozenset({"JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS"})
"""A value found in the environment of a job is about the whole node, and would put two roles on
one device."""
CARRIERS: Mapping[Platform, str] = {
    "cpu": "XLA_FLAGS",
    "gpu": "XLA_FLAGS",
    "tpu": "LIBTPU_INIT_ARGS",
}
"""Where flags go. A TPU's flag in XLA_FLAGS aborts every process that has no TPU."""
FLAG_VARIABLES = frozenset(CARRIERS.values())

_EVERYWHERE: tuple[Platform, ...] = ("cpu", "gpu", "tpu")
_EVERY: tuple[Kind, ...] = ("trainer", "sampler", "host")
_DEVICES: tuple[Kind, ...] = ("trainer", "sampler")


class Row(NamedTuple):
    """One setting; a name that begins with -- is a flag of the platform's carrier."""

    name: str
    value: str
    platforms: tuple[Platform, ...]
    kinds: tuple[Kind, ...]
    reason: str
    source: str


_TABLE = (
    Row("PYTHONUNBUFFERED", "1", _EVERYWHERE, _EVERY,
        "the last lines of a process that is killed are in its log", "Python's manual"),
    Row("JAX_TRACEBACK_FILTERING", "off", _EVERYWHERE, _EVERY,
        "a traceback in a log cannot be asked again for the frames that were left out",
        "jax's manual"),
    Row("TF_CPP_MIN_LOG_LEVEL", "1", _EVERYWHERE, _EVERY,
        "warnings and errors of XLA's own log, not its information", "XLA's logging"),
    Row("JAX_COMPILATION_CACHE_DIR", "{run}/compiled", ("gpu", "tpu"), _DEVICES,
        "a role that is started again finds its programs; the CPU's hardly hit and are left out",
        "jax's manual; WORKSPACE_NOTES.md"),
    Row("JAX_PLATFORMS", "cpu", _EVERYWHERE, ("host",),
        "a role without a device that imports jax would take the devices of its host's others",
        "marin issue 2618"),
    Row("JAX_PLATFORMS", "cpu", ("cpu",), _DEVICES,
        "no search for accelerators", "jax's manual"),
    Row("JAX_PLATFORMS", "cuda,cpu", ("gpu",), _DEVICES,
        "a driver that is missing is an error, not a run on the CPU", "jax's manual"),
    Row("JAX_PLATFORMS", "tpu,cpu", ("tpu",), _DEVICES,
        "a TPU that another process holds is an error, not a run on the CPU", "jax's manual"),
    Row("OMP_NUM_THREADS", "8", ("gpu", "tpu"), _EVERY,
        "host libraries would start a thread per core in every role of a host",
        "launchers of the field"),
    Row("NCCL_DEBUG", "WARN", ("gpu",), _DEVICES,
        "a transport that fails is named in the log", "NCCL's manual"),
    Row("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92", ("gpu",), _DEVICES,
        "a role has its GPUs alone, so it may take more of them than the default 0.75",
        "jax's manual"),
    Row("--xla_gpu_enable_latency_hiding_scheduler", "true", ("gpu",), ("trainer",),
        "collectives run beside products", "jax's GPU performance tips"),
    Row("--xla_gpu_all_reduce_combine_threshold_bytes", "1073741824", ("gpu",), ("trainer",),
        "few large all-reduces of gradients", "maxtext's flags for A3"),
    Row("--xla_gpu_all_gather_combine_threshold_bytes", "134217728", ("gpu",), ("trainer",),
        "parameters of fsdp are gathered a few layers at a time", "maxtext's flags for A3"),
    Row("--xla_gpu_reduce_scatter_combine_threshold_bytes", "134217728", ("gpu",), ("trainer",),
        "gradients of fsdp are scattered a few layers at a time", "maxtext's flags for A3"),
    Row("--xla_gpu_enable_pipelined_all_gather", "true", ("gpu",), ("trainer",),
        "the next layer's parameters come while one computes", "maxtext's flags for A3"),
    Row("--xla_gpu_enable_pipelined_reduce_scatter", "true", ("gpu",), ("trainer",),
        "as above, for gradients", "maxtext's flags for A3"),
    Row("--xla_gpu_enable_pipelined_all_reduce", "true", ("gpu",), ("trainer",),
        "as above, for gradients of data parallelism", "maxtext's flags for A3"),
    Row("--xla_gpu_enable_while_loop_double_buffering", "true", ("gpu",), ("trainer",),
        "pipelining over a scan of layers needs two buffers", "maxtext's flags for A3"),
    Row("--xla_gpu_exclude_nondeterministic_ops", "true", ("gpu",), ("trainer",),
        "a replay compares bits", "XLA's flags"),
    Row("--xla_tpu_enable_async_collective_fusion", "true", ("tpu",), ("trainer",),
        "collectives run beside products", "maxtext's flags for TPU"),
    Row("--xla_tpu_enable_async_collective_fusion_fuse_all_gather", "true", ("tpu",), ("trainer",),
        "as above, for parameters of fsdp", "maxtext's flags for TPU"),
    Row("--xla_tpu_enable_async_collective_fusion_multiple_steps", "true", ("tpu",), ("trainer",),
        "a collective may span several products", "maxtext's flags for TPU"),
    Row("--xla_tpu_overlap_compute_collective_tc", "true", ("tpu",), ("trainer",),
        "the tensor core goes on while a collective is under way", "maxtext's flags for TPU"),
    Row("--xla_enable_async_all_gather", "true", ("tpu",), ("trainer",),
        "what the fusions above start from", "maxtext's flags for TPU"),
    Row("--xla_tpu_enable_data_parallel_all_reduce_opt", "true", ("tpu",), ("trainer",),
        "all-reduces of gradients across slices run beside the backward pass",
        "maxtext's flags for TPU"),
    Row("--xla_tpu_data_parallel_opt_different_sized_ops", "true", ("tpu",), ("trainer",),
        "as above, where gradients differ in size", "maxtext's flags for TPU"),
    Row("--xla_tpu_scoped_vmem_limit_kib", "81920", ("tpu",), ("trainer",),
        "larger tiles of fused products; dense models without experts take up to 98304",
        "maxtext's flags for TPU"),
    Row("--megascale_error_reporter_abort_on_hang", "true", ("tpu",), ("trainer",),
        "a hang between slices ends the process, and the launcher starts it again",
        "axlearn's compiler options"),
    Row("--megascale_graph_hang_threshold", "10m", ("tpu",), ("trainer",),
        "how long is a hang: longer than a checkpoint", "axlearn's compiler options"),
)  # fmt: skip


class Setting(NamedTuple):
    """One resolved line: what a process gets, why, and who says so."""

    name: str
    value: str
    reason: str
    source: str


def rows(platform: Platform, kind: Kind) -> tuple[Row, ...]:
    """What the table says of a kind of role on a platform."""
    return tuple(row for row in _TABLE if platform in row.platforms and kind in row.kinds)


def resolve(
    platform: Platform, kind: Kind, users: Sequence[str] = (), run_dir: str = "runs/NAME"
) -> tuple[Setting, ...]:
    """The table's settings with the user's `NAME=value` over them, flags one by one.

    UserError where a user's value would place a process.
    """
    given = dict(text.split("=", 1) for text in users)
    if placed := sorted(PLACEMENT & given.keys()):
        raise UserError(f"launch.env: {placed[0]} says where a role stands: leave it out")
    flags = {name for text in given.values() for name in _flags(text)}
    found: list[Setting] = []
    for row in rows(platform, kind):
        if row.name in flags or row.name in given:
            continue
        value = row.value.replace("{run}", run_dir)
        found.append(Setting(row.name, value, row.reason, row.source))
    theirs = [
        Setting(name, value, "set by the user", "launch.env") for name, value in given.items()
    ]
    return (*found, *theirs)


def variables(platform: Platform, settings: Iterable[Setting]) -> dict[str, str]:
    """The settings as a process's environment: flags together in their carrier."""
    env: dict[str, str] = {}
    for setting in settings:
        if setting.name.startswith("--"):
            carrier, text = CARRIERS[platform], f"{setting.name}={setting.value}"
            env[carrier] = f"{env[carrier]} {text}" if carrier in env else text
        elif setting.name in FLAG_VARIABLES and setting.name in env:
            env[setting.name] += f" {setting.value}"
        else:
            env[setting.name] = setting.value
    return env


def over(planned: Mapping[str, str], found: Mapping[str, str]) -> dict[str, str]:
    """`planned` as it is started where the environment already has `found`: the user's values win,
    of flags those that the user names."""
    env = dict(planned)
    for name in planned.keys() & found.keys():
        if name in FLAG_VARIABLES:
            named = set(_flags(found[name]))
            ours = [text for text in planned[name].split() if text.split("=")[0] not in named]
            env[name] = " ".join([*found[name].split(), *ours])
        elif name not in PLACEMENT:
            env[name] = found[name]
    return env


def _flags(text: str) -> list[str]:
    """Names of the flags in a variable's value."""
    return [word.split("=")[0] for word in text.split() if word.startswith("--")]
