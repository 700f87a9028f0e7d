"""[N] Advantages: from the rewards of a batch's groups to one number per sampled token.

A baseline is over rollouts, each once. A padding copy (`copy_of`) takes its original's advantage
and adds nothing; a failed trajectory takes no part and gets 0; a rollout that fanned out into
several trajectories (one key, `copy_of` None) counts once and must have one reward; a rollout
without a sampled token still counts. Weighting and clipping belong to the loss.

What follows rewards along a trajectory runs over its sampled tokens only, the answers of tools
between them are skipped (skip-observation, SAO, arXiv 2607.07508): the token after the last one of
an action is the first one of the next. The reward is paid at the trajectory's last sampled token.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32

from rl_jax.trajectories.types import Group, Trajectory

PerToken = tuple[Float32[np.ndarray, " _T"], ...]
"""One array per member of a group, aligned to its tokens."""

VALUES, LOG_RATIOS = "values", "log_ratios"
"""What an advantage may need beside rewards: the fields of `Estimates`."""


class Estimates(NamedTuple):
    """What the trainer computed of a group's members before it asks for advantages."""

    values: PerToken | None = None
    """The critic's estimate before each token."""
    log_ratios: PerToken | None = None
    """log p under the current policy minus behavior."""


class Advantage(NamedTuple):
    """How advantages, and what a critic shall predict, follow from groups.

    Whatever the functions leave outside `loss_mask` is cleared.
    """

    of_group: Callable[[Group, Estimates], PerToken]
    """(group, estimates) -> advantages."""
    needs: frozenset[str] = frozenset()
    """Fields of `Estimates` that must be there."""
    over_batch: Callable[[Sequence[Group], Sequence[PerToken]], Sequence[PerToken]] | None = None
    """(all groups of the batch, their advantages) -> their advantages."""
    returns: Callable[[Group, Estimates], PerToken] | None = None
    """(group, estimates) -> targets of the critic; None: there is nothing to train one on."""
    within_group: bool = False
    """Compares rollouts of one group: a rollout alone in its group gets 0."""


def estimate(
    advantage: Advantage, groups: Sequence[Group], estimates: Sequence[Estimates]
) -> tuple[list[PerToken], list[PerToken]]:
    """Advantages and returns, each one tuple per group; zeros where the advantage has no returns.

    A ValueError names the function whose estimates are missing, or whose result has a wrong shape,
    dtype or a number that is not finite.
    """
    name = _name(advantage.of_group)
    if unknown := advantage.needs - set(Estimates._fields):
        asked = ", ".join(sorted(unknown))
        raise ValueError(f"{name}: needs {asked}; there are {VALUES} and {LOG_RATIOS}")
    for group, own in zip(groups, estimates, strict=True):
        for field in sorted(advantage.needs):
            arrays = getattr(own, field)
            if arrays is None:
                raise ValueError(f"{name}: needs {field}, which nobody has estimated")
            _checked(f"{field} for {name}", group, arrays)
    pairs = list(zip(groups, estimates, strict=True))
    result = [_checked(name, g, advantage.of_group(g, own)) for g, own in pairs]
    if advantage.over_batch is not None:
        name = _name(advantage.over_batch)
        batch = zip(groups, advantage.over_batch(groups, result), strict=True)
        result = [_checked(name, g, arrays) for g, arrays in batch]
    if advantage.returns is None:
        return result, [tuple(map(np.zeros_like, arrays)) for arrays in result]
    name = f"returns of {_name(advantage.returns)}"
    return result, [_checked(name, g, advantage.returns(g, own)) for g, own in pairs]


def group_mean() -> Advantage:
    """r - mean(r). (GLM-5, arXiv 2602.15763 sec. 4.1; Dr. GRPO, 2503.20783.)"""

    def of_group(group: Group, estimates: Estimates) -> PerToken:
        return _spread(group, _centred(_rewards(group)))

    return Advantage(of_group, within_group=True)


def standardised(epsilon: float = 1e-6) -> Advantage:
    """(r - mean(r)) / (std(r) + epsilon), std of the population. (GRPO, arXiv 2402.03300.)

    torch's default, which verl and TRL take, is the sample's std: sqrt(n / (n - 1)) times as large.
    """
    _check_positive("standardised", "epsilon", epsilon)

    def of_group(group: Group, estimates: Estimates) -> PerToken:
        centred = _centred(_rewards(group))
        std = math.sqrt(math.fsum(c * c for c in centred.values()) / max(len(centred), 1))
        return _spread(group, {sample: c / (std + epsilon) for sample, c in centred.items()})

    return Advantage(of_group, within_group=True)


def leave_one_out() -> Advantage:
    """r minus the mean of the group's other rollouts. (RLOO, arXiv 2402.14740.)"""

    def of_group(group: Group, estimates: Estimates) -> PerToken:
        centred = _centred(_rewards(group))
        scale = len(centred) / max(len(centred) - 1, 1)
        return _spread(group, {sample: c * scale for sample, c in centred.items()})

    return Advantage(of_group, within_group=True)


def max_rl() -> Advantage:
    """(r - mean(r)) / mean(r), zeros where the mean is 0. (MaxRL, arXiv 2602.02710.)

    The paper's rewards are 0 or 1. A ValueError names a reward below 0, where dividing by the mean
    could turn the sign.
    """

    def of_group(group: Group, estimates: Estimates) -> PerToken:
        rewards = _rewards(group)
        for sample, reward in rewards.items():
            if reward < 0:
                raise ValueError(
                    f"max_rl: reward {reward} of sample {sample}, {group.task} {group.prompt} "
                    "is below 0"
                )
        mean = math.fsum(rewards.values()) / max(len(rewards), 1)
        centred = _centred(rewards)
        return _spread(group, {s: c / mean if mean else 0.0 for s, c in centred.items()})

    return Advantage(of_group, within_group=True)


def single(baseline: float = 0.0) -> Advantage:
    """r - baseline, of each rollout by itself: for rollouts without a group."""
    if not math.isfinite(baseline):
        raise ValueError(f"single: baseline must be finite, got {baseline}")

    def of_group(group: Group, estimates: Estimates) -> PerToken:
        return _spread(group, {s: reward - baseline for s, reward in _rewards(group).items()})

    return Advantage(of_group)


def batch_standardised(of: Advantage | None = None, epsilon: float = 1e-6) -> Advantage:
    """The advantages `of` (group_mean() if None) / (their std over the batch + epsilon).

    Zeros where the deviation is 0, so that rollouts all alike never weigh 1 / epsilon.
    Every rollout with a sampled token counts once, all its tokens together. ScaleRL (arXiv
    2510.13786), which was followed, takes the deviation of advantages; LitePPO (arXiv 2508.08221)
    that of rewards.
    """
    _check_positive("batch_standardised", "epsilon", epsilon)
    inner = group_mean() if of is None else of

    def over_batch(groups: Sequence[Group], advantages: Sequence[PerToken]) -> list[PerToken]:
        own = advantages if inner.over_batch is None else inner.over_batch(groups, advantages)
        rollouts = _per_rollout(groups, own)
        _, std = _moments(rollouts, [1.0 / len(tokens) for tokens in rollouts])
        scale = 1.0 / (std + epsilon) if std else 0.0
        return [tuple((a * scale).astype(np.float32) for a in arrays) for arrays in own]

    return inner._replace(over_batch=over_batch)


def reinforce_plus_plus(gamma: float = 1.0, epsilon: float = 1e-8) -> Advantage:
    """r gamma^(sampled tokens still to come), whitened over the sampled tokens of the batch.

    REINFORCE++ (arXiv 2501.03262). The paper's reward also holds a KL penalty for each token; here
    penalties belong to the loss.
    """
    _check_share("reinforce_plus_plus", "gamma", gamma)
    _check_positive("reinforce_plus_plus", "epsilon", epsilon)

    def of_group(group: Group, estimates: Estimates) -> PerToken:
        return _along(group, lambda paid: _from_the_end(paid, np.full(len(paid), gamma)))

    def over_batch(groups: Sequence[Group], advantages: Sequence[PerToken]) -> list[PerToken]:
        rollouts = _per_rollout(groups, advantages)
        mean, std = _moments(rollouts, [1.0] * len(rollouts))

        def whitened(member: Trajectory, array: np.ndarray) -> np.ndarray:
            white = (array.astype(np.float64) - mean) / (std + epsilon)
            return np.where(_learns(member), white, 0.0).astype(np.float32)

        return [
            tuple(map(whitened, group.members, arrays))
            for group, arrays in zip(groups, advantages, strict=True)
        ]

    return Advantage(of_group, over_batch=over_batch)


def gae(gamma: float = 1.0, lam: float = 1.0, returns_lam: float = 1.0) -> Advantage:
    """Generalised advantage estimation (arXiv 1506.02438): sum of (gamma lam)^l delta_{t+l}.

    delta_t = r_t + gamma V_{t+1} - V_t over sampled tokens, V = 0 after the last, also where the
    rollout was truncated. Returns are V + the same sum with `returns_lam` (decoupled, VAPO, arXiv
    2504.05118). Each trajectory of a fanned-out rollout is paid the reward at its own end.
    """
    for field, value in (("gamma", gamma), ("lam", lam), ("returns_lam", returns_lam)):
        _check_share("gae", field, value)

    def of_group(group: Group, estimates: Estimates) -> PerToken:
        return _along(group, lambda paid, v: _gae(paid, v, gamma, lam), estimates.values)

    def returns(group: Group, estimates: Estimates) -> PerToken:
        return _along(
            group, lambda paid, v: v + _gae(paid, v, gamma, returns_lam), estimates.values
        )

    return Advantage(of_group, frozenset({VALUES}), returns=returns)


def length_adaptive_gae(
    alpha: float = 1.5, gamma: float = 1.0, returns_lam: float = 1.0
) -> Advantage:
    """`gae` with lam = 1 - 1 / (alpha n), at least 0, for a trajectory of n sampled tokens.

    VAPO (arXiv 2504.05118) has alpha 0.05, the default is that of SAO (arXiv 2607.07508).
    """
    _check_positive("length_adaptive_gae", "alpha", alpha)
    for field, value in (("gamma", gamma), ("returns_lam", returns_lam)):
        _check_share("length_adaptive_gae", field, value)

    def adapted(paid: np.ndarray, values: np.ndarray) -> np.ndarray:
        return _gae(paid, values, gamma, max(0.0, 1.0 - 1.0 / (alpha * len(paid))))

    def of_group(group: Group, estimates: Estimates) -> PerToken:
        return _along(group, adapted, estimates.values)

    return gae(gamma, returns_lam=returns_lam)._replace(of_group=of_group)


def vtrace(
    gamma: float = 1.0, rho_bar: float = 1.0, c_bar: float = 1.0, lam: float = 1.0
) -> Advantage:
    """V-trace (IMPALA, arXiv 1802.01561): returns v, advantages r + gamma v' - V.

    v_t = V_t + rho_t delta_t + gamma c_t (v_{t+1} - V_{t+1}) over sampled tokens, delta as in
    `gae`, rho = min(rho_bar, ratio), c = lam min(c_bar, ratio), ratio = current / behavior. The
    paper's factor rho before the advantage is left to the loss. v' = lam v_{t+1} + (1 - lam)
    V_{t+1}, so that ratios of 1 give gae(gamma, lam, lam); the paper has v' = v_{t+1}.
    """
    for field, value in (("gamma", gamma), ("lam", lam)):
        _check_share("vtrace", field, value)
    for field, value in (("rho_bar", rho_bar), ("c_bar", c_bar)):
        _check_positive("vtrace", field, value)

    def corrections(deltas: np.ndarray, log_ratios: np.ndarray) -> np.ndarray:
        rho, c = (np.exp(np.minimum(log_ratios, math.log(bar))) for bar in (rho_bar, c_bar))
        return _from_the_end(rho * deltas, gamma * lam * c)

    def advantages(paid: np.ndarray, values: np.ndarray, log_ratios: np.ndarray) -> np.ndarray:
        deltas = _deltas(paid, values, gamma)
        return deltas + gamma * lam * np.append(corrections(deltas, log_ratios)[1:], 0.0)

    def targets(paid: np.ndarray, values: np.ndarray, log_ratios: np.ndarray) -> np.ndarray:
        return values + corrections(_deltas(paid, values, gamma), log_ratios)

    def of_group(group: Group, estimates: Estimates) -> PerToken:
        return _along(group, advantages, estimates.values, estimates.log_ratios)

    def returns(group: Group, estimates: Estimates) -> PerToken:
        return _along(group, targets, estimates.values, estimates.log_ratios)

    return Advantage(of_group, frozenset({VALUES, LOG_RATIOS}), returns=returns)


def _rewards(group: Group) -> dict[int, float]:
    """The reward of every rollout that did not fail, by sample."""
    rewards: dict[int, float] = {}
    for m in group.members:
        if m.copy_of is not None or not m.valid or m.reward is None:
            continue
        sample, reward = m.key.sample, float(m.reward)
        if not math.isfinite(reward):
            raise ValueError(f"reward {reward} of sample {sample}, {group.task} {group.prompt}")
        if rewards.setdefault(sample, reward) != reward:
            raise ValueError(
                f"rewards {rewards[sample]} and {reward} of sample {sample}, {group.task} "
                f"{group.prompt}: the trajectories of one rollout must have one reward"
            )
    for m in group.members:
        if m.copy_of is not None and m.key.sample not in rewards:
            raise ValueError(
                f"a copy of sample {m.copy_of}, {group.task} {group.prompt}, without its original"
            )
    return rewards


def _centred(rewards: dict[int, float]) -> dict[int, float]:
    """Reward minus mean by sample; exactly 0 where all rewards are equal."""
    if len(set(rewards.values())) <= 1:
        return dict.fromkeys(rewards, 0.0)
    mean = math.fsum(rewards.values()) / len(rewards)
    return {sample: reward - mean for sample, reward in rewards.items()}


def _spread(group: Group, by_sample: dict[int, float]) -> PerToken:
    """The number of each member's rollout on the member's sampled tokens."""
    return tuple(
        np.where(_learns(m), np.float32(by_sample.get(m.key.sample, 0.0)), np.float32(0))
        for m in group.members
    )


def _along(
    group: Group, function: Callable[..., np.ndarray], *columns: PerToken | None
) -> PerToken:
    """`function(paid, *columns)` on the sampled tokens of each member, in float64; 0 elsewhere.

    `paid` is the reward of each of these tokens: the trajectory's at the last, 0 before.
    """
    rewards = _rewards(group)
    result = []
    for number, member in enumerate(group.members):
        array, where = np.zeros(len(member.tokens), np.float32), _learns(member)
        if where.any():
            paid = np.zeros(int(where.sum()))
            paid[-1] = rewards[member.key.sample]
            own = (c[number][where].astype(np.float64) for c in columns if c is not None)
            array[where] = function(paid, *own)
        result.append(array)
    return tuple(result)


def _deltas(paid: np.ndarray, values: np.ndarray, gamma: float) -> np.ndarray:
    return paid + gamma * np.append(values[1:], 0.0) - values


def _gae(paid: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    return _from_the_end(_deltas(paid, values, gamma), np.full(len(paid), gamma * lam))


def _from_the_end(terms: np.ndarray, decay: np.ndarray) -> np.ndarray:
    """x_t = terms_t + decay_t x_{t+1}, 0 after the last."""
    total, sums = 0.0, []
    for term, factor in zip(reversed(terms.tolist()), reversed(decay.tolist()), strict=True):
        total = term + factor * total
        sums.append(total)
    return np.array(sums[::-1])


def _per_rollout(groups: Sequence[Group], advantages: Sequence[PerToken]) -> list[np.ndarray]:
    """float64[n] for each rollout with sampled tokens: the advantages of all of them, once."""
    rollouts: dict[tuple[int, int], list[np.ndarray]] = {}
    for number, (group, arrays) in enumerate(zip(groups, advantages, strict=True)):
        for member, array in zip(group.members, arrays, strict=True):
            if member.copy_of is None and _learns(member).any():
                parts = rollouts.setdefault((number, member.key.sample), [])
                parts.append(array[_learns(member)].astype(np.float64))
    return list(map(np.concatenate, rollouts.values()))


def _moments(rollouts: Sequence[np.ndarray], weights: Sequence[float]) -> tuple[float, float]:
    """Mean and std over tokens that weigh what their rollout says; std 0 where all are equal."""
    if not rollouts:
        return 0.0, 0.0
    values = np.concatenate(rollouts)
    if (values == values[0]).all():
        return float(values[0]), 0.0
    each = np.repeat(weights, list(map(len, rollouts)))
    mean = np.average(values, weights=each)
    return float(mean), math.sqrt(np.average((values - mean) ** 2, weights=each))


def _learns(member: Trajectory) -> np.ndarray:
    """bool[T]: the tokens that an advantage is for."""
    return member.loss_mask & member.valid


def _name(function: Callable) -> str:
    """What errors call a function: a factory's own functions go by the factory's name."""
    return getattr(function, "__qualname__", repr(function)).split(".<locals>")[0]


def _checked(name: str, group: Group, arrays: Any) -> PerToken:
    """`arrays`, cleared outside the mask, if they fit the group's members."""
    if not isinstance(arrays, tuple | list):
        raise ValueError(f"{name}: {_kind(arrays)}; a tuple with one array per member expected")
    if len(arrays) != len(group.members):
        raise ValueError(f"{name}: {len(arrays)} arrays for {len(group.members)} members")
    for member, array in zip(group.members, arrays, strict=True):
        tokens = len(member.tokens)
        if not isinstance(array, np.ndarray) or array.dtype != np.float32 or array.ndim != 1:
            raise ValueError(f"{name}: {_kind(array)} for {member.key}; float32[{tokens}] expected")
        if len(array) != tokens:
            raise ValueError(f"{name}: {len(array)} entries for {tokens} tokens of {member.key}")
        if not np.isfinite(array[member.loss_mask]).all():
            raise ValueError(f"{name}: a number that is not finite for {member.key}")
    return tuple(
        np.where(m.loss_mask, array, np.float32(0))
        for m, array in zip(group.members, arrays, strict=True)
    )


def _kind(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{list(value.shape)}"
    return type(value).__name__


def _check_positive(name: str, field: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}: {field} must be positive and finite, got {value}")


def _check_share(name: str, field: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name}: {field} must lie in [0, 1], got {value}")
