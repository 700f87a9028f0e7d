"""[P] Named losses: short chains of parts with their published defaults."""

from rl_jax.losses.combine import chain
from rl_jax.losses.objectives import cross_entropy, policy_gradient
from rl_jax.losses.ratios import current_over_behavior, two_sided_mask
from rl_jax.losses.reductions import token_mean
from rl_jax.losses.types import Loss


def dis(eps_low: float = 0.3, eps_high: float = 5.0) -> Loss:
    """Double-sided importance sampling: -sg(f(d) A) log p, f(d) = d inside the open band, else 0.

    GLM-5 (arXiv 2602.15763) eq. 3-5; the report gives no band, the defaults are those that SAO
    (arXiv 2607.07508), by the same authors, gives for mathematics.
    """
    parts = chain(current_over_behavior(), two_sided_mask(eps_low, eps_high), policy_gradient())
    return Loss(parts, token_mean)


def supervised() -> Loss:
    """Cross-entropy, mean over the demonstration's assistant tokens."""
    return Loss(chain(cross_entropy()), token_mean)
