"""Frequencies that older releases store: no parameters, and yet there again after an export."""

import ml_dtypes
import numpy as np
import pytest

from launch import cli
from models.checkpoint.layout import CheckpointError
from models.checkpoint.load import open_checkpoint
from tests.fakes import checkpoints
from tests.models.checkpoint.round_trip import comes_back

NAMES = [f"model.layers.{number}.self_attn.rotary_emb.inv_freq" for number in range(2)]
# Heads of 8: 10000^0, 10000^(-1/4), 10000^(-2/4), 10000^(-3/4).
FREQUENCIES = np.array([1.0, 0.1, 0.01, 0.001])


def make(directory, stored, config=checkpoints.LLAMA, files=1):
    tensors = checkpoints.values(config) | dict.fromkeys(NAMES, stored)
    return checkpoints.write(directory, config, tensors, files)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_they_come_back_byte_for_byte(tmp_path, dtype):
    given = make(tmp_path / "in", FREQUENCIES.astype(dtype), files=2)
    comes_back(given, tmp_path)


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        (np.ones(4, np.float32), "holds other frequencies than rope_theta of {config} gives"),
        (FREQUENCIES.astype(np.float32) * 1.001, "holds other frequencies than rope_theta of "
         "{config} gives"),
        (np.float32([1, 0.1, np.nan, 0.001]), "holds other frequencies than rope_theta of "
         "{config} gives"),
        (np.ones(3, np.float32), "has shape [3], {config} gives [4]"),
        (FREQUENCIES, "is F64: needs F32, F16, BF16"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path, stored, said):
    path = make(tmp_path / "in", stored)
    with pytest.raises(CheckpointError) as told:
        open_checkpoint(path)
    said = said.format(config=f"{path}/config.json")
    assert str(told.value) == f"{path}/model.safetensors: {NAMES[0]} {said}"


def test_a_model_without_positions_has_none(tmp_path):
    path = make(tmp_path / "in", FREQUENCIES.astype(np.float32), checkpoints.KIMI)
    with pytest.raises(CheckpointError, match=r"inv_freq is unexpected, no parameter of"):
        open_checkpoint(path)


def test_an_origin_whose_constants_are_none_of_its_tensors(tmp_path, capsys):
    given = make(tmp_path / "in", FREQUENCIES.astype(np.float32))
    kept = tmp_path / "kept"
    assert cli.main(["import", str(given), "--out", str(kept)]) == 0
    origin = kept / "origin.json"
    origin.write_text(origin.read_text().replace(f'"{NAMES[1]}": "', f'"{NAMES[1]}": "00'))
    capsys.readouterr()
    assert cli.main(["export", str(kept / "0"), "--out", str(tmp_path / "out")]) == 2
    said = f"rl-jax: {origin}: constants: {NAMES[1]} is not a tensor of its files\n"
    assert capsys.readouterr().err == said and not (tmp_path / "out").exists()
