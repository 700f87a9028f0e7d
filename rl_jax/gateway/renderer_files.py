"""[H] Reads a renderer from a directory as Hugging Face lays it out.

`tokenizer.json`; `tokenizer_config.json` with `eos_token`, which ends an answer, and, where they
differ from what is common, `stop_tokens`, all that end a turn, and `tool_call_pattern`, a regular
expression; the chat template in `chat_template.jinja` or as the configuration's key.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from rl_jax.gateway.renderer import Renderer, build_renderer

TOOL_CALL = (
    r'<tool_call>\s*\{"name": "(?P<name>[^"]+)", "arguments": (?P<arguments>.*?)\}\s*</tool_call>'
)
"""How Qwen and others after Hermes write a call."""
CONFIG = "tokenizer_config.json"
NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")


def load_renderer(directory: Path | str) -> Renderer:
    """The renderer of `directory`; ValueError names the file or the key that is missing."""
    own = Path(directory)
    tokenizer, settings = _tokenizer(own / "tokenizer.json"), _settings(own)
    named = {name: _text(own, name, settings[name]) for name in NAMED if settings.get(name)}
    if "eos_token" not in named:
        raise ValueError(f"{own / CONFIG} lacks the key eos_token")
    eos = named["eos_token"]
    stops = [eos, *(stop for stop in settings.get("stop_tokens", ()) if stop != eos)]
    return build_renderer(
        tokenizer,
        _template(own, settings),
        stops=stops,
        call_pattern=settings.get("tool_call_pattern", TOOL_CALL),
        named=named,
    )


def _tokenizer(path: Path) -> Tokenizer:
    text = _read(path)
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(f"{path}: not a tokenizer ({error})") from error


def _settings(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG
    text = _read(path)
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path}: needs one JSON object")
    return settings


def _template(directory: Path, settings: Mapping[str, Any]) -> str:
    inside = settings.get("chat_template")
    if isinstance(inside, list):
        inside = _default(directory, inside)
    if inside is not None and not isinstance(inside, str):
        raise ValueError(f"{directory / CONFIG}: chat_template is no text nor a list of them")
    file = directory / "chat_template.jinja"
    return _read(file) if file.is_file() or inside is None else inside


def _default(directory: Path, templates: list[Any]) -> Any:
    try:
        return {one["name"]: one["template"] for one in templates}.get("default")
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{directory / CONFIG}: chat_template: each of a list needs name and template"
        ) from error


def _text(directory: Path, name: str, token: Any) -> str:
    """A token is written as its text, or as a record of how it is added."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ValueError(f"{directory / CONFIG}: {name} is no token: needs its text or content")
    return text


def _read(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"{path} does not exist; a tokenizer directory holds it")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text at byte {error.start}") from error
