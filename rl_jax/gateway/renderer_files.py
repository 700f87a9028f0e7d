"""[H] Reads a renderer from a directory as Hugging Face lays it out.

`tokenizer.json`, `chat_template.jinja`, and `tokenizer_config.json` with `eos_token`, which ends an
answer, `stop_tokens`, all that end a turn, and `tool_call_pattern`, a regular expression.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer

from rl_jax.gateway.renderer import Renderer, build_renderer


def load_renderer(directory: Path | str) -> Renderer:
    """The renderer of `directory`; ValueError names the file or the key that is missing."""
    tokenizer, template, config = (
        _read(Path(directory) / name)
        for name in ("tokenizer.json", "chat_template.jinja", "tokenizer_config.json")
    )
    settings = json.loads(config)
    for key in ("eos_token", "stop_tokens", "tool_call_pattern"):
        if key not in settings:
            raise ValueError(f"{directory}/tokenizer_config.json lacks the key {key}")
    eos = settings["eos_token"]
    stops = [eos, *(stop for stop in settings["stop_tokens"] if stop != eos)]
    pattern = settings["tool_call_pattern"]
    built = Tokenizer.from_str(tokenizer)
    return build_renderer(built, template, stops=stops, call_pattern=pattern)


def _read(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"{path} does not exist; a tokenizer directory holds it")
    return path.read_text(encoding="utf-8")
