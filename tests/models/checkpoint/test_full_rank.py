"""A full output gate that is the product of a low-rank gate's two matrices is the same gate."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models import kimi_linear
from models.checkpoint.load import load_params, open_checkpoint
from tests.fakes import checkpoints
from tests.fakes.compiling import QUICK

LOW, FULL = (
    config | {
        "num_hidden_layers": 1,
        "linear_attn_config": config["linear_attn_config"] | {
            "kda_layers": [1], "full_attn_layers": [],
        },
    }
    for config in (checkpoints.BOUNDED, checkpoints.FULL_RANK)
)  # fmt: skip
"""One layer, which has the gate."""


def logits_of(path: Path, tokens: jax.Array) -> np.ndarray:
    checkpoint = open_checkpoint(path)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params = load_params(checkpoint, lambda path: device)
    model = kimi_linear.build_model(checkpoint.config)

    def logits(params: Any, tokens: jax.Array) -> jax.Array:
        places = jnp.arange(64)[None]
        hidden = model.forward(params, tokens[None], places, jnp.zeros((1, 64), jnp.int32))
        return model.head(params, hidden[0], jnp.int32(0), model.vocab_size)

    return np.asarray(jax.jit(logits, compiler_options=QUICK)(params, tokens))


def test_the_product_of_a_low_rank_gate_is_its_full_gate(tmp_path: Path) -> None:
    low = checkpoints.values(LOW, np.float32)
    low = {name: array * (0.2 if array.ndim == 2 else 1.0) for name, array in low.items()}
    full = dict(low)
    for name in low:
        if name.endswith(".g_a_proj.weight"):
            layer = name.removesuffix("g_a_proj.weight")
            down, up = full.pop(name), full.pop(f"{layer}g_b_proj.weight")
            full[f"{layer}g_proj.weight"] = np.float32(np.float64(up) @ np.float64(down))
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 80, 64), jnp.int32)
    theirs = logits_of(checkpoints.write(tmp_path / "low", LOW, low), tokens)
    ours = logits_of(checkpoints.write(tmp_path / "full", FULL, full), tokens)
    np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())
    wrong = full | {name: -a for name, a in full.items() if name.endswith(".g_proj.weight")}
    other = logits_of(checkpoints.write(tmp_path / "wrong", FULL, wrong), tokens)
    assert np.abs(other - theirs).max() > 0.01 * np.abs(theirs).max(), "the gate is not used"
