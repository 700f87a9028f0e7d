"""[H] From a TOML file and `key=value` overrides to a `RunConfig`, and back to TOML text."""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from rl_jax.config.base import UserError, explain, toml_value
from rl_jax.config.run import NAMING, Advantage, Loss, RunConfig, file_of

_CALLS = {"loss.recipe": Loss().recipe, "advantage.name": Advantage().name}
"""Keys that name what takes the other keys of their section, and their defaults."""
_BARE_WORD = re.compile(r"[A-Za-z_./][\w./:-]*")


def load(
    path: Path,
    overrides: Sequence[str] = (),
    *,
    check_files: bool = True,
    options: Mapping[str, str] = MappingProxyType({}),
) -> RunConfig:
    """The configuration in `path` with each override `a.b=value` applied, later ones winning.

    One that names another loss or advantage comes first, and the file's keywords of the old go.
    Errors call an override of a key in `options` what that says, all others --set.
    Raises UserError, in one line, for anything wrong with the file, an override or a value.
    """
    table = _read(path)
    naming = [text for text in overrides if _key(text) in _CALLS]
    rest = [text for text in overrides if _key(text) not in _CALLS]
    set_here = [_override(table, text, options) for text in naming + rest]
    try:
        config = RunConfig.model_validate(table)
    except ValidationError as error:
        key, sentence = explain(error, RunConfig)
        named = dict.fromkeys(options.get(own, "--set") for own in set_here)
        both = f"{path} with {', '.join(named)}" if named else path
        own = key.partition("[")[0]
        source = options.get(own, "--set") if own in set_here else both
        raise UserError(f"{source}: {sentence}") from None
    if check_files:
        _check_files(config)
    return config


def resolved(config: RunConfig) -> str:
    """TOML text with every value of `config`, defaults included; `load` reads it back equal."""
    return "\n".join(lines(config.model_dump())).strip() + "\n"


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give the path of a TOML configuration") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text at byte {error.start}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None


def _override(table: dict[str, Any], text: str, options: Mapping[str, str]) -> str:
    """Puts one override into `table` and returns its key."""
    key, (_, equals, value) = _key(text), text.partition("=")
    told = options.get(key, f"--set {text}")
    if not equals or not re.fullmatch(r"\w+(\.\w+)*", key):
        raise UserError(f"--set {text}: needs section.key=value, as in staleness.tau=2")
    *sections, leaf = key.split(".")
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise UserError(f"{told}: {section} is a value and has no keys of its own")
    parsed = _parse(value.strip(), told)
    if key in _CALLS and parsed != table.get(leaf, _CALLS[key]):
        table.clear()
    table[leaf] = parsed
    return key


def _key(text: str) -> str:
    return text.partition("=")[0].strip()


def _parse(value: str, told: str) -> Any:
    """`value` read as TOML; a bare word, whose quotes a shell has eaten, is a string."""
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        parsed = {"value": value} if _BARE_WORD.fullmatch(value) else {}
    if parsed.keys() != {"value"}:
        raise UserError(f'{told}: the value is not TOML; write 3, 0.5, true, "text" or [1, 2]')
    return parsed["value"]


def _check_files(config: RunConfig) -> None:
    for section, name in config.imports.items():
        file = file_of(name)
        if file is not None and not file.is_file():
            key = f"{section}.{NAMING[section]}"
            raise UserError(f"{key} = {toml_value(name)}: there is no file {file}")


def lines(table: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The TOML of `table`: its values first, then its tables; an absent value has no line."""
    for key, value in table.items():
        if value is not None and not isinstance(value, Mapping):
            yield f"{key} = {toml_value(value)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            if any(not isinstance(v, Mapping) for v in value.values()):
                yield f"\n[{prefix}{key}]"
            yield from lines(value, f"{prefix}{key}.")
