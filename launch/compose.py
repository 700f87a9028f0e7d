"""[H] Losses and advantages out of a configuration: imported, called with keywords, checked.

A bare name is one of ours; anything else is an import, of a module or of a file.
"""

import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from launch.rehearsal import in_one_line, rehearse
from rl_jax import advantages
from rl_jax.advantages import Advantage
from rl_jax.config.base import PLAIN, UserError, requirement, toml_value
from rl_jax.config.run import ADVANTAGES, NAMING, RECIPES, Call, RunConfig
from rl_jax.losses import recipes
from rl_jax.losses.masks import masked_above
from rl_jax.losses.types import Loss, LossTransform

_LISTS = (Sequence, tuple, list)
_SOURCE = "__rl_jax_source__"
"""Where a file's module keeps what was executed."""


def build_loss(config: RunConfig) -> Loss:
    """What `loss.recipe` makes of the section's other keys; with `when_stale = "mask"`, tokens that
    lag more than tau are masked before it. UserError for whatever is wrong with them."""
    loss = _called("loss", config.loss, _recipe(config.loss.recipe))
    _check_loss(loss, f"loss.recipe = {toml_value(config.loss.recipe)}")
    if config.staleness.when_stale == "mask":
        return masked_above(loss, config.staleness.tau)
    return loss


def build_advantage(config: RunConfig) -> Advantage:
    """What `advantage.name` makes of the section's other keys. UserError as `build_loss`."""
    own = config.advantage
    made = _called("advantage", own, _advantage(own.name))
    if not isinstance(made, Advantage):
        raise UserError(
            f"advantage.name = {toml_value(own.name)} returns {type(made).__name__}, "
            "needs an rl_jax.advantages.Advantage"
        )
    return made


def with_defaults(config: RunConfig) -> RunConfig:
    """The same with the defaults of loss and advantage written out, as far as TOML can say them.

    Both are built on the way, and the loss is traced: UserError for whatever is wrong with them.
    """
    rehearse(build_loss(config), f"loss.recipe = {toml_value(config.loss.recipe)}")
    build_advantage(config)
    changed = {}
    for section, function in (
        ("loss", _recipe(config.loss.recipe)),
        ("advantage", _advantage(config.advantage.name)),
    ):
        own: Call = getattr(config, section)
        defaults = {
            name: parameter.default
            for name, parameter in _parameters(function, section).items()
            if _is_toml(parameter.default)
        }
        named = {NAMING[section]: config.imports[section]}
        changed[section] = type(own).model_validate(defaults | named | own.keywords)
    return config.model_copy(update=changed)


def imported(name: str, key: str) -> Any:
    """The object behind `package.module:name` or `path/to/file.py:name`.

    Raises UserError, naming `key`, where there is none.
    """
    module_name, _, attribute = name.rpartition(":")
    try:
        if module_name.endswith(".py"):
            module = _executed(Path(module_name))
        else:
            module = importlib.import_module(module_name)
        return getattr(module, attribute)
    # A file is a program of the user's: it may raise anything, or call exit().
    except (Exception, SystemExit) as error:
        raise UserError(f"{key} = {name!r} cannot be imported: {in_one_line(error)}") from error


def _executed(path: Path) -> ModuleType:
    """The module of a file that no package holds; dataclasses in it look it up by its name.

    One that was executed as it is now is not executed again.
    """
    spec = importlib.util.spec_from_file_location(f"file:{path}", path)
    assert spec and spec.loader, "a .py file always has a loader"
    source = path.read_bytes()
    known = sys.modules.get(spec.name)
    if known is not None and vars(known).get(_SOURCE) == source:
        return known
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    setattr(module, _SOURCE, source)
    return module


def _recipe(name: str) -> Any:
    return getattr(recipes, name) if name in RECIPES else imported(name, "loss.recipe")


def _advantage(name: str) -> Any:
    return getattr(advantages, name) if name in ADVANTAGES else imported(name, "advantage.name")


def _called(section: str, own: Call, function: Any) -> Any:
    """`function` called with the keywords of its section."""
    name = toml_value(getattr(own, NAMING[section]))
    told = f"{section}.{NAMING[section]} = {name}"
    if not callable(function):
        raise UserError(
            f"{told} is {type(function).__name__}, needs a function that takes keywords"
        )
    parameters = _parameters(function, told)
    for keyword in own.keywords:
        if keyword not in parameters and not _takes_any(function):
            there = ", ".join(parameters) or "no keywords"
            raise UserError(f"unknown key {section}.{keyword}: {name} takes {there}")
    for keyword, parameter in parameters.items():
        if parameter.default is parameter.empty and keyword not in own.keywords:
            raise UserError(f"{section}.{keyword} is missing: {name} needs it")
    types = _types(function)
    keywords = {k: _typed(section, k, v, types.get(k)) for k, v in own.keywords.items()}
    try:
        return function(**keywords)
    except Exception as error:
        raise UserError(f"{told}: {in_one_line(error)}") from error


def _parameters(function: Callable[..., Any], told: str) -> Mapping[str, inspect.Parameter]:
    """Those that can be given by keyword. UserError where others are needed or nothing is known."""
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    try:
        found = inspect.signature(function).parameters
    except ValueError:
        raise UserError(
            f"{told} does not say what it takes, needs a function that takes keywords"
        ) from None
    for name, parameter in found.items():
        if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise UserError(f"{told} takes {name} by position only, needs one that takes keywords")
    return {name: parameter for name, parameter in found.items() if parameter.kind in kinds}


def _takes_any(function: Callable[..., Any]) -> bool:
    found = inspect.signature(function).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in found)


def _types(function: Callable[..., Any]) -> Mapping[str, Any]:
    """The annotations of its keywords, as far as they can be known here."""
    try:
        return get_type_hints(function)
    except (NameError, TypeError):  # of names that only a type checker sees
        return {}


def _is_sayable(annotation: Any) -> bool:
    """Whether TOML has values of this kind."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return any(_is_sayable(arg) for arg in args if arg is not NoneType)
    if origin in _LISTS:
        return all(_is_sayable(arg) for arg in args if arg is not Ellipsis)
    return annotation in (*PLAIN, *_LISTS, Any, object) or origin is Literal


def _typed(section: str, keyword: str, value: Any, annotation: Any) -> Any:
    """`value` as its annotation, if there is one, wants it; a whole number is a float, too."""
    if annotation is None:
        return value
    said = f"{section}.{keyword} = {toml_value(value)}"
    if not _is_sayable(annotation):
        kind = inspect.formatannotation(annotation)
        raise UserError(f"{said}: needs {kind}, which no file can say; leave the key out")
    lists = get_origin(annotation) is list and isinstance(value, tuple)
    try:
        given = list(value) if lists else value
        return TypeAdapter(annotation).validate_python(given, strict=True)
    except ValidationError:
        raise UserError(f"{said}: needs {requirement(annotation)}") from None


def _is_toml(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_toml, value))
    return isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))


def _check_loss(loss: Any, told: str) -> None:
    if isinstance(loss, LossTransform):
        raise UserError(
            f"{told} returns the bare transform {loss.name}: it needs a reduction, "
            "as in Loss(transform, token_mean)"
        )
    if not isinstance(loss, Loss):
        raise UserError(f"{told} returns {type(loss).__name__}, needs an rl_jax.losses.Loss")
    if not isinstance(loss.transform, LossTransform):
        raise UserError(
            f"{told}: the transform of its Loss is {type(loss.transform).__name__}, "
            "needs a LossTransform"
        )
    if not callable(loss.reduction):
        raise UserError(
            f"{told}: the reduction of its Loss is {type(loss.reduction).__name__}, "
            "needs a function such as token_mean"
        )
