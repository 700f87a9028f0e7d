"""[P] Random keys: every draw follows from (run seed, purpose, stream, position) and nothing else.

The policy version is never part of a key: the same request under other weights consumes the same
uniforms. threefry2x32, partitionable (jax's default), pinned by golden values in the tests.
"""

import hashlib
from enum import IntEnum

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int, UInt32

from rl_jax.arrays import AnyArray, Array

_TURNS = (13, 15, 26, 6), (17, 29, 16, 24)


class Purpose(IntEnum):
    """What a draw is for. Values are part of the record of a run: append, never renumber."""

    INIT = 0
    SAMPLE = 1
    WARM_START = 2
    SHUFFLE = 3
    PROMPTS = 4
    TOOLS = 5


def stream(key: tuple[str, int, int, int], ordinal: int) -> tuple[int, int]:
    """The stream of a rollout's `ordinal`-th request, as two uint32 (high, low).

    `key` is the rollout's (task, prompt, sample, attempt), a `RolloutKey`.
    A group member differs by sample, a retry by attempt, a repeated request or branch by ordinal.
    """
    text = "\x1f".join(map(str, (*key, ordinal)))
    word = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
    return word >> 32, word & 0xFFFFFFFF


def base(seed: int, purpose: Purpose) -> jax.Array:
    """The typed key of a purpose. Raises ValueError for a seed that is no uint32."""
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed is {seed}; it must be at least 0 and below 2**32")
    return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), purpose)


def uniforms(
    key: jax.Array, streams: UInt32[AnyArray, "R 2"], positions: Int[AnyArray, " R"]
) -> Float[Array, " R"]:
    """One uniform in [0, 1) per request, at the absolute index in its token log it is drawn for."""

    words = jax.random.key_data(key)
    streams, positions = jnp.asarray(streams), jnp.asarray(positions).astype(jnp.uint32)
    own = words[0], words[1]
    for word in (streams[:, 0], streams[:, 1], positions):
        own = _threefry(own, (jnp.uint32(0), word))
    high, low = _threefry(own, (jnp.uint32(0), jnp.uint32(0)))
    return jax.lax.bitcast_convert_type((high ^ low) >> 9 | 0x3F800000, jnp.float32) - 1.0


def _threefry(key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
    """threefry2x32 (Salmon et al. 2011) written out: jax's own is a loop on the CPU, which for a
    few numbers costs more than a layer of a small policy."""
    keys = *key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA)
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for turn in _TURNS[group % 2]:
            x = x + y
            y = (y << turn | y >> (32 - turn)) ^ x
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def host(seed: int, purpose: Purpose, *words: int) -> np.random.Generator:
    """A host generator (Philox) for draws that never reach a device."""
    entropy = np.random.SeedSequence([seed, int(purpose), *words])
    return np.random.Generator(np.random.Philox(entropy))
