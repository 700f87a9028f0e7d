"""[P] What one sequence keeps of a Kimi Linear policy."""

from models.kimi_linear.config import KimiLinearConfig
from models.layers.kda import KimiDeltaAttention
from models.layers.mla import LatentAttention
from rl_jax.model import CacheSpec


def cache_spec(config: KimiLinearConfig) -> CacheSpec:
    """Per layer of each kind, in layer order."""
    tokens = LatentAttention.cache(config.kv_latent, config.kv_shared_key)
    state = KimiDeltaAttention.cache(config.heads, config.head_dim, config.conv_taps)
    return CacheSpec(
        tokens=(tokens,) * config.layers.count("mla"), states=(state,) * config.layers.count("kda")
    )


def layer_numbers(layers: tuple[str, ...]) -> tuple[int, ...]:
    """Each layer's number within its kind, as `CacheIO` counts them."""
    return tuple(layers[:i].count(name) for i, name in enumerate(layers))
