"""Published losses in numpy, with the defaults that their sources give.

th is the policy that trains, old the proximal one, mu the one that sampled; r = th / old,
rho = old / mu, d = th / mu.
"""

from types import SimpleNamespace as Tokens
from typing import Any

import numpy as np

from tests.losses.conformance.oracle import (
    Out,
    Whole,
    among,
    clip,
    cut,
    k3,
    log_ratio,
    mean,
    own_gradient,
    plus,
    ratio,
    score_function,
    sg,
    smaller,
    surrogate,
    total,
)


def r(t: Tokens) -> Any:
    return ratio(t.current, t.proximal)


def rho(t: Tokens) -> Any:
    return ratio(t.proximal, t.behavior)


def d(t: Tokens) -> Any:
    return ratio(t.current, t.behavior)


def by_length(numerator: Any, denominator: Any) -> Any:
    """GSPO's s: the geometric mean of a sequence's ratios, its gradient the token's own."""
    apart = own_gradient(mean(numerator - denominator), numerator)
    return np.exp(cut(apart, -20, 20))


# --- clipped -------------------------------------------------------------------------------------


def ppo(t: Tokens, whole: Whole) -> Out:
    return clip(t, r(t), 0.2, 0.2)


def grpo(t: Tokens, whole: Whole) -> Out:
    return plus(ppo(t, whole), 0.04 * k3(log_ratio(t.reference, t.current)))


def dual_clip(t: Tokens, whole: Whole) -> Out:
    return clip(t, r(t), 0.2, 0.2, dual=3.0)


def dapo(t: Tokens, whole: Whole) -> Out:
    return clip(t, r(t), 0.2, 0.28)


def gspo(t: Tokens, whole: Whole) -> Out:
    return clip(t, by_length(t.current, t.proximal), 3e-4, 4e-4)


def gmpo(t: Tokens, whole: Whole) -> Out:
    return geometric(t, t.proximal, 0.4, 0.4)


def geometric(t: Tokens, old: Any, low: float, high: float) -> Out:
    """-A exp(mean of log r, clipped on the side that A pushes to)."""
    sign, x = np.sign(t.advantages), log_ratio(t.current, old)
    bounded = cut(x, -low, high)
    clipped = np.where(sign == 0, x, sign * smaller(sign * x, sign * bounded))
    flows = (sign == 0) | (sg(sign * x) <= sg(sign * bounded))
    sequence = np.exp(mean(clipped))
    weight = among(np.where(flows, sg(sequence), 0.0), t.kept)
    return Out(among(-t.advantages * sequence, t.kept), weight, t.kept)


def tis(t: Tokens, whole: Whole) -> Out:
    return clip(t, r(t), 0.2, 0.2, factor=np.minimum(rho(t), 2.0))


def mis(t: Tokens, whole: Whole) -> Out:
    inside = (rho(t) >= 0.5) & (rho(t) <= 2.0) & np.all(rho(t) >= 1e-4)
    return clip(t, r(t), 0.2, 0.2, factor=rho(t), kept=inside)


def mis_by_sequence(t: Tokens, whole: Whole) -> Out:
    """The text's own preference: the product of the ratios, [0.5, 2], weighs and drops as one."""
    product = np.exp(cut(total(t.proximal - t.behavior), -20, 20))
    inside = (product >= 0.5) & (product <= 2.0) & np.all(rho(t) >= 1e-4)
    return clip(t, r(t), 0.2, 0.2, factor=product, kept=inside)


def icepop(t: Tokens, whole: Whole) -> Out:
    inside = (rho(t) >= 0.5) & (rho(t) <= 5.0)
    return clip(t, r(t), 0.2, 0.28, factor=rho(t), kept=inside)


def decoupled_ppo(t: Tokens, whole: Whole) -> Out:
    return clip(t, r(t), 0.2, 0.2, factor=rho(t), kept=rho(t) <= 5.0)


def interpolated_ppo(t: Tokens, whole: Whole) -> Out:
    """log old = log mu + a (sg(log th) - log mu), a = lag / (lag + 1)."""
    old = t.behavior + t.lag / (t.lag + 1) * (sg(t.current) - t.behavior)
    mismatch = ratio(old, t.behavior)
    return clip(t, ratio(t.current, old), 0.2, 0.2, factor=mismatch, kept=mismatch <= 5.0)


def ppo_ewma(t: Tokens, whole: Whole) -> Out:
    mismatch = ratio(t.ema, t.behavior)
    inside = (mismatch >= 0.5) & (mismatch <= 2.0)
    return clip(t, ratio(t.current, t.ema), 0.2, 0.2, factor=mismatch, kept=inside)


def opsm(t: Tokens, whole: Whole) -> Out:
    diverged = mean(log_ratio(t.behavior, sg(t.current))) > 1e-4
    return clip(t, r(t), 0.2, 0.2, kept=~((t.advantages < 0) & diverged))


# --- masked, gated, weighed ----------------------------------------------------------------------


def dis(t: Tokens, whole: Whole) -> Out:
    return score_function(t, d(t), (sg(d(t)) > 0.7) & (sg(d(t)) < 6.0))


def cispo(t: Tokens, whole: Whole) -> Out:
    return score_function(t, cut(r(t), None, 1.2))


def aipo(t: Tokens, whole: Whole) -> Out:
    return score_function(t, cut(d(t), None, 8.0))


def k2_5(t: Tokens, whole: Whole) -> Out:
    x = log_ratio(t.current, t.proximal)
    inside = (sg(x) >= -np.log(2.0)) & (sg(x) <= np.log(2.0))
    return plus(surrogate(t, np.exp(x), kept=inside), 1e-3 * x**2)


def k1_5(t: Tokens, whole: Whole) -> Out:
    apart = total(log_ratio(t.current, t.proximal))
    return Out(among((t.advantages - 0.1 * apart) ** 2, t.kept), None, t.kept)


def moved(t: Tokens) -> Any:
    return np.exp(sg(t.current)) - np.exp(t.behavior)


def dppo(t: Tokens, whole: Whole) -> Out:
    A = t.advantages
    gone = ((A > 0) & (moved(t) > 0.2)) | ((A < 0) & (moved(t) < -0.2))
    square = log_ratio(t.current, t.behavior) ** 2
    return plus(surrogate(t, d(t), kept=~gone), 1e-3 * square)


def ipo(t: Tokens, whole: Whole) -> Out:
    square = log_ratio(t.current, t.behavior) ** 2
    return plus(surrogate(t, d(t), kept=np.abs(moved(t)) <= 0.1), 1e-3 * square)


def sapo(t: Tokens, whole: Whole) -> Out:
    return soft_gate(t, r(t), 1.0, 1.05)


def soft_gate(t: Tokens, ratios: Any, positive: float, negative: float) -> Out:
    """-A (4 / tau) sigmoid(tau (r - 1)), tau by the advantage's sign."""
    tau = np.where(t.advantages > 0, positive, negative)
    gate = 1 / (1 + np.exp(-tau * (ratios - 1)))
    slope = 4 * sg(gate) * (1 - sg(gate)) * sg(ratios)
    return Out(among(-t.advantages * 4 / tau * gate, t.kept), among(slope, t.kept), t.kept)


def dro(t: Tokens, whole: Whole) -> Out:
    square = log_ratio(t.current, t.proximal) ** 2
    return plus(score_function(t, np.ones(t.kept.shape)), 0.05 * square / 2)


def m2po(t: Tokens, whole: Whole, budget: float = 0.04) -> Out:
    return surrogate(t, d(t), kept=~(harmful(t) & (squared(t) > second_moment_cut(whole, budget))))


def harmful(t: Tokens) -> Any:
    x = sg(t.current) - t.behavior
    return ((t.advantages > 0) & (x > 0)) | ((t.advantages < 0) & (x < 0))


def squared(t: Tokens) -> Any:
    return log_ratio(sg(t.current), t.behavior) ** 2


def second_moment_cut(whole: Whole, budget: float) -> float:
    """The largest harmful (log d)^2 that may stay, with the mean of those that stay in budget.

    The library cuts at edges of bins 8 % apart, so there must be room for an edge above it.
    """
    bad = np.concatenate([harmful(t) for t in whole])
    order = np.sort(np.concatenate([squared(t) for t in whole])[bad])
    for count in range(len(order), -1, -1):
        if not count or order[:count].mean() <= budget:
            last = order[count - 1] if count else 0.0
            assert count == len(order) or order[count] > 1.1 * last, "an edge may fall anywhere"
            return float(last)
    raise AssertionError("not reached")


# --- teachers, critics, demonstrations -----------------------------------------------------------


def opd(t: Tokens, whole: Whole) -> Out:
    return taught(t, t.expert, 20.0)


def taught(t: Tokens, teacher: Any, bound: float) -> Out:
    advantages = cut(teacher - sg(t.current), -bound, bound)
    return surrogate(Tokens(**vars(t) | {"advantages": advantages}), d(t))


def supervised(t: Tokens, whole: Whole) -> Out:
    return Out(among(-t.current, t.kept), None, t.kept)


def critic(t: Tokens, whole: Whole) -> Out:
    return Out(among(0.5 * (t.value - t.returns) ** 2, t.kept), None, t.kept)
