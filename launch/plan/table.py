"""[N] A plan as a table for people and as JSON for programs."""

import json
from collections.abc import Sequence
from typing import Any

from launch.plan.base import CHIPS, Part, Program, total


def to_json(programs: Sequence[Program], chip: str | None) -> str:
    """One object: for each program its mesh, parts, total and, with a chip, whether it fits."""
    return json.dumps({program.name: _plain(program, chip) for program in programs}, indent=1)


def _plain(program: Program, chip: str | None) -> dict[str, Any]:
    def listed(parts: tuple[Part, ...]) -> list[dict[str, Any]]:
        return [part._asdict() for part in parts]

    found = {
        "mesh": dict(program.mesh),
        "devices": program.devices,
        "held": listed(program.held),
        "moments": {name: listed(parts) for name, parts in program.moments.items()},
        "total": program.total,
    }
    if chip is None:
        return found
    return found | {"chip": chip, "memory": CHIPS[chip], "fits": program.total <= CHIPS[chip]}


def to_text(programs: Sequence[Program], chip: str | None) -> str:
    """Lines of at most 80 columns; estimates have a ~, and nothing that is 0 has a line."""
    return "\n\n".join("\n".join(_lines(program, chip)) for program in programs)


def _lines(program: Program, chip: str | None) -> list[str]:
    cut = " x ".join(f"{axis} {size}" for axis, size in program.mesh.items() if size > 1)
    count = "1 device" if program.devices == 1 else f"{program.devices} devices"
    lines = [f"{program.name}: {count} ({cut or 'not cut'}), bytes of one"]
    lines += [_line(part) for part in program.held if part.bytes]
    fullest = max(program.moments, key=lambda name: total(program.moments[name]))
    for name, parts in program.moments.items():
        most = ", the most" if name == fullest and len(program.moments) > 1 else ""
        lines.append(f"  while in {name}{most}: {_size(total(parts))}")
        lines += ["  " + _line(part) for part in parts if part.bytes]
    lines.append(f"  {'total':44}{_size(program.total):>14}{program.total:>18,}")
    if chip is not None:
        does = "fits" if program.total <= CHIPS[chip] else "does not fit"
        share = program.total / CHIPS[chip]
        lines.append(f"  {does} {chip} of {_size(CHIPS[chip])}: {share:.0%} of it")
    return lines


def _line(part: Part) -> str:
    mark = " " if part.exact else "~"
    return f"  {mark} {part.name:42}{_size(part.bytes):>14}{part.bytes:>18,}"


def _size(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"
