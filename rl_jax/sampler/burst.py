"""[N] Decode steps that need no new plan, so that one visit of the mesh's thread makes them all.

Between two steps the loop of the engine would only hand a token back: for a small model that costs
as much as the step. The same rows go on, each from what it sampled, until one of them ends; what
may change the plan from outside is the engine's to look at.
"""

from collections.abc import Callable

import numpy as np

from rl_jax.sampler.sampling import Sampled
from rl_jax.sampler.scheduler import Plan
from rl_jax.sampler.step import StepInputs

MOST = 32
"""Steps of one burst. Pages are taken that far ahead: at most one more than a cache needs."""
SECONDS = 0.01
"""After which none is begun: a visit takes some 0.2 ms more than its steps."""


def longest(step: Plan, max_context: int) -> int:
    """Steps until a row has all the tokens it may get, at most MOST; 1 for what is no decode."""
    if step.width != 1:
        return 1
    left = [MOST]
    for sequence in step.rows:
        if sequence and sequence.running:
            running = sequence.running
            left.append(running.request.max_new_tokens - len(running.tokens))
            left.append(max_context - len(sequence.tokens))
    return max(min(left), 1)


class Burst:
    """At most `most` steps of `step`, the first with `inputs`, none begun after `deadline`; `now`
    is the clock."""

    def __init__(
        self, step: Plan, inputs: StepInputs, most: int, now: Callable[[], float], deadline: float
    ) -> None:
        self.inputs = inputs
        """Of the next step."""
        self._now, self._deadline, self._left = now, deadline, most
        self._live = np.asarray(step.counts) > 0
        self._stops = [
            (index, sequence.running.request.stop_ids)
            for index, sequence in enumerate(step.rows)
            if sequence and sequence.running and sequence.running.request.stop_ids
        ]

    def goes_on(self, sampled: Sampled) -> bool:
        """Takes what the last step sampled: whether another one follows it."""
        self._left -= 1
        tokens = sampled.tokens
        if self._left <= 0 or self._now() > self._deadline or not sampled.finite[self._live].all():
            return False
        if any(int(tokens[index]) in stops for index, stops in self._stops):
            return False
        self.inputs = self.inputs._replace(
            tokens=np.where(self._live, tokens, 0)[:, None].astype(np.int32),
            positions=self.inputs.positions + self._live,
        )
        return True
