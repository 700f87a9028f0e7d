"""[P] A small or large policy of the Kimi Linear kind."""

from models.kimi_linear.config import KimiLinearConfig, kimi_linear_48b
from models.kimi_linear.module import build_model

__all__ = ["KimiLinearConfig", "build_model", "kimi_linear_48b"]
