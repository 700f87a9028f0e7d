"""[N] Which of our families a config.json is of."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from models.checkpoint.layout import CheckpointError, Table, tensors_of
from models.kimi_linear import convert as kimi_linear
from models.kimi_linear.config import WORDS
from models.llama import convert as llama


class Family(NamedTuple):
    """How a family's checkpoints are read; `name` is `model.family` of a run's configuration."""

    name: str
    read_config: Callable[[Mapping[str, Any]], Any]
    tensor_table: Callable[[Any], Table]
    frequencies: Callable[[Any], np.ndarray | None]
    """Of rotary positions, by the base alone; None for a model without."""

    def table(self, config: Any, tensors: Collection[str]) -> Table:
        """How parameters are made of a checkpoint that has `tensors`.

        A head that is stored though it is tied is made of the embedding as well.
        """
        table = self.tensor_table(config)
        if HEAD not in tensors or HEAD in tensors_of(table):
            return table
        (part,) = table[_EMBEDDED].parts
        both = (part, part._replace(tensor=HEAD))
        return {**table, _EMBEDDED: table[_EMBEDDED]._replace(parts=both)}

    def section(self, config: Any) -> dict[str, Any]:
        """`[model]` of a run's configuration."""
        sizes = {"family": self.name} | asdict(config)
        sizes |= {name: word for name, word in WORDS.items() if sizes.get(name, word) is None}
        return _filled({_KEYS.get(name, name): value for name, value in sizes.items()})


_EMBEDDED = "embedding"
_KEYS = {"ffn_width": "ffn"}
"""Fields that are called otherwise in `[model]`."""


def _filled(table: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is None, at any depth."""
    return {
        name: _filled(value) if isinstance(value, dict) else value
        for name, value in table.items()
        if value is not None
    }


LLAMA = Family("llama", llama.read_config, llama.tensor_table, llama.frequencies)
KIMI_LINEAR = Family(
    "kimi_linear",
    kimi_linear.read_config,
    kimi_linear.tensor_table,
    lambda config: None,
)
BY_MODEL_TYPE: Mapping[str, Family] = {
    **dict.fromkeys(llama.MODEL_TYPES, LLAMA),
    **dict.fromkeys(kimi_linear.MODEL_TYPES, KIMI_LINEAR),
}
EMBEDDING, HEAD = llama.EMBEDDING, llama.HEAD
"""In every family; a tied head may be stored or not."""


def family_of(table: Mapping[str, Any]) -> Family:
    """By `model_type`; `CheckpointError` for one that is not built here."""
    kind = table.get("model_type")
    if not isinstance(kind, str) or kind not in BY_MODEL_TYPE:
        said = "is missing" if kind is None else f"= {json.dumps(kind)}"
        raise CheckpointError(f"model_type {said}: there is {', '.join(BY_MODEL_TYPE)}")
    return BY_MODEL_TYPE[kind]
