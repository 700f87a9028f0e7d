"""[H] metrics.jsonl: lines as they land on disk, and what a crash leaves; TensorBoard's files."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.metrics.writers import JsonlWriter, TensorBoardWriter, can_write_tensorboard, read


def test_a_line_is_on_disk_at_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with JsonlWriter(path) as writer:
        writer.write(3, 1, 12.34567, {"reward": np.float32(0.5), "lag": jnp.array(2), "kind": "u"})
        line = path.read_text()
    assert line == (
        '{"step": 3, "policy_version": 1, "wall_seconds": 12.346, '
        '"reward": 0.5, "lag": 2, "kind": "u"}\n'
    )


def test_not_finite_becomes_null_and_is_flagged(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with JsonlWriter(path) as writer:
        writer.write(1, 0, 0.0, {"a": float("nan"), "b": jnp.inf, "c": 1.0, "d": [1.0, -np.inf]})
    (line,) = read(path)
    assert line["a"] is line["b"] is line["d"] is None
    assert (line["c"], line["not_finite"]) == (1.0, ["a", "b", "d"])


def test_bfloat16_is_a_number(tmp_path):
    with JsonlWriter(tmp_path / "m") as writer:
        writer.write(1, 0, 0.0, {"x": jnp.bfloat16(1.5)})
    assert read(tmp_path / "m")[0]["x"] == 1.5


@pytest.mark.parametrize("value", [np.zeros(2), object()])
def test_what_is_no_number_is_refused_and_not_written(tmp_path, value):
    path = tmp_path / "metrics.jsonl"
    with JsonlWriter(path) as writer, pytest.raises(TypeError, match="a metric is a number"):
        writer.write(1, 0, 0.0, {"x": value})
    assert path.read_text() == ""


def test_a_cut_line_is_skipped_by_readers_and_removed_by_the_next_writer(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with JsonlWriter(path) as writer:
        for step in (1, 2):
            writer.write(step, 0, 0.0, {})
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert [line["step"] for line in read(path)] == [1]
    with JsonlWriter(path) as writer:
        writer.write(2, 1, 0.0, {})
    assert [json.loads(line)["policy_version"] for line in path.read_text().splitlines()] == [0, 1]


def test_reading_nothing(tmp_path):
    (tmp_path / "m").touch()
    assert read(tmp_path / "m") == []


def test_tensorboard_reads_the_scalars(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    assert can_write_tensorboard()
    writer = TensorBoardWriter(tmp_path / "tb")
    writer.write(1, 0, 2.5, {"reward": np.float32(0.5), "kind": "u", "table": {"a": 1.0}})
    writer.write(7, 1, 4.0, {"reward": jnp.array(0.75), "loss": float("nan"), "absent": None})

    def scalars(name: str) -> list[tuple[int, float]]:
        told = EventAccumulator(str(tmp_path / "tb")).Reload()
        assert set(told.Tags()["tensors"]) == {"reward", "loss", "policy_version", "wall_seconds"}
        assert told.SummaryMetadata(name).plugin_data.plugin_name == "scalars"
        return [(e.step, make_ndarray(e.tensor_proto).item()) for e in told.Tensors(name)]

    assert scalars("reward") == [(1, 0.5), (7, 0.75)], "before the writer is closed"
    writer.close()
    assert scalars("policy_version") == [(1, 0.0), (7, 1.0)]
    assert scalars("wall_seconds") == [(1, 2.5), (7, 4.0)]
    assert np.isnan(scalars("loss")[0][1])
