"""A tool service that is killed in the middle of a run: by SIGKILL, with calls in flight."""

import asyncio
from collections.abc import Callable, Iterator

import pytest

from rl_jax.replay import events
from rl_jax.tasks.base import ToolCall
from rl_jax.trajectories.types import RolloutKey
from tests.fakes.chatter import Chatter, chatter, family
from tests.fakes.runs import check_journal, config, trained_groups
from tests.fakes.tool_service import ToolService
from tests.integration.conftest import Start


@pytest.fixture
def make_service() -> Iterator[Callable[..., ToolService]]:
    made: list[ToolService] = []

    def make(**keywords: bool) -> ToolService:
        made.append(ToolService(**keywords))
        return made[-1]

    yield make
    for service in made:
        service.kill()


HELD = {RolloutKey("chatter", 2, 3), *(RolloutKey("chatter", 3, sample) for sample in range(4))}
"""Their calls are in flight when the service dies: one of group 2's four, all of group 3's."""


def task(service: ToolService) -> Chatter:
    """Every rollout opens with a call. The service dies once group 2 lacks the held one only."""
    left = {(2, 0), (2, 1), (2, 2)}

    async def opening(key: RolloutKey) -> None:
        await service.call("hold" if key in HELD else "hello")
        kill_when_due()

    async def tool(key: RolloutKey, call: ToolCall) -> str:
        return await service.call(f"hello {call.name}")

    async def closing(key: RolloutKey) -> None:
        left.discard((key.prompt, key.sample))
        kill_when_due()

    def kill_when_due() -> None:
        if not left and service.holding == len(HELD) and service.starts == 1:
            service.kill()

    return chatter(on_open=opening, on_call=tool, on_close=closing)


def test_the_run_goes_on_without_the_rollouts_that_the_dead_service_took(
    start: Start, make_service: Callable[..., ToolService]
) -> None:
    """Group 2 keeps three of four and is padded; group 3 is given up; others take its place."""
    service = make_service()
    own = config(trainer={"updates": 4}, rollout={"tool_deadline_s": 30.0})
    run = start(own, family(task(service)))
    check_journal(run)

    failed = run.failures()
    assert failed.keys() >= HELD
    assert all(failed[key].startswith("open: service died") for key in HELD)
    put = {name.prompt: group for name, (group, _) in run.groups().items()}
    assert put[2].failures == ((3, failed[RolloutKey("chatter", 2, 3)]),)
    members = [(m.key.sample, m.copy_of) for m in put[2].members]
    assert members == [(0, None), (1, None), (2, None), (0, 0)]
    assert 3 not in put
    assert any(n.startswith("group chatter 3 given up: 0 of 4 rollouts") for n in run.notes)

    batches = trained_groups(run)
    assert len(batches) == 4 and any(g.prompt == 2 for batch in batches for g in batch)
    assert max(g.prompt for batch in batches for g in batch) > 3
    assert service.starts == 2, "revived by the next call"


def test_a_service_that_stays_dead_ends_the_run_with_a_timeout(
    start: Start, make_service: Callable[..., ToolService]
) -> None:
    """No group is left whole, so the trainer says what it waited for instead of hanging."""
    service = make_service(revives=False)
    one_by_one = asyncio.Lock()

    async def opening(key: RolloutKey) -> None:
        async with one_by_one:
            await service.call("hello")
            service.kill()

    own = config(deadlines={"queue_get_s": 1.5})
    run = start(own, family(chatter(on_open=opening)), raises=TimeoutError)
    assert str(run.error) == "no 2 groups in 1.5 s: 0 of 4 queued, 0 not acked"
    assert run.told(events.BatchTaken) == []
    reasons = {*run.failures().values()}
    assert reasons and all(r.startswith("open: service ") for r in reasons)
