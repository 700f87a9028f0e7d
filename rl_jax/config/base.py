"""[N] The error a user meets, the strict model every section derives from, and errors as one line.

Knows nothing of any section: the words for what a key needs are read off the model's annotations.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo


class UserError(ValueError):
    """A mistake of the user's, told in one line that names the thing and what would be right."""


class Section(BaseModel):
    """A frozen table of the configuration; unknown keys, loose types, inf and nan are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


Count = Annotated[int, Field(ge=1)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]

_TYPE_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
PLAIN = frozenset(_TYPE_WORDS)
"""Types of the values that TOML has."""
_BOUND_WORDS = {
    "ge": "at least",
    "gt": "above",
    "le": "at most",
    "lt": "below",
    "multiple_of": "a multiple of",
    "pattern": "matching",
}


def requirement(annotation: Any, metadata: Iterable[Any] = ()) -> str:
    """What a value of this annotation must be, in words: "an integer, at least 1"."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        more = [m for a in args[1:] for m in (a.metadata if isinstance(a, FieldInfo) else [a])]
        return requirement(args[0], [*metadata, *more])
    if origin is Literal:
        return " or ".join(json.dumps(choice) for choice in args)
    if origin in (Union, UnionType):
        inner = [requirement(a, metadata) for a in args if a is not NoneType]
        return " or ".join(inner) + (", or leave the key out" if NoneType in args else "")
    if origin is dict:
        return f"a table, each value {requirement(args[1])}"
    if origin in (tuple, list, Sequence):
        least = next((m.min_length for m in metadata if getattr(m, "min_length", None)), 0)
        some = f"a list of at least {least}" if least else "a list"
        return f"{some}, each {requirement(args[0])}"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "a table with the keys " + ", ".join(annotation.model_fields)
    bounds = [
        f"{words} {getattr(m, name)}"
        for m in metadata
        for name, words in _BOUND_WORDS.items()
        if getattr(m, name, None) is not None
    ]
    return ", ".join([_TYPE_WORDS.get(annotation, "a list"), *bounds])


def keys(
    model: type[BaseModel], prefix: str = "", tags: frozenset[str] = frozenset()
) -> Iterator[str]:
    """Every dotted key of `model`, tables included, in the order they are declared.

    Where a table is one of several kinds, those of the first kind that `tags` names.
    """
    for name, field in model.model_fields.items():
        yield prefix + name
        if (inner := _section(field, tags)) is not None:
            yield from keys(inner, f"{prefix}{name}.", tags)


def _section(field: FieldInfo, tags: frozenset[str]) -> type[BaseModel] | None:
    """The model of a table, one that may be left out too; None for any other field."""
    tables = _sections(field)
    named = [table for tag, table in tables.items() if tag in tags]
    return next(iter([*named, *tables.values()]), None)


def _sections(field: FieldInfo) -> dict[str, type[BaseModel]]:
    """The models that a table may be, by what its telling key says; "" where it has none."""
    annotation, told_by = field.annotation, field.discriminator
    union = get_origin(annotation) in (Union, UnionType)
    tables = [
        one
        for one in (get_args(annotation) if union else (annotation,))
        if isinstance(one, type) and issubclass(one, BaseModel)
    ]
    if not isinstance(told_by, str):
        return {"": tables[0]} if tables else {}
    return {table.model_fields[told_by].default: table for table in tables}


def _untagged(
    location: Sequence[str | int], model: type[BaseModel]
) -> tuple[tuple[str | int, ...], frozenset[str]]:
    """`location` without what pydantic puts in to say which kind of table it took, and that."""
    parts, tags, inside = [], set(), {"": model}
    for part in location:
        if part in inside and part:
            tags.add(part)
            inside = {"": inside[part]}
            continue
        parts.append(part)
        own = [table.model_fields.get(part) for table in inside.values() if isinstance(part, str)]
        inside = _sections(own[0]) if own and own[0] else {}
    return tuple(parts), frozenset(tags)


def dotted(location: Iterable[str | int]) -> str:
    """("model", "layers", 1) -> "model.layers[1]"."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")


def toml_value(value: Any) -> str:
    """`value` as TOML writes it; a table is abbreviated, other foreign values are `str(value)`."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return "{...}" if isinstance(value, dict) else str(value)


def _nearest(key: str, model: type[BaseModel], tags: frozenset[str]) -> str:
    """How the sentence about the unknown `key` ends: the key meant, or those there are."""
    known = list(keys(model, tags=tags))
    section, _, leaf = key.rpartition(".")
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == section}
    elsewhere = {k.rpartition(".")[2]: k for k in known}
    near = get_close_matches(leaf, siblings, n=1)
    near = near or get_close_matches(leaf, elsewhere, n=1, cutoff=0.8)
    if near:
        return f"did you mean {siblings.get(near[0], elsewhere[near[0]])}?"
    return f"{f'[{section}]' if section else 'the top level'} has {', '.join(siblings)}"


def _field(
    location: Sequence[str | int], model: type[BaseModel], tags: frozenset[str]
) -> tuple[FieldInfo, bool]:
    """The field that `location` is, and whether it is an entry of that list or table instead."""
    found: list[FieldInfo] = []
    for part in location:
        if not isinstance(part, str) or part not in model.model_fields:
            break
        found.append(model.model_fields[part])
        model = _section(found[-1], tags) or model
    assert found, "pydantic locates every error at or below a field"
    return found[-1], len(found) < len(location)


def explain(error: ValidationError, model: type[BaseModel]) -> tuple[str, str]:
    """(dotted key, one sentence) for the first mistake in `error`; unknown keys come first, as they
    often explain the rest. The key is "" where the mistake is between several keys."""
    found = error.errors()
    first = min(found, key=lambda e: e["type"] != "extra_forbidden")
    location, tags = _untagged(first["loc"], model)
    key, given = dotted(location), toml_value(first["input"])
    more = f" ({len(found) - 1} more wrong)" if len(found) > 1 else ""
    if first["type"] == "extra_forbidden":
        return key, f"unknown key {key}; {_nearest(key, model, tags)}{more}"
    if first["type"] == "value_error":
        said = str(first.get("ctx", {}).get("error", first["msg"]))
        return key, (f"{key} = {given}: {said}" if key else said) + more
    field, inside = _field(location, model, tags)
    if first["type"] == "union_tag_invalid":
        need = " or ".join(map(json.dumps, _sections(field)))
        told = first.get("ctx", {}).get("tag")
        return key, f"{key}.{field.discriminator} = {toml_value(told)}: needs {need}{more}"
    if inside and get_origin(field.annotation) in (tuple, dict):
        need = requirement(get_args(field.annotation)[get_origin(field.annotation) is dict])
    else:
        need = requirement(field.annotation, field.metadata)
    if first["type"] == "missing":
        return key, f"{key} is missing: needs {need}{more}"
    return key, f"{key} = {given}: needs {need}{more}"
