"""verl's policy losses on made-up tokens: what `tests/losses/test_golden.py` holds our recipes to.

    python tests/interop/losses.py           writes tests/golden/losses.json
    python tests/interop/losses.py --check   compares instead; exit status 1 where it differs

Runs in an environment of its own (`make test-interop`) and imports nothing of ours. The inputs are
float32; verl computes on them in float64, so the file's error is far below that of a float32 loss.
"""

import argparse
import json
import re
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from verl.trainer.ppo.core_algos import agg_loss, get_policy_loss_fn, kl_penalty
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import ActorConfig, PolicyLossConfig

GOLDEN = Path(__file__).parents[1] / "golden" / "losses.json"
SEED = 0
LENGTHS = np.array([12, 9, 10, 7, 11, 5, 6, 1])
ADVANTAGES = np.array([1.3, 0.4, 0.9, -0.8, -1.5, -0.6, 0.0, 0.7], np.float32)
MEAN_LOG_RATIO = np.array([6e-4, 2e-4, -6e-4, 6e-4, -2e-4, -6e-4, 1e-3, 0.35])
"""Of current to proximal over each sequence: both sides of GSPO's band, and inside it, for both
signs of the advantage. The last sequence has one token."""
EDGES = {
    "current / proximal": (0.8, 1.2, 1.28, 3.0, np.exp(-0.4), np.exp(0.4)),
    "mean current / proximal": (1 - 3e-4, 1 + 4e-4),
    "proximal / behavior": (0.5, 2.0, 5.0),
}
"""Where the losses below change; no input may lie so close that rounding decides its side."""

TOKENS, SEQUENCES = "token-mean", "seq-mean-token-mean"
NO_DUAL = {"clip_ratio_c": 1e9}
"""verl's vanilla loss has the dual clip (at 3) built in; so far away that it never acts."""
BAND = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
CASES = {
    "grpo": {"loss": "vanilla", "mode": SEQUENCES, "actor": BAND | NO_DUAL},
    "grpo_kl": {"loss": "vanilla", "mode": SEQUENCES, "actor": BAND | NO_DUAL, "kl": 0.04},
    "dapo": {
        "loss": "vanilla",
        "mode": TOKENS,
        "actor": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28} | NO_DUAL,
    },
    "gspo": {
        "loss": "gspo",
        "mode": SEQUENCES,
        "actor": {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4},
    },
    "cispo": {
        "loss": "cispo",
        "mode": TOKENS,
        "actor": {"clip_ratio_low": 10.0, "clip_ratio_high": 0.2},
    },
    "tis": {"loss": "vanilla", "mode": TOKENS, "actor": BAND | NO_DUAL, "correction": 2.0},
    "dual_clip": {"loss": "vanilla", "mode": TOKENS, "actor": BAND | {"clip_ratio_c": 3.0}},
    "dr_grpo": {
        "loss": "vanilla",
        "mode": "seq-mean-token-sum-norm",
        "actor": BAND | NO_DUAL | {"global_batch_info": {"loss_scale_factor": 16}},
    },
    "gmpo": {
        "loss": "geo_mean",
        "mode": SEQUENCES,
        "actor": {"clip_ratio_low": 0.4, "clip_ratio_high": 0.4},
    },
    "sapo": {"loss": "sapo", "mode": SEQUENCES, "actor": {"tau_pos": 1.0, "tau_neg": 1.05}},
    "icepop": {
        "loss": "vanilla",
        "mode": SEQUENCES,
        "actor": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28} | NO_DUAL,
        "correction": "0.5_5",
    },
    "dro": {"loss": "dro", "mode": TOKENS, "actor": {}, "policy": {"dro_beta": 0.3}},
}
"""verl's name of the loss, its aggregation and settings (`actor`, `policy`), the coefficient of k3
to the reference, and the threshold of the weights proximal / behavior (two: zero outside)."""


def inputs() -> dict[str, np.ndarray]:
    """Log-probabilities [sequences, tokens] in float32; what `mask` leaves out holds junk."""
    rng = np.random.default_rng(SEED)
    shape = len(LENGTHS), LENGTHS.max()
    mask = np.arange(shape[1]) < LENGTHS[:, None]
    mask[0, 4:7] = mask[4, 2] = False  # what tools said
    current = rng.uniform(-4.0, -1.6, shape).astype(np.float32)
    moved = np.clip(rng.normal(0.0, 0.5, shape), -1.2, 1.2)
    moved[[0, 4], 0] = 1.6  # beyond the dual clip
    counts = mask.sum(axis=1, keepdims=True)
    moved += MEAN_LOG_RATIO[:, None] - (moved * mask).sum(axis=1, keepdims=True) / counts
    proximal = (current - moved).astype(np.float32)
    made = {"current": current, "proximal": proximal, "mask": mask}
    for name, start, spread in (("behavior", proximal, 0.8), ("reference", current, 0.5)):
        away = start - rng.normal(0.0, spread, shape)
        made[name] = np.minimum(away, -0.01).astype(np.float32)
    return made | {"advantages": np.where(mask, ADVANTAGES[:, None], np.float32(5.0))}


def check(given: dict[str, np.ndarray]) -> None:
    """Every side of every edge, for both signs of the advantage, and none of them in doubt."""
    log_ratio, mask = (given["current"].astype(float) - given["proximal"]), given["mask"]
    mean = (log_ratio * mask).sum(axis=1, keepdims=True) / mask.sum(axis=1, keepdims=True)
    ratios = {
        "current / proximal": np.exp(log_ratio),
        "mean current / proximal": np.exp(np.broadcast_to(mean, mask.shape)),
        "proximal / behavior": np.exp(given["proximal"].astype(float) - given["behavior"]),
    }
    for name, edges in EDGES.items():
        for edge in edges:
            for sign in (1, -1):
                own = ratios[name][mask & (np.sign(given["advantages"]) == sign)]
                assert (own < edge).any() and (own > edge).any(), (name, edge, sign)
                assert np.abs(own / edge - 1).min() > 2e-6, (name, edge)


def peer_loss(case: dict, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The scalar that verl would differentiate."""
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        policy_loss=PolicyLossConfig(loss_mode=case["loss"], **case.get("policy", {})),
        **case["actor"],
    )
    weights = None
    if "correction" in case:
        weights, _ = compute_rollout_correction_weights(
            given["proximal"] - given["behavior"],
            given["mask"],
            rollout_is="token",
            rollout_is_threshold=case["correction"],
        )
    loss, _ = get_policy_loss_fn(case["loss"])(
        old_log_prob=given["proximal"],
        log_prob=given["current"],
        advantages=given["advantages"],
        response_mask=given["mask"],
        loss_agg_mode=case["mode"],
        config=config,
        rollout_is_weights=weights,
    )
    if "kl" in case:
        divergence = kl_penalty(given["current"], given["reference"], "low_var_kl")
        loss = loss + case["kl"] * agg_loss(divergence, given["mask"], case["mode"])
    return loss


def outcome(case: dict, given: dict[str, np.ndarray]) -> dict:
    """The case with its value and its gradient with respect to the current log-probabilities."""
    tensors = {name: torch.tensor(array, dtype=torch.float64) for name, array in given.items()}
    tensors["current"].requires_grad_()
    value = peer_loss(case, tensors)
    value.backward()
    gradient = tensors["current"].grad.numpy()
    return {"peer": case, "value": float(f"{value.item():.10g}"), "gradient": plain(gradient)}


def plain(array: np.ndarray) -> list:
    """Numbers for JSON: float32 exactly, float64 to ten digits."""
    if array.dtype == bool:
        return array.astype(int).tolist()
    digits = 9 if array.dtype == np.float32 else 10
    return [[float(f"{number:.{digits}g}") for number in row] for row in array]


def golden() -> dict:
    given = inputs()
    check(given)
    return {
        "peer": {name: version(name).partition("+")[0] for name in ("verl", "torch")},
        "seed": SEED,
        "inputs": {name: plain(array) for name, array in given.items()},
        "cases": {name: outcome(case, given) for name, case in CASES.items()},
    }


def text(made: dict) -> str:
    """JSON with a line for each row of an array."""
    spread = json.dumps(made, indent=1)
    return re.sub(r"\[[^][{}]+\]", lambda row: " ".join(row[0].split()), spread)


def differences(new: dict, old: dict) -> list[str]:
    """The cases and inputs of `new` that are not those of `old`, up to float64's rounding."""
    found = [name for name in ("peer", "seed", "inputs") if new[name] != old[name]]
    for name in new["cases"].keys() | old["cases"].keys():
        a, b = new["cases"].get(name), old["cases"].get(name)
        same = a and b and a["peer"] == b["peer"]
        if not same or not all(
            np.allclose(a[k], b[k], rtol=1e-8, atol=1e-12) for k in ("value", "gradient")
        ):
            found.append(name)
    return sorted(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of write")
    made = golden()
    if not parser.parse_args().check:
        GOLDEN.write_text(text(made) + "\n")
        return 0
    wrong = differences(made, json.loads(GOLDEN.read_text()))
    found = f"differs in {', '.join(wrong)}" if wrong else f"{len(made['cases'])} cases agree"
    print(f"{GOLDEN.name}: {found}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
