"""A head that a checkpoint stores though it is the embedding."""

import numpy as np
import pytest
from safetensors.numpy import load_file

from models.checkpoint.layout import CheckpointError
from models.checkpoint.load import open_checkpoint
from tests.fakes import checkpoints
from tests.models.checkpoint.round_trip import comes_back

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TIED = {
    "qwen2": checkpoints.QWEN2,
    "qwen3": checkpoints.QWEN3 | {"tie_word_embeddings": True},
    "kimi_linear": checkpoints.KIMI | {"tie_word_embeddings": True},
}


def make(directory, config, head):
    tensors = checkpoints.values(config)
    return checkpoints.write(directory, config, tensors | {HEAD: head(tensors[EMBEDDING])}, 2)


@pytest.mark.parametrize("name", sorted(TIED))
def test_it_comes_back_byte_for_byte(tmp_path, name):
    given = make(tmp_path / "in", TIED[name], np.copy)
    out = comes_back(given, tmp_path)
    whole = {n: a for p in out.glob("*.safetensors") for n, a in load_file(p).items()}
    assert whole[HEAD].tobytes() == whole[EMBEDDING].tobytes()


def changed(array):
    other = array.copy()
    other[-1, -1] += 1
    return other


@pytest.mark.parametrize("change", [changed, lambda a: a.astype(np.float32)])
def test_a_head_of_other_bytes_is_refused(tmp_path, change):
    path = make(tmp_path / "in", checkpoints.QWEN2, change)
    with pytest.raises(CheckpointError) as told:
        open_checkpoint(path)
    assert str(told.value) == (
        f"{path}/model-00001-of-00002.safetensors: {HEAD} differs from {EMBEDDING}, "
        f"{path}/config.json says they are tied"
    )


def test_a_head_of_another_shape_is_refused(tmp_path):
    path = make(tmp_path / "in", checkpoints.QWEN2, lambda array: array[:-1].copy())
    with pytest.raises(CheckpointError) as told:
        open_checkpoint(path)
    assert str(told.value) == (
        f"{path}/model-00001-of-00002.safetensors: {HEAD} has shape [79, 32], "
        f"{path}/config.json gives [80, 32]"
    )
