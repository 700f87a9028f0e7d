"""[N] Whether a checkpoint is what its configuration says, before anything is written."""

import json
from collections.abc import Collection, Mapping
from math import prod
from typing import Any

from models.checkpoint.layout import DTYPES, RUN, CheckpointError, Table, tensors_of
from models.checkpoint.source import TOKENIZER, Source


def check_tensors(source: Source, table: Table, constants: Collection[str] = ()) -> None:
    """Every tensor of the table is there, of its shape and of a dtype we know, and no other but the
    `constants`."""
    wanted = tensors_of(table)
    for name, shape in wanted.items():
        tensor = source.tensors.get(name)
        if tensor is None:
            raise CheckpointError(f"{_place(source)}: {name} is missing")
        if tensor.shape != shape:
            raise CheckpointError(
                f"{tensor.file}: {name} has shape {list(tensor.shape)}, {source.config_file} "
                f"gives {list(shape)}"
            )
        if tensor.dtype not in DTYPES:
            raise CheckpointError(
                f"{tensor.file}: {name} is {tensor.dtype}: needs {', '.join(DTYPES)}"
            )
    for name, tensor in source.tensors.items():
        if name not in wanted and name not in constants:
            raise CheckpointError(
                f"{tensor.file}: {name} is unexpected, no parameter of {source.config_file} is "
                "made of it"
            )


def _place(source: Source) -> str:
    """Where a missing tensor would be: the file, or the directory's files."""
    files = sorted({tensor.file for tensor in source.tensors.values()})
    return files[0] if len(files) == 1 else f"{source.config_file}: none of {len(files)} files"


def check_tied(source: Source, table: Table) -> None:
    """Tensors that are the same parameter have the same bytes."""
    for leaf in table.values():
        same = [part for part in leaf.parts if (part.take, part.at) == ((), ())]
        for part in same[1:]:
            first, other = same[0].tensor, part.tensor
            if not _equal(source, first, other):
                raise CheckpointError(
                    f"{source.tensors[other].file}: {other} differs from {first}, "
                    f"{source.config_file} says they are tied"
                )


def _equal(source: Source, one: str, other: str) -> bool:
    if source.tensors[one].dtype != source.tensors[other].dtype:
        return False
    total = prod(source.tensors[one].shape)
    for start in range(0, total, RUN):
        count = min(RUN, total - start)
        left, right = (source.run(name, start, count) for name in (one, other))
        if left.tobytes() != right.tobytes():
            return False
    return True


def check_vocabulary(source: Source, embedding: str) -> None:
    """Every token of tokenizer.json has a row in the tensor `embedding`; more rows are padding."""
    text = source.carried.get(TOKENIZER)
    if text is None:
        return
    tensor = source.tensors[embedding]
    rows = tensor.shape[0]
    where = f"{TOKENIZER} beside {source.config_file}"
    for token, number in _tokens(text, where).items():
        if number >= rows:
            raise CheckpointError(
                f"{tensor.file}: {embedding} has {rows} rows, token {number} "
                f"({json.dumps(token, ensure_ascii=False)}) of {where} needs {number + 1}"
            )


def _tokens(text: bytes, where: str) -> dict[str, int]:
    try:
        table: Mapping[str, Any] = json.loads(text)
        vocabulary = table["model"]["vocab"]
        if isinstance(vocabulary, list):
            vocabulary = {piece: number for number, (piece, _) in enumerate(vocabulary)}
        found = dict(vocabulary)
        for added in table.get("added_tokens", ()):
            found[added["content"]] = added["id"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{where}: not a tokenizer ({error!r})") from error
    for token, number in found.items():
        if type(number) is not int or number < 0:
            raise CheckpointError(
                f"{where}: token {json.dumps(token, ensure_ascii=False)} has the id "
                f"{json.dumps(number)}: needs an integer, at least 0"
            )
    return dict(sorted(found.items(), key=lambda item: item[1]))
