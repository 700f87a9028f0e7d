"""[P] What one sequence keeps of a policy of the Llama kind."""

from models.layers.attention import GroupedQueryAttention
from models.llama.config import LlamaConfig
from rl_jax.model import CacheSpec


def cache_spec(config: LlamaConfig) -> CacheSpec:
    """The same in every layer."""
    own = GroupedQueryAttention.cache(config.kv_heads, config.head_dim)
    return CacheSpec(tokens=(own,) * config.layers, states=())
