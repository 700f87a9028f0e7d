"""[N] Tensors that are no parameters: frequencies that older releases store beside their weights.

They follow from the configuration, so no parameter is made of them. They are checked against what
it says, and kept as they are, so that an export has them again.
"""

from collections.abc import Mapping

import numpy as np

from models.checkpoint.layout import DTYPES, CheckpointError
from models.checkpoint.source import Source

SUFFIX = ".rotary_emb.inv_freq"
_NEAR = {"F32": 1e-5, "F16": 1e-2, "BF16": 1e-2}
"""Relative; the smallest frequencies are subnormal in F16."""
_SMALLEST = 1e-7


def read_constants(source: Source, frequencies: np.ndarray | None) -> dict[str, np.ndarray]:
    """Every stored constant by name, as it is stored; `frequencies` float64[pairs] is what each has
    to be, None where the model turns nothing, so that such a tensor is unexpected.

    `CheckpointError` for one of another dtype, shape or value.
    """
    if frequencies is None:
        return {}
    names = [name for name in source.tensors if name.endswith(SUFFIX)]
    return {name: _checked(source, name, frequencies) for name in names}


def _checked(source: Source, name: str, frequencies: np.ndarray) -> np.ndarray:
    tensor = source.tensors[name]
    where = f"{tensor.file}: {name}"
    if tensor.dtype not in _NEAR:
        raise CheckpointError(f"{where} is {tensor.dtype}: needs {', '.join(_NEAR)}")
    if tensor.shape != frequencies.shape:
        raise CheckpointError(
            f"{where} has shape {list(tensor.shape)}, {source.config_file} gives "
            f"{list(frequencies.shape)}"
        )
    stored = source.run(name, 0, len(frequencies))
    allowed = _NEAR[tensor.dtype] * frequencies + _SMALLEST
    if not (np.abs(stored.astype(np.float64) - frequencies) <= allowed).all():
        raise CheckpointError(
            f"{where} holds other frequencies than rope_theta of {source.config_file} gives"
        )
    return stored


def packed(constants: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Bytes as hexadecimal digits."""
    return {name: array.tobytes().hex() for name, array in constants.items()}


def unpacked(text: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """ValueError where `text` is not what `packed` makes of such a tensor."""
    return np.frombuffer(bytes.fromhex(text), DTYPES[dtype]).reshape(shape)
