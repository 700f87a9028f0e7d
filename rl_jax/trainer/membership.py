"""[N] What process 0 of a world says ahead of an update, and the check that the data agree."""

from collections.abc import Sequence
from typing import NamedTuple

import msgpack

from rl_jax.trajectories.codec import unpack_group
from rl_jax.trajectories.types import Group

BATCH, STOP = "batch", "stop"
Name = tuple[str, int, tuple[tuple[int, int], ...]]
"""(task, prompt, (sample, attempt) of every member): which group."""


class Header(NamedTuple):
    """Goes ahead of the groups; after a stop nothing follows."""

    kind: str
    """BATCH or STOP."""
    update: int
    published_version: int
    groups: tuple[Name, ...]
    """The membership, in the order of the batch."""
    size: int
    """Bytes of all packed groups."""


def name_of(group: Group) -> Name:
    """The group's part in the membership."""
    keys = [member.key for member in group.members]
    return group.task, group.prompt, tuple((k.sample, k.attempt) for k in keys)


def encode_header(header: Header) -> bytes:
    """The header as msgpack bytes."""
    return msgpack.Packer().pack(header._asdict())


def decode_header(data: bytes) -> Header:
    """The header of msgpack bytes; ValueError for anything else."""
    try:
        header = Header(**msgpack.unpackb(data, use_list=False))
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ValueError(f"the header of an update is damaged: {error}") from error
    wanted = (str, int, int, tuple, int)
    if tuple(map(type, header)) != wanted or header.kind not in (BATCH, STOP):
        raise ValueError(f"the header of an update is damaged: {header}")
    return header


def check_update(header: Header, update: int) -> None:
    """ValueError where process 0 is at another update."""
    if header.update != update:
        raise ValueError(f"process 0 is at update {header.update}, this process at {update}")


def unpack_checked(header: Header, packed: Sequence[bytes]) -> list[Group]:
    """The packed groups; ValueError where they are not those that the header names."""
    size = sum(map(len, packed))
    if size != header.size:
        raise ValueError(f"update {header.update} has {header.size} bytes, {size} came")
    groups = [unpack_group(data) for data in packed]
    for place, (named, group) in enumerate(zip(header.groups, groups, strict=True)):
        if named != name_of(group):
            raise ValueError(
                f"update {header.update}, group {place}: the membership names {named}, "
                f"the data are of {name_of(group)}"
            )
    return groups
