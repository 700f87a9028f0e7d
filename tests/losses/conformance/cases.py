"""One table: every public transform and recipe, the scores it needs, and its numpy form.

A transform that is no loss by itself stands in the shortest chain that makes it one. The names are
those of the public functions; what follows a colon tells uses of one function apart.
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace as Tokens
from typing import NamedTuple

import numpy as np

from rl_jax import losses
from rl_jax.losses import recipes
from rl_jax.losses.types import ENTROPY, PROXIMAL, REFERENCE, VALUE, Loss, LossTransform, task_id
from tests.losses.conformance import recipe_oracles as published
from tests.losses.conformance.batches import CODER, EMA, EXPERT
from tests.losses.conformance.oracle import (
    Oracle,
    Out,
    Whole,
    among,
    clip,
    cut,
    k1,
    k2,
    k3,
    log_ratio,
    mean,
    own_gradient,
    plus,
    ratio,
    score_function,
    sg,
    surrogate,
    total,
)
from tests.losses.conformance.recipe_oracles import by_length, d, moved, r, rho


class Case(NamedTuple):
    build: Callable[[], LossTransform | Loss]
    oracle: Oracle
    needs: tuple[str, ...] = ()
    linear: bool = True
    """Linear in the advantage, so that `Terms.weight` is its slope."""
    bites: bool = False
    """Leaves some tokens without a gradient, in some regime."""
    adds_up: bool = True
    """Its metrics tell every token that a mask dropped, once."""

    def transform(self) -> LossTransform:
        built = self.build()
        return built.transform if isinstance(built, Loss) else built


def _chain(*parts: Callable[[], LossTransform]) -> Callable[[], LossTransform]:
    return lambda: losses.chain(*(part() for part in parts))


def _behavior(level: str = "token") -> LossTransform:
    return losses.current_over_behavior(level=level)


# --- ratios and bounds ---------------------------------------------------------------------------


def _sequence_ratio(t: Tokens, whole: Whole) -> Out:
    apart = own_gradient(total(t.current - t.behavior), t.current)
    return surrogate(t, np.exp(cut(apart, -20, 20)))


def _mismatch_by_sequence(t: Tokens, whole: Whole) -> Out:
    return score_function(t, np.exp(cut(mean(t.proximal - t.behavior), -20, 20)))


def _interpolated(t: Tokens, whole: Whole) -> Out:
    """AReaL: proximal = behavior + alpha (current - behavior), alpha = lag / (lag + 1)."""
    alpha = t.lag / (t.lag + 1)
    return score_function(t, np.exp(cut(alpha * (sg(t.current) - t.behavior), -20, 20)))


RATIOS: Mapping[str, Case] = {
    "ratio": Case(
        lambda: losses.chain(losses.ratio(), losses.importance_sampled()),
        lambda t, whole: surrogate(t, d(t)),
    ),
    "ratio: geometric": Case(
        lambda: losses.chain(losses.ratio(level="geometric"), losses.importance_sampled()),
        lambda t, whole: surrogate(t, by_length(t.current, t.behavior)),
    ),
    "ratio: sequence": Case(
        lambda: losses.chain(losses.ratio(level="sequence"), losses.importance_sampled()),
        _sequence_ratio,
    ),
    "ratio: of two others": Case(
        lambda: losses.chain(
            losses.ratio(PROXIMAL, REFERENCE), losses.weigh(), losses.policy_gradient()
        ),
        lambda t, whole: score_function(t, ratio(t.proximal, t.reference)),
        needs=(PROXIMAL, REFERENCE),
    ),
    "current_over_behavior": Case(
        _chain(_behavior, lambda: losses.importance_sampled()),
        lambda t, whole: surrogate(t, d(t)),
    ),
    "current_over_proximal": Case(
        lambda: losses.chain(losses.current_over_proximal(), losses.importance_sampled()),
        lambda t, whole: surrogate(t, r(t)),
        needs=(PROXIMAL,),
    ),
    "proximal_over_behavior": Case(
        lambda: losses.chain(
            losses.proximal_over_behavior(level="geometric"),
            losses.weigh(),
            losses.policy_gradient(),
        ),
        _mismatch_by_sequence,
        needs=(PROXIMAL,),
    ),
    "proximal_over_behavior: interpolated": Case(
        lambda: losses.chain(
            losses.proximal_over_behavior(interpolated=True),
            losses.weigh(),
            losses.policy_gradient(),
        ),
        _interpolated,
    ),
    "truncate": Case(
        lambda: losses.chain(
            _behavior(), losses.truncate(2.0), losses.weigh(), losses.policy_gradient()
        ),
        lambda t, whole: score_function(t, cut(sg(d(t)), None, 2.0)),
    ),
    "clamp": Case(
        lambda: losses.chain(
            _behavior(), losses.clamp(0.5, 2.0), losses.weigh(), losses.policy_gradient()
        ),
        lambda t, whole: score_function(t, cut(sg(d(t)), 0.5, 2.0)),
    ),
    "clamp: one side": Case(
        lambda: losses.chain(
            _behavior(), losses.clamp(None, 2.0), losses.weigh(), losses.policy_gradient()
        ),
        lambda t, whole: score_function(t, cut(sg(d(t)), None, 2.0)),
    ),
    "weigh": Case(
        lambda: losses.chain(
            losses.proximal_over_behavior(),
            losses.weigh(),
            losses.current_over_proximal(),
            losses.weigh(name="second"),
            losses.policy_gradient(),
        ),
        lambda t, whole: score_function(t, rho(t) * sg(r(t))),
        needs=(PROXIMAL,),
    ),
}


# --- masks ---------------------------------------------------------------------------------------


def _inside(log_low: float, log_high: float) -> Oracle:
    def oracle(t: Tokens, whole: Whole) -> Out:
        x = sg(log_ratio(t.current, t.behavior))
        return surrogate(t, d(t), kept=(x > log_low) & (x < log_high))

    return oracle


def _veto(t: Tokens, whole: Whole) -> Out:
    return surrogate(t, d(t), kept=np.all(sg(t.current - t.behavior) >= np.log(0.3)))


def _variation(t: Tokens, whole: Whole) -> Out:
    A = t.advantages
    gone = ((A > 0) & (moved(t) > 0.2)) | ((A < 0) & (moved(t) < -0.2))
    return surrogate(t, d(t), kept=~gone)


def _any_variation(t: Tokens, whole: Whole) -> Out:
    return surrogate(t, d(t), kept=np.abs(moved(t)) <= 0.1)


def bernoulli_kl(t: Tokens):
    p, mu = np.exp(sg(t.current)), np.exp(t.behavior)
    return mu * (t.behavior - sg(t.current)) + (1 - mu) * np.log((1 - mu) / (1 - p))


def _bernoulli(t: Tokens, whole: Whole) -> Out:
    A = t.advantages
    away = ((A > 0) & (moved(t) > 0)) | ((A < 0) & (moved(t) < 0))
    return surrogate(t, d(t), kept=~(away & (bernoulli_kl(t) > 0.05)))


def _opposed(t: Tokens, whole: Whole) -> Out:
    diverged = mean(t.behavior - sg(t.current)) > 1e-4
    return surrogate(t, d(t), kept=~((t.advantages < 0) & diverged))


def _masked(mask: Callable[[], LossTransform]) -> Callable[[], LossTransform]:
    return lambda: losses.chain(_behavior(), mask(), losses.importance_sampled())


def _by_estimate(estimate: Callable, low: float, high: float) -> Oracle:
    def oracle(t: Tokens, whole: Whole) -> Out:
        x = sg(log_ratio(t.current, t.behavior))
        value = estimate(x)
        return surrogate(t, d(t), kept=(value >= low) & (value <= high))

    return oracle


MASKS: Mapping[str, Case] = {
    "two_sided_mask": Case(
        _masked(lambda: losses.two_sided_mask(0.3, 5.0)),
        _inside(np.log(0.7), np.log(6.0)),
        bites=True,
    ),
    "band_mask": Case(
        _masked(lambda: losses.band_mask(0.5, 5.0)), _inside(np.log(0.5), np.log(5.0)), bites=True
    ),
    "veto": Case(_masked(lambda: losses.veto(0.3)), _veto, bites=True),
    "mask_stale": Case(
        _masked(lambda: losses.mask_stale(2)),
        lambda t, whole: surrogate(t, d(t), kept=t.lag <= 2),
        bites=True,
    ),
    "divergence_mask": Case(_masked(lambda: losses.divergence_mask(0.2)), _variation, bites=True),
    "divergence_mask: whatever the sign": Case(
        _masked(lambda: losses.divergence_mask(0.1, sign_aware=False)), _any_variation, bites=True
    ),
    "divergence_mask: kl": Case(
        _masked(lambda: losses.divergence_mask(0.05, "kl")), _bernoulli, bites=True
    ),
    "estimator_mask": Case(
        _masked(lambda: losses.estimator_mask("k2", 0.0, 0.02, level="token")),
        _by_estimate(lambda x: x**2 / 2, 0.0, 0.02),
        bites=True,
    ),
    "estimator_mask: k1": Case(
        _masked(lambda: losses.estimator_mask("k1", -1.5, 0.5, level="sequence")),
        _by_estimate(lambda x: total(-x), -1.5, 0.5),
        bites=True,
    ),
    "estimator_mask: k3": Case(
        _masked(lambda: losses.estimator_mask("k3", 0.0, 0.03, level="geometric")),
        _by_estimate(lambda x: mean(k3(x)), 0.0, 0.03),
        bites=True,
    ),
    "sequence_kl_mask": Case(_masked(lambda: losses.sequence_kl_mask(1e-4)), _opposed, bites=True),
    "second_moment_mask": Case(
        _masked(lambda: losses.second_moment_mask(0.06)),
        lambda t, whole: published.m2po(t, whole, 0.06),
        bites=True,
    ),
}


# --- objectives ----------------------------------------------------------------------------------


def _square(t: Tokens, whole: Whole) -> Out:
    S = total(log_ratio(t.current, t.behavior))
    return Out(among((t.advantages - 0.1 * S) ** 2, t.kept), None, t.kept)


OBJECTIVES: Mapping[str, Case] = {
    "policy_gradient": Case(
        lambda: losses.policy_gradient(), lambda t, whole: score_function(t, np.ones(t.kept.shape))
    ),
    "importance_sampled": Case(
        lambda: losses.chain(
            losses.proximal_over_behavior(),
            losses.truncate(1.2),
            losses.weigh(),
            losses.current_over_proximal(),
            losses.importance_sampled(),
        ),
        lambda t, whole: surrogate(t, r(t), cut(rho(t), None, 1.2)),
        needs=(PROXIMAL,),
    ),
    "clipped": Case(
        lambda: losses.chain(_behavior(), losses.clipped(0.2, 0.28)),
        lambda t, whole: clip(t, d(t), 0.2, 0.28),
        bites=True,
    ),
    "clipped: dual": Case(
        lambda: losses.chain(_behavior(), losses.clipped(0.2, 0.2, dual=3.0)),
        lambda t, whole: clip(t, d(t), 0.2, 0.2, dual=3.0),
        bites=True,
    ),
    "clipped: weighed": Case(
        lambda: losses.chain(
            losses.proximal_over_behavior(),
            losses.weigh(),
            losses.current_over_proximal(),
            losses.clipped(0.2, 0.2),
        ),
        lambda t, whole: clip(t, r(t), 0.2, 0.2, rho(t)),
        needs=(PROXIMAL,),
        bites=True,
    ),
    "soft_gated": Case(
        lambda: losses.chain(_behavior(), losses.soft_gated(1.5, 0.7)),
        lambda t, whole: published.soft_gate(t, d(t), 1.5, 0.7),
    ),
    "geometric_mean": Case(
        lambda: losses.chain(_behavior(), losses.geometric_mean(0.4, 0.4)),
        lambda t, whole: published.geometric(t, t.behavior, 0.4, 0.4),
        bites=True,
    ),
    "squared_sequence": Case(
        lambda: losses.chain(_behavior(), losses.squared_sequence(0.1)), _square, linear=False
    ),
    "value_loss": Case(
        lambda: losses.value_loss(),
        published.critic,
        needs=(VALUE,),
        linear=False,
    ),
    "cross_entropy": Case(lambda: losses.cross_entropy(), published.supervised, linear=False),
}


# --- penalties and distillation ------------------------------------------------------------------


def _penalty(value: Callable[[Tokens], object]) -> Oracle:
    return lambda t, whole: Out(value(t), 0.0, t.kept)


def _toward(score: Callable[[Tokens], object]) -> Callable[[Tokens], object]:
    return lambda t: log_ratio(score(t), t.current)


REFERRED = _toward(lambda t: t.reference)


def _taught(t: Tokens, whole: Whole) -> Out:
    return score_function(t, np.ones(t.kept.shape), advantages=cut(t.expert - sg(t.current), -1, 1))


PENALTIES: Mapping[str, Case] = {
    "kl": Case(
        lambda: losses.kl(coefficient=0.1),
        _penalty(lambda t: 0.1 * k3(REFERRED(t))),
        needs=(REFERENCE,),
        linear=False,
    ),
    "kl: k1": Case(
        lambda: losses.kl(EMA, "k1", coefficient=0.1),
        _penalty(lambda t: 0.1 * k1(log_ratio(t.ema, t.current))),
        needs=(EMA,),
        linear=False,
    ),
    "kl: k2": Case(
        lambda: losses.kl(estimator="k2", coefficient=0.1),
        _penalty(lambda t: 0.1 * k2(REFERRED(t))),
        needs=(REFERENCE,),
        linear=False,
    ),
    "kl: unbiased": Case(
        lambda: losses.kl(coefficient=0.1, importance=True),
        _penalty(lambda t: 0.1 * d(t) * k3(REFERRED(t))),
        needs=(REFERENCE,),
        linear=False,
    ),
    "kl: to a teacher": Case(
        lambda: losses.kl(EXPERT, coefficient=1.0),
        _penalty(lambda t: k3(log_ratio(t.expert, t.current))),
        needs=(EXPERT,),
        linear=False,
    ),
    "adaptive_kl": Case(
        lambda: losses.adaptive_kl(target=0.01, horizon=1000, initial=0.2),
        _penalty(lambda t: 0.2 * k3(REFERRED(t))),
        needs=(REFERENCE,),
        linear=False,
    ),
    "entropy_bonus": Case(
        lambda: losses.entropy_bonus(0.01),
        _penalty(lambda t: -0.01 * t.entropy),
        needs=(ENTROPY,),
        linear=False,
    ),
    "squared_log_ratio": Case(
        lambda: losses.chain(
            _behavior(), losses.two_sided_mask(0.3, 5.0), losses.squared_log_ratio(0.1)
        ),
        lambda t, whole: _inside(np.log(0.7), np.log(6.0))(t, whole)._replace(
            loss=0.1 * log_ratio(t.current, t.behavior) ** 2, weight=0.0
        ),
        linear=False,
    ),
    "teacher_advantage": Case(
        lambda: losses.chain(
            losses.teacher_advantage("expert", bound=1.0), losses.policy_gradient()
        ),
        _taught,
        needs=(EXPERT,),
        linear=False,
    ),
}


# --- combinations --------------------------------------------------------------------------------


def _dis(low: float, high: float) -> Callable[[], LossTransform]:
    return lambda: losses.chain(
        _behavior(), losses.two_sided_mask(low, high), losses.weigh(), losses.policy_gradient()
    )


def _dis_oracle(low: float, high: float) -> Oracle:
    def oracle(t: Tokens, whole: Whole) -> Out:
        x = sg(log_ratio(t.current, t.behavior))
        return score_function(t, d(t), (x > np.log1p(-low)) & (x < np.log1p(high)))

    return oracle


def _summed(t: Tokens, whole: Whole) -> Out:
    policy = clip(t, r(t), 0.2, 0.2)
    other = _dis_oracle(0.1, 0.1)(t, whole)
    return Out(
        0.7 * policy.loss + 0.3 * other.loss,
        0.7 * policy.weight + 0.3 * other.weight,
        policy.kept | other.kept,
    )


def _by_task(t: Tokens, whole: Whole) -> Out:
    """Trajectories of one task have one number."""
    chosen = {
        task_id("math"): _dis_oracle(0.3, 0.5),
        task_id("code"): lambda t, whole: clip(t, d(t), 0.2, 0.28),
    }.get(t.tasks[0], lambda t, whole: surrogate(t, by_length(t.current, t.behavior)))
    return chosen(t, whole)


COMBINATIONS: Mapping[str, Case] = {
    "chain": Case(
        lambda: losses.chain(losses.chain(_dis(0.3, 5.0)()), losses.kl(coefficient=0.1)),
        lambda t, whole: plus(_dis_oracle(0.3, 5.0)(t, whole), 0.1 * k3(REFERRED(t))),
        needs=(REFERENCE,),
        linear=False,
    ),
    "weighted_sum": Case(
        lambda: losses.weighted_sum(
            policy=(0.7, losses.chain(losses.current_over_proximal(), losses.clipped(0.2, 0.2))),
            tight=(0.3, _dis(0.1, 0.1)()),
        ),
        _summed,
        needs=(PROXIMAL,),
        adds_up=False,
        bites=True,
    ),
    "per_task": Case(
        lambda: losses.per_task(
            {
                "math": _dis(0.3, 0.5)(),
                "code": losses.chain(_behavior(), losses.clipped(0.2, 0.28)),
            },
            default=losses.chain(_behavior("geometric"), losses.importance_sampled()),
        ),
        _by_task,
        bites=True,
    ),
    "token_weights": Case(
        lambda: losses.chain(
            losses.token_weights(lambda scores: 1.0 + scores.lag.astype(np.float32)),
            losses.policy_gradient(),
        ),
        lambda t, whole: score_function(t, 1.0 + t.lag),
    ),
}


# --- recipes -------------------------------------------------------------------------------------


def _old_lagged(t: Tokens, whole: Whole) -> Out:
    return clip(t, r(t), 0.2, 0.28, kept=t.lag <= 2)


def _mopd(t: Tokens, whole: Whole) -> Out:
    """K2.5 with a teacher for mathematics, another one for code, and rewards for the rest."""
    teacher = {task_id("math"): t.expert, task_id("code"): t.coder}.get(t.tasks[0])
    if teacher is None:
        return published.k2_5(t, whole)
    advantages = cut(teacher - sg(t.current), -5.0, 5.0)
    return published.k2_5(Tokens(**vars(t) | {"advantages": advantages}), whole)


def _recipe(build: Callable[[], Loss], oracle: Oracle, *needs: str, **flags: bool) -> Case:
    return Case(build, oracle, needs, **flags)


OLD = PROXIMAL
RECIPES: Mapping[str, Case] = {
    "ppo": _recipe(recipes.ppo, published.ppo, OLD, bites=True),
    "grpo": _recipe(recipes.grpo, published.grpo, OLD, REFERENCE, linear=False),
    "grpo: without a reference": _recipe(
        lambda: recipes.grpo(beta=0.0), published.ppo, OLD, bites=True
    ),
    "dual_clip": _recipe(recipes.dual_clip, published.dual_clip, OLD, bites=True),
    "dapo": _recipe(recipes.dapo, published.dapo, OLD, bites=True),
    "dr_grpo": _recipe(recipes.dr_grpo, published.ppo, OLD, bites=True),
    "gspo": _recipe(recipes.gspo, published.gspo, OLD, bites=True),
    "gmpo": _recipe(recipes.gmpo, published.gmpo, OLD, bites=True),
    "cispo": _recipe(recipes.cispo, published.cispo, OLD),
    "tis": _recipe(recipes.tis, published.tis, OLD, bites=True),
    "mis": _recipe(recipes.mis, published.mis, OLD, bites=True),
    "mis: by sequence": _recipe(
        lambda: recipes.mis(level="sequence"), published.mis_by_sequence, OLD, bites=True
    ),
    "icepop": _recipe(recipes.icepop, published.icepop, OLD, bites=True),
    "dis": _recipe(recipes.dis, published.dis, bites=True),
    "k2_5": _recipe(recipes.k2_5, published.k2_5, OLD, linear=False),
    "k1_5": _recipe(recipes.k1_5, published.k1_5, OLD, linear=False),
    "dppo": _recipe(recipes.dppo, published.dppo, linear=False),
    "ipo": _recipe(recipes.ipo, published.ipo, linear=False),
    "aipo": _recipe(recipes.aipo, published.aipo),
    "decoupled_ppo": _recipe(recipes.decoupled_ppo, published.decoupled_ppo, OLD, bites=True),
    "decoupled_ppo: interpolated": _recipe(
        lambda: recipes.decoupled_ppo(interpolated=True), published.interpolated_ppo, bites=True
    ),
    "ppo_ewma": _recipe(recipes.ppo_ewma, published.ppo_ewma, EMA, bites=True),
    "m2po": _recipe(recipes.m2po, published.m2po, bites=True),
    "sapo": _recipe(recipes.sapo, published.sapo, OLD),
    "opsm": _recipe(recipes.opsm, published.opsm, OLD, bites=True),
    "dro": _recipe(recipes.dro, published.dro, OLD, linear=False),
    "opd": _recipe(lambda: recipes.opd("expert"), published.opd, EXPERT, linear=False),
    "mopd": _recipe(
        lambda: recipes.mopd(("math", "code"), ("expert", "coder")),
        _mopd,
        *(OLD, EXPERT, CODER),
        linear=False,
    ),
    "supervised": _recipe(recipes.supervised, published.supervised, linear=False),
    "critic": _recipe(recipes.critic, published.critic, VALUE, linear=False),
    "masked_above": _recipe(
        lambda: losses.masked_above(recipes.dapo(), tau=2), _old_lagged, OLD, bites=True
    ),
}

CASES: Mapping[str, Case] = {
    **RATIOS,
    **MASKS,
    **OBJECTIVES,
    **PENALTIES,
    **COMBINATIONS,
    **RECIPES,
}
