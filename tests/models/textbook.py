"""[N] A Kimi Linear policy by its formulas: one sequence, numpy float64, one token at a time."""

from typing import Any

import numpy as np

from models.kimi_linear import KimiLinearConfig

Tree = Any


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def rms(x: np.ndarray, scale: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * scale


def swiglu(x: np.ndarray, p: Tree) -> np.ndarray:
    gate = x @ p["gate"]
    return (gate * sigmoid(gate) * (x @ p["up"])) @ p["down"]


def gate(x: np.ndarray, p: Tree) -> np.ndarray:
    x = x @ p["down"] if "down" in p else x
    return np.einsum("ld,dhk->lhk", x, p["up"])


def conv(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    taps = len(weight)
    padded = np.concatenate([np.zeros((taps - 1, *x.shape[1:])), x])
    out = sum(weight[i] * padded[i : i + len(x)] for i in range(taps))
    return out * sigmoid(out)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.sum(x * x, -1, keepdims=True) + 1e-6)


def delta_attention(x: np.ndarray, p: Tree, config: KimiLinearConfig) -> np.ndarray:
    mixed = conv(np.einsum("ld,dchk->lchk", x, p["qkv"]), p["conv"])
    q, k, v = unit(mixed[:, 0]), unit(mixed[:, 1]), mixed[:, 2]
    raw, rate = gate(x, p["decay"]) + p["decay_bias"], np.exp(p["decay_rate_log"])[:, None]
    if config.gate_lower_bound is None:
        g = -rate * np.log1p(np.exp(raw))
    else:
        g = config.gate_lower_bound * sigmoid(rate * raw)
    beta = sigmoid(x @ p["beta"]) * (2 if config.negative_eigenvalues else 1)
    state, outs = np.zeros((q.shape[1], q.shape[2], v.shape[2])), []
    for t in range(len(x)):
        state = state * np.exp(g[t])[..., None]
        update = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][..., None] * update[:, None]
        outs.append(np.einsum("hkv,hk->hv", state, q[t]) * q.shape[-1] ** -0.5)
    normed = rms(np.stack(outs), p["norm"]["scale"], config.rms_eps)
    return np.einsum("lhk,hkd->ld", sigmoid(gate(x, p["gate"])) * normed, p["out"])


def rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """x[L, .., P] as complex numbers, pair i of token t turned by t theta^(-2i/P)."""
    pairs = x[..., 0::2] + 1j * x[..., 1::2]
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(0, x.shape[-1], 2) / x.shape[-1])
    turned = pairs * np.exp(1j * angles).reshape(len(x), *(1,) * (x.ndim - 2), -1)
    return np.stack([turned.real, turned.imag], -1).reshape(x.shape)


def latent_attention(x: np.ndarray, p: Tree, config: KimiLinearConfig) -> np.ndarray:
    eps, own = config.rms_eps, p["key_up"].shape[1]
    queries = x
    if config.query_latent:
        queries = rms(x @ p["query_down"], p["query_norm"]["scale"], eps)
    q, down = np.einsum("ld,dha->lha", queries, p["query"]), x @ p["down"]
    latents = rms(down[:, : config.kv_latent], p["norm"]["scale"], eps)
    shared, asking = down[:, config.kv_latent :], q[..., own:]
    if config.rope_theta:
        shared, asking = rotate(shared, config.rope_theta), rotate(asking, config.rope_theta)
    keys = np.einsum("lc,hac->lha", latents, p["key_up"])
    scores = np.einsum("lha,mha->hlm", q[..., :own], keys)
    scores = (scores + np.einsum("lha,ma->hlm", asking, shared)) * q.shape[-1] ** -0.5
    scores = np.where(np.tril(np.ones((len(x), len(x)), bool)), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    values = np.einsum("lc,hcv->lhv", latents, p["value_up"])
    return np.einsum("hlm,mhv,hvd->ld", shares, values, p["out"])


def experts(
    x: np.ndarray, p: Tree, *, chosen: int, scale: float, renormalise: bool = True
) -> tuple[np.ndarray, np.ndarray]:
    """Output and choices, one token after the other."""
    scores, outs, choices = sigmoid(x @ p["router"]), [], []
    for token, score in zip(x, scores, strict=True):
        best = np.argsort(-(score + p["router_bias"]), kind="stable")[:chosen]
        weights = score[best] / (score[best].sum() if renormalise else 1) * scale
        parts = [
            w * swiglu(token, {name: p[name][e] for name in ("gate", "up", "down")})
            for w, e in zip(weights, best, strict=True)
        ]
        outs.append(sum(parts))
        choices.append(best)
    out = np.stack(outs)
    return (out + swiglu(x, p["shared"]) if "shared" in p else out), np.stack(choices)


def hidden(config: KimiLinearConfig, params: Tree, tokens: np.ndarray) -> np.ndarray:
    """float64[L, D] behind the last norm."""
    x, eps = params["embedding"][tokens], config.rms_eps
    for number, (mixer, ffn) in enumerate(config.kinds):
        p = params["blocks"][f"block_{number}"]
        mix = latent_attention if mixer == "mla" else delta_attention
        x = x + mix(rms(x, p["mixer_norm"]["scale"], eps), p["mixer"], config)
        normed = rms(x, p["ffn_norm"]["scale"], eps)
        if ffn == "dense":
            x = x + swiglu(normed, p["ffn"])
        else:
            route = {"chosen": config.chosen_experts, "scale": config.route_scale}
            x = x + experts(normed, p["ffn"], **route, renormalise=config.renormalise)[0]
    return rms(x, params["norm"]["scale"], eps)
