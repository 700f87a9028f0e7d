"""[N] The machines that `rl-jax render` places a run on; no other command reads this section."""

from typing import Annotated, Literal

from pydantic import Field

from rl_jax.config.base import Count, Section

Assignment = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*=.*$")]


class Hosts(Section):
    """Machines of one kind."""

    count: Count = 1
    devices: Count = 8
    """Of each host."""
    topology: Annotated[str, Field(pattern=r"^\d+(x\d+)*$")] | None = None
    """Of a TPU slice, as "2x2x4": the trainer's hosts are one, every sampler's host is its own."""


class Launch(Section):
    """Where the roles of a run stand."""

    chip: Literal["cpu", "h200", "v5p", "v6e"] = "cpu"
    trainer: Hosts = Hosts()
    sampler: Hosts | None = None
    """Left out: samplers stand on the trainer's hosts, on devices that it leaves."""
    first_port: Annotated[int, Field(ge=1024, le=8400)] = 7400
    """The roles' ports are the 600 from here on; below those that kernels give out."""
    env: Annotated[tuple[Assignment, ...], Field(strict=False)] = ()
    """NAME=value for every process; wins over the table that `render` writes."""
