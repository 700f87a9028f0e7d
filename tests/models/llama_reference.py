"""A policy of the Llama kind in float64 numpy, one sequence at a time, head by head."""

import numpy as np

from models.llama import LlamaConfig


def speeds(config: LlamaConfig) -> np.ndarray:
    """Radians per position, where nothing or "linear" scales them."""
    half = config.head_dim // 2
    plain = np.array([config.rope_theta ** (-i / half) for i in range(half)])
    return plain / config.rope_scaling.factor if config.rope_scaling else plain


def norm(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps) * scale


def turned(x: np.ndarray, by: np.ndarray) -> np.ndarray:
    """Pairs half a head apart as complex numbers; row p of x is at position p."""
    half = x.shape[-1] // 2
    z = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * np.outer(np.arange(len(x)), by))
    return np.concatenate([z.real, z.imag], -1)


def attended(config: LlamaConfig, weights: dict, x: np.ndarray) -> np.ndarray:
    by, out = speeds(config), np.zeros_like(x)
    seen = np.tril(np.ones((len(x), len(x)), bool))

    def part(name: str, head: int) -> np.ndarray:
        y = x @ weights[name][:, head]
        if config.qkv_bias:
            y = y + weights[f"{name}_bias"][head]
        if config.qk_norm and name != "value":
            y = norm(y, weights[f"{name}_norm"]["scale"], config.rms_eps)
        return y if name == "value" else turned(y, by)

    for head in range(config.heads):
        shared = head * config.kv_heads // config.heads
        q, k, v = part("query", head), part("key", shared), part("value", shared)
        scores = np.where(seen, q @ k.T / np.sqrt(config.head_dim), -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        out += (shares @ v / shares.sum(-1, keepdims=True)) @ weights["out"][head]
    return out


def logits(config: LlamaConfig, params: dict, tokens: np.ndarray) -> np.ndarray:
    """[L, vocabulary] of one sequence; `params` are float64."""
    x, eps = params["embedding"][tokens], config.rms_eps
    for i in range(config.layers):
        block = params["blocks"][f"block_{i}"]
        y = norm(x, block["attention_norm"]["scale"], eps)
        x = x + attended(config, block["attention"], y)
        y = norm(x, block["ffn_norm"]["scale"], eps)
        gate = y @ block["ffn"]["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ block["ffn"]["up"])) @ block["ffn"]["down"]
    table = params["embedding"] if config.tied else params["head"]
    return norm(x, params["norm"]["scale"], eps) @ table.T


def loss(config: LlamaConfig, params: dict, tokens: np.ndarray) -> float:
    """Sum of -log p of each token but the first."""
    scores = logits(config, params, tokens)[:-1]
    top = scores.max(-1)
    mass = top + np.log(np.exp(scores - top[:, None]).sum(-1))
    return float(np.sum(mass - scores[np.arange(len(tokens) - 1), tokens[1:]]))
