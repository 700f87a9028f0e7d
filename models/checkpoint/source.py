"""[N] What an import reads from: tensors by name, the configuration, and files to carry along."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from models.checkpoint.layout import Tensor

CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
CARRIED = (
    CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TEMPLATE,
    "generation_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tiktoken.model",
)
"""Small files of a checkpoint that go with it as they are."""


def carried_names(*tables: Mapping[str, Any]) -> tuple[str, ...]:
    """`CARRIED`, and the modules beside them that `auto_map` of the tables names.

    An entry is "module.Class", or a list of them and null; "repository--module.Class" is elsewhere.
    """
    found = []
    for table in tables:
        entries = table.get("auto_map")
        for entry in entries.values() if isinstance(entries, dict) else ():
            for one in entry if isinstance(entry, list) else [entry]:
                module = one.partition(".")[0] if isinstance(one, str) else ""
                if module.isidentifier():
                    found.append(f"{module}.py")
    return (*CARRIED, *dict.fromkeys(found))


class File(NamedTuple):
    """A file of tensors as it is to be written again, in this order."""

    name: str
    metadata: dict[str, str]
    tensors: tuple[str, ...]


@runtime_checkable
class Source(Protocol):
    """A checkpoint that is open. `config` is its config.json, or what would be."""

    @property
    def config_file(self) -> str: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def tensors(self) -> Mapping[str, Tensor]: ...
    @property
    def files(self) -> tuple[File, ...]: ...
    @property
    def carried(self) -> Mapping[str, bytes]: ...

    def run(self, name: str, start: int, count: int) -> np.ndarray:
        """`count` numbers of a tensor in row-major order from number `start`."""
        ...
