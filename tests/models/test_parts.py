"""Into how many parts a layer's heads or hidden width go, and which part has what.

That parts add up to the whole, and their gradients too, is shown by test_meshes.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.layers.parts import parts, summed
from models.layers.swiglu import SwiGLU
from rl_jax.sharding import make_trainer_mesh


def test_parts_are_the_fewest_that_are_small_enough_on_a_device():
    assert parts(32, 8) == 1
    with jax.set_mesh(make_trainer_mesh(jax.devices(), tensor=2, context=2)):
        assert [parts(32, most) for most in (16, 8, 5, 1)] == [1, 2, 4, 16]
    with jax.set_mesh(make_trainer_mesh(jax.devices(), fsdp=2, tensor=2)):
        assert parts(32, 8) == 1


def test_a_part_has_every_nth_of_what_is_named():
    layer = SwiGLU(2, 6, 1.0, nnx.Rngs(0))
    layer.gate[...] = jnp.arange(12.0).reshape(2, 6)
    layer.up[...], layer.down[...] = jnp.ones((2, 6)), jnp.ones((6, 2))
    shapes = []

    def look(part, x):
        shapes.append((part.gate[...].shape, part.down[...].shape))
        return x * part.gate[0, -1]

    out = summed(layer, "mlp", 3, look, jnp.ones(2))
    assert shapes == [((2, 2), (2, 2))]
    np.testing.assert_array_equal(out, np.full(2, 3.0 + 4.0 + 5.0))
