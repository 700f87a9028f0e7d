"""[N] What a forecast says, whichever way it was made; and what a run is compared with."""

import math
from typing import NamedTuple


class Forecast(NamedTuple):
    """Lags are in pushes and taken when a batch is, as the metrics take them."""

    tokens_per_s: float
    """Sampled tokens trained."""
    trainer_idle: float
    """Share of the time in which the trainer's mesh does nothing."""
    sampler_idle: float
    """Share of the time in which a sampler's mesh does nothing."""
    lag_mean: float
    """Of a token."""
    lag_start: float
    """Of the version that a rollout started under, each rollout alike."""
    lag_start_by_tokens: float
    """The same, each token alike."""
    lag_p99: float
    """99th percentile of a rollout's start lag."""
    in_flight: float
    """Rollouts under way."""
    trainer_push_share: float
    """Share of the trainer's time that pushes take."""
    sampler_push_share: float
    """Share of a sampler's time that swaps and recomputed caches take."""
    dropped_share: float = 0.0
    """Of the finished groups, those that were too old."""

    @property
    def tau(self) -> int:
        """The smallest staleness bound that 99 of 100 rollouts keep."""
        return max(1, math.ceil(self.lag_p99 - 1e-9))
