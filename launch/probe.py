"""[H] `python -m launch.probe`: prints how many devices this process has and their sum of ones."""

import json
import sys


def probe() -> dict[str, float]:
    """Starts the backend and runs one collective over this host's devices."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, PartitionSpec

    devices = jax.local_devices()
    mesh = Mesh(np.asarray(devices), ("all",))
    summed = jax.shard_map(
        lambda x: jax.lax.psum(x, "all"),
        mesh=mesh,
        in_specs=PartitionSpec("all"),
        out_specs=PartitionSpec(),
    )(jnp.ones((len(devices),)))
    return {"devices": len(devices), "sum": float(summed[0])}


if __name__ == "__main__":
    json.dump(probe(), sys.stdout)
