"""[P] Named losses: short chains of parts with their published defaults."""

from rl_jax.losses.combine import chain
from rl_jax.losses.objectives import cross_entropy, policy_gradient
from rl_jax.losses.ratios import current_over_behavior, mask_stale, two_sided_mask, weight_moments
from rl_jax.losses.reductions import token_mean
from rl_jax.losses.types import Loss


def dis(eps_low: float = 0.3, eps_high: float = 5.0, *, mask_above: int | None = None) -> Loss:
    """Double-sided importance sampling: -sg(f(d) A) log p, f(d) = d inside the open band, else 0.

    `mask_above`: f = 0 for tokens of a larger lag too. GLM-5 (arXiv 2602.15763) eq. 3-5; the report
    gives no band, the defaults are those that SAO (arXiv 2607.07508), by the same authors, gives
    for mathematics.
    """
    masks = [two_sided_mask(eps_low, eps_high)]
    if mask_above is not None:
        masks.append(mask_stale(mask_above))
    parts = chain(current_over_behavior(), *masks, weight_moments(), policy_gradient())
    return Loss(parts, token_mean)


def supervised() -> Loss:
    """Cross-entropy, mean over the demonstration's assistant tokens."""
    return Loss(chain(cross_entropy()), token_mean)
