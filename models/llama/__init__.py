"""[P] Policies of the Llama kind: Llama 2 and 3, SmolLM2, Qwen2, Qwen2.5, Qwen3."""

from models.llama.config import LlamaConfig, RopeScaling
from models.llama.module import build_model

__all__ = ["LlamaConfig", "RopeScaling", "build_model"]
