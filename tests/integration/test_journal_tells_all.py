"""After a run its journal alone says what was trained, in which order, under which weights."""

import numpy as np
import pytest

from rl_jax.metrics import names
from rl_jax.metrics.writers import read
from rl_jax.replay import events
from rl_jax.trajectories.types import NOT_SAMPLED
from tests.fakes.runs import check_journal, config, trained_groups
from tests.integration.conftest import Start


@pytest.mark.parametrize("on_push", ["recompute", "drain"])
def test_a_run_ahead_of_its_trainer(start: Start, on_push: str) -> None:
    """Two updates a push, two batches ahead; both ways of taking new weights."""
    own = config(
        trainer={"updates": 6, "push_every": 2},
        rollout={"ahead": 2.0, "in_flight": 12},
        sampler={"on_push": on_push},
    )
    run = start(own)
    check_journal(run)
    assert [e.version for e in run.told(events.VersionPublished)] == [0, 1, 2, 3]
    assert [e.step for e in run.told(events.VersionPublished)] == [0, 2, 4, 6]

    # Membership is what was trained: the journal's tokens are the metrics' tokens.
    lines = read(run.path / "metrics.jsonl")
    taken = run.told(events.BatchTaken)
    total = 0
    for batch, groups, line in zip(taken, trained_groups(run), lines, strict=True):
        members = [m for g in groups for m in g.members if m.copy_of is None]
        tokens = sum(int(m.loss_mask.sum()) for m in members)
        lag = max(batch.published_version - m.oldest_version for m in members)
        total += tokens
        assert line[names.LAG_MAX] == lag
        assert line[names.TRAINED_TOKENS] == total
        assert line[names.IN_FLIGHT] <= 12 and line[names.QUEUE_DEPTH] <= 6
    assert max(line[names.SAMPLER_TOKENS_PER_SECOND] for line in lines) > 0
    assert run.summary.trained_tokens == total
    assert run.summary.versions_published == 3
    assert run.summary.max_dlogp_fresh is not None and run.summary.max_dlogp_fresh <= 1e-4

    if on_push == "drain":
        for group in (g for batch in trained_groups(run) for g in batch):
            for member in group.members:
                turns = np.split(member.versions, np.flatnonzero(np.diff(member.loss_mask)) + 1)
                assert all(len(set(t)) == 1 for t in turns if t[0] != NOT_SAMPLED)
