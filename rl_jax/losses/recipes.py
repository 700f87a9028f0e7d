"""[N] Named losses: short chains of parts with their published defaults.

Each returns a `Loss` from plain keywords. "Old" is the proximal policy, that of the newest push:
the trainer makes one update of a batch, so the policy before the batch's first update says nothing.
Masking by lag goes in front of any of them: `masked_above(dapo(), tau=4)`. Which advantages a paper
uses is told where it matters; they are chosen apart from the loss.
"""

import math
from collections.abc import Sequence

from rl_jax.losses.arguments import inside_unit, positive
from rl_jax.losses.bounds import clamp, truncate, weigh
from rl_jax.losses.combine import chain, per_task
from rl_jax.losses.distillation import teacher_advantage
from rl_jax.losses.evaluate import LOG_RATIO_BOUND
from rl_jax.losses.masks import (
    Divergence,
    band_mask,
    divergence_mask,
    sequence_kl_mask,
    two_sided_mask,
    veto,
)
from rl_jax.losses.objectives import (
    clipped,
    cross_entropy,
    geometric_mean,
    importance_sampled,
    policy_gradient,
    soft_gated,
    squared_sequence,
    value_loss,
)
from rl_jax.losses.penalties import kl, squared_log_ratio
from rl_jax.losses.ratios import (
    Level,
    current_over_behavior,
    current_over_proximal,
    proximal_over_behavior,
    ratio,
)
from rl_jax.losses.reductions import constant_norm, sequence_mean_token_mean, token_mean
from rl_jax.losses.second_moment import second_moment_mask
from rl_jax.losses.types import BEHAVIOR, CURRENT, Loss, ema


def ppo(eps_low: float = 0.2, eps_high: float = 0.2) -> Loss:
    """PPO's clipped surrogate (arXiv 1707.06347), mean over tokens; for advantages of a critic."""
    return Loss(chain(current_over_proximal(), clipped(eps_low, eps_high)), token_mean)


def grpo(eps_low: float = 0.2, eps_high: float = 0.2, beta: float = 0.04) -> Loss:
    """GRPO, DeepSeekMath (arXiv 2402.03300) eq. 3: clipped, plus beta x k3 to the reference.

    Mean over a sequence's tokens, then over sequences; advantages standardised in the group.
    beta = 0 leaves the reference out, as DAPO and many since do; verl's default is 0.001.
    """
    parts = [current_over_proximal(), clipped(eps_low, eps_high)]
    if beta:
        parts.append(kl(coefficient=beta))
    return Loss(chain(*parts), sequence_mean_token_mean)


def dual_clip(eps_low: float = 0.2, eps_high: float = 0.2, c: float = 3.0) -> Loss:
    """Dual-clip PPO (arXiv 1912.09729): at A < 0 the surrogate is at least c A."""
    return Loss(chain(current_over_proximal(), clipped(eps_low, eps_high, dual=c)), token_mean)


def dapo(eps_low: float = 0.2, eps_high: float = 0.28) -> Loss:
    """DAPO (arXiv 2503.14476) eq. 8: clip-higher and the mean over all tokens, no KL term.

    Dropping groups of equal rewards and the overlong penalty are no part of a loss.
    """
    return Loss(chain(current_over_proximal(), clipped(eps_low, eps_high)), token_mean)


def dr_grpo(length: int = 3000, eps_low: float = 0.2, eps_high: float = 0.2) -> Loss:
    """Dr. GRPO (arXiv 2503.20783): token sums over a constant, for advantages R - mean.

    `length` is the generation budget; the default is that of the paper's runs.
    """
    parts = chain(current_over_proximal(), clipped(eps_low, eps_high))
    return Loss(parts, constant_norm(length))


def gspo(eps_low: float = 3e-4, eps_high: float = 4e-4) -> Loss:
    """GSPO (arXiv 2507.18071): clip the geometric mean of a sequence's ratios."""
    parts = chain(current_over_proximal(level="geometric"), clipped(eps_low, eps_high))
    return Loss(parts, sequence_mean_token_mean)


def gmpo(eps_low: float = 0.4, eps_high: float = 0.4) -> Loss:
    """GMPO (arXiv 2507.20673): geometric mean of ratios clipped to e^-0.4 and e^0.4 by token."""
    parts = chain(current_over_proximal(), geometric_mean(eps_low, eps_high))
    return Loss(parts, sequence_mean_token_mean)


def cispo(eps_high: float = 0.2, eps_low: float | None = None) -> Loss:
    """CISPO, MiniMax-M1 (arXiv 2506.13585): -sg(min(r, 1 + eps_high)) A log p.

    No token loses its gradient. The paper tunes eps_high, without a value, and leaves the low side
    off (None; verl says eps_low = 10); 0.2 is verl's.
    """
    if eps_low is not None and eps_low >= 1.0:
        raise ValueError(f"cispo: eps_low must be below 1, got {eps_low}; None switches it off")
    low = None if eps_low is None else 1.0 - inside_unit("cispo", "eps_low", eps_low)
    bounds = clamp(low, 1.0 + positive("cispo", "eps_high", eps_high))
    return Loss(chain(current_over_proximal(), bounds, weigh(), policy_gradient()), token_mean)


def tis(cap: float = 2.0, eps_low: float = 0.2, eps_high: float = 0.2) -> Loss:
    """Truncated importance sampling: PPO's surrogate, each token weighed by old / behavior, at
    most `cap`.

    Source: Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training".
    """
    mismatch = (proximal_over_behavior(), truncate(cap), weigh())
    return Loss(chain(*mismatch, current_over_proximal(), clipped(eps_low, eps_high)), token_mean)


def mis(
    low: float = 0.5,
    high: float = 2.0,
    level: Level = "token",
    threshold: float = 1e-4,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
) -> Loss:
    """Masked importance sampling (Liu, Li et al. 2025, "When Speed Kills Stability"): drop where
    old / behavior leaves [low, high], weigh the rest by it, veto trajectories with a token below
    `threshold`; then PPO's surrogate. Bounds and the token level are slime's; the text itself
    prefers level "sequence" or "geometric". The veto looks at tokens whatever the level.
    """
    mismatch = [proximal_over_behavior(), veto(threshold)]
    if level != "token":
        mismatch.append(proximal_over_behavior(level=level, name=f"ratio/{level}"))
    mismatch += [band_mask(low, high), weigh()]
    return Loss(chain(*mismatch, current_over_proximal(), clipped(eps_low, eps_high)), token_mean)


def icepop(
    low: float = 0.5, high: float = 5.0, eps_low: float = 0.2, eps_high: float = 0.28
) -> Loss:
    """IcePop (arXiv 2510.18855): old / behavior weighs a token inside [low, high] and drops it
    outside; then the clipped surrogate, mean of sequence means. GLM-5 (arXiv 2602.15763) sec. 3.2
    takes [0.5, 2] and the clip that is the default here.
    """
    mismatch = (proximal_over_behavior(), band_mask(low, high), weigh())
    parts = chain(*mismatch, current_over_proximal(), clipped(eps_low, eps_high))
    return Loss(parts, sequence_mean_token_mean)


def dis(eps_low: float = 0.3, eps_high: float = 5.0) -> Loss:
    """Double-sided importance sampling: -sg(f(d) A) log p, f(d) = d inside the open band, else 0.

    GLM-5 (arXiv 2602.15763) eq. 3-5; the report gives no band, the defaults are those that SAO
    (arXiv 2607.07508), by the same authors, gives for mathematics.
    """
    band = two_sided_mask(eps_low, eps_high)
    return Loss(chain(current_over_behavior(), band, weigh(), policy_gradient()), token_mean)


def k2_5(
    log_low: float = -math.log(2.0), log_high: float = math.log(2.0), tau: float = 1e-3
) -> Loss:
    """Kimi K2.5 (arXiv 2602.02276), used by K3 too: r A where log r lies in [log_low, log_high],
    whatever the sign of A, minus tau (log r)^2 on all tokens; the mean is over all tokens.

    For advantages R - mean. The report gives no numbers: the band here is ours, tau is prime-rl's.
    """
    limit = LOG_RATIO_BOUND
    if not -limit <= log_low < log_high <= limit:
        raise ValueError(
            f"k2_5: needs {-limit:g} <= log_low < log_high <= {limit:g}, got {log_low}, {log_high}"
        )
    band = band_mask(math.exp(log_low), math.exp(log_high))
    surrogate = (importance_sampled(), squared_log_ratio(tau))
    return Loss(chain(current_over_proximal(), band, *surrogate), token_mean)


def k1_5(tau: float = 0.1) -> Loss:
    """Kimi K1.5 (arXiv 2501.12599) eq. 3, used by K2 too: mean_i (R_i - mean - tau log r_i)^2.

    For advantages R - mean. The report gives no tau: the default is ours.
    """
    return Loss(chain(current_over_proximal(), squared_sequence(tau)), sequence_mean_token_mean)


def dppo(delta: float = 0.2, kind: Divergence = "tv", tau: float = 1e-3) -> Loss:
    """DPPO (arXiv 2602.04879): d A without the tokens whose probability already moved by `delta` in
    the direction of A, plus tau (log d)^2.

    The defaults are prime-rl's; verl runs 0.15 ("tv") and 0.05 ("kl", nats), without the square
    and with d cut at 20.
    """
    mask = divergence_mask(delta, kind)
    surrogate = (importance_sampled(), squared_log_ratio(tau))
    return Loss(chain(current_over_behavior(), mask, *surrogate), token_mean)


def ipo(delta: float = 0.1, tau: float = 1e-3) -> Loss:
    """prime-rl's IPO (INTELLECT policy optimization): as `dppo`, but a probability that moved by
    more than `delta` is dropped whichever way; later versions take 0.3."""
    mask = divergence_mask(delta, sign_aware=False)
    surrogate = (importance_sampled(), squared_log_ratio(tau))
    return Loss(chain(current_over_behavior(), mask, *surrogate), token_mean)


def aipo(cap: float = 8.0) -> Loss:
    """AIPO, LlamaRL (arXiv 2505.24034): -sg(min(d, cap)) A log p, mean over tokens.

    The paper finds caps of 2 to 10 good; its further terms are left out, as in prime-rl.
    """
    weight = (current_over_behavior(), truncate(cap), weigh())
    return Loss(chain(*weight, policy_gradient()), token_mean)


def decoupled_ppo(
    cap: float = 5.0, eps_low: float = 0.2, eps_high: float = 0.2, interpolated: bool = False
) -> Loss:
    """Decoupled PPO (Hilton et al., arXiv 2110.00641) as in AReaL (arXiv 2505.24298).

    PPO's surrogate around the proximal policy, weighed by proximal / behavior; tokens where that
    is above `cap` are dropped. `interpolated`: the proximal policy is made up from versions
    instead of scored (A-3PO, arXiv 2512.06547).
    """
    mismatch = (proximal_over_behavior(interpolated=interpolated), band_mask(None, cap), weigh())
    moved = current_over_proximal(interpolated=interpolated)
    return Loss(chain(*mismatch, moved, clipped(eps_low, eps_high)), token_mean)


def ppo_ewma(
    window: float = 8.0,
    low: float = 0.5,
    high: float = 2.0,
    eps_low: float = 0.2,
    eps_high: float = 0.2,
    reset_below: float = 0.9,
) -> Loss:
    """PPO-EWMA (arXiv 2605.12070 after 2110.00641): the proximal policy is a moving average with
    decay window / (window + 2), started anew once fewer than `reset_below` of an update's tokens
    were kept. average / behavior is masked to [low, high] and weighs, current / average is
    clipped. We know neither the paper's window nor its band: those defaults are ours.
    """
    average = ema(positive("ppo_ewma", "window", window) / (window + 2.0), reset_below)
    mismatch = (ratio(average, BEHAVIOR), band_mask(low, high), weigh())
    parts = chain(*mismatch, ratio(CURRENT, average), clipped(eps_low, eps_high))
    return Loss(parts, token_mean)


def m2po(threshold: float = 0.04) -> Loss:
    """M2PO (arXiv 2510.01161): d A without the tokens that carry the mean (log d)^2 of the batch
    above `threshold`."""
    mask = second_moment_mask(threshold)
    return Loss(chain(current_over_behavior(), mask, importance_sampled()), token_mean)


def sapo(temperature_positive: float = 1.0, temperature_negative: float = 1.05) -> Loss:
    """SAPO (arXiv 2511.20347): a soft gate on r instead of a clip, mean of sequence means."""
    gate = soft_gated(temperature_positive, temperature_negative)
    return Loss(chain(current_over_proximal(), gate), sequence_mean_token_mean)


def opsm(delta: float = 1e-4, eps_low: float = 0.2, eps_high: float = 0.2) -> Loss:
    """Off-policy sequence masking, DeepSeek-V3.2 (arXiv 2512.02556), before GRPO's surrogate:
    sequences of A < 0 whose mean log(behavior / current) is above `delta` are dropped.

    The report takes the inference engine's probabilities there, so that mismatch counts too, and
    was followed; slime takes the trainer's own unless told otherwise. The report gives no delta:
    the default is slime's.
    """
    mask = (current_over_behavior(), sequence_kl_mask(delta))
    parts = chain(*mask, current_over_proximal(), clipped(eps_low, eps_high))
    return Loss(parts, sequence_mean_token_mean)


def dro(beta: float = 0.05) -> Loss:
    """Direct reward optimisation (arXiv 2405.19107), per token: -(A log p - beta / 2 (log r)^2).

    As verl and Tinker write it, with the advantage for R - V; the paper squares whole sequences. r
    is to the proximal policy, as verl's; Tinker's is to the sampler. verl gives no beta; the
    default is that of Tinker's example.
    """
    parts = chain(current_over_proximal(), policy_gradient(), squared_log_ratio(0.5 * beta))
    return Loss(parts, token_mean)


def opd(teacher: str = "teacher", bound: float | None = None) -> Loss:
    """On-policy distillation (Thinking Machines 2025; GLM-5, arXiv 2602.15763): d A, where A is
    log teacher - log current; mean over tokens."""
    parts = (current_over_behavior(), teacher_advantage(teacher, bound), importance_sampled())
    return Loss(chain(*parts), token_mean)


def mopd(
    tasks: Sequence[str],
    teachers: Sequence[str],
    bound: float = 5.0,
    log_low: float = -math.log(2.0),
    log_high: float = math.log(2.0),
    tau: float = 1e-3,
) -> Loss:
    """Multi-teacher on-policy distillation, Kimi K3 (arXiv 2607.24653): `k2_5` where each of
    `tasks` takes its advantage from its own of `teachers`, clipped to +-bound; tasks that are not
    named keep their rewards'. The report gives no number: bound and band are ours.
    """
    if not tasks or len(tasks) != len(teachers):
        raise ValueError(f"mopd: needs one teacher per task, got {len(teachers)} for {len(tasks)}")
    parts = k2_5(log_low, log_high, tau).transform
    if len(set(tasks)) != len(tasks):
        raise ValueError(f"mopd: a task is there twice among {', '.join(tasks)}")
    pairs = zip(tasks, teachers, strict=True)
    each = {task: chain(teacher_advantage(name, bound), parts) for task, name in pairs}
    return Loss(per_task(each, parts), token_mean)


def supervised() -> Loss:
    """Cross-entropy, mean over the demonstration's assistant tokens."""
    return Loss(chain(cross_entropy()), token_mean)


def critic() -> Loss:
    """Half the squared error of the critic's values, mean over tokens; for the critic's tree."""
    return Loss(chain(value_loss(name="critic")), token_mean)
