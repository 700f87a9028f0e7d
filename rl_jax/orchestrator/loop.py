"""[H] Carries out what `decide` commands: rollouts as tasks, groups onto the queue."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator

from rl_jax.gateway.protocol import SamplerClient
from rl_jax.gateway.renderer import Renderer
from rl_jax.gateway.session import Session
from rl_jax.orchestrator.decide import decide
from rl_jax.orchestrator.rollout import RolloutLimits, run_rollout
from rl_jax.orchestrator.state import (
    Begin,
    Command,
    Discard,
    Event,
    Limits,
    RolloutDone,
    Settled,
    StartRollout,
    State,
    Submit,
)
from rl_jax.queues.base import Queue
from rl_jax.tasks.base import Prompt, Task
from rl_jax.trajectories.types import NOT_SAMPLED, Group, RolloutKey, Status, Trajectory


class Orchestrator:
    """Rollouts of one task, from prompts to complete groups on the queue. `run` is its loop."""

    def __init__(
        self,
        task: Task,
        prompts: Iterator[int],
        sampler: SamplerClient,
        renderer: Renderer,
        queue: Queue,
        limits: Limits,
        rollout_limits: RolloutLimits,
        *,
        put_timeout: float,
        on_rollout: Callable[[Trajectory], Awaitable[None]],
        on_discard: Callable[[Discard], Awaitable[None]],
    ) -> None:
        self.state = State(limits, task.name)
        self._task, self._sampler, self._renderer = task, sampler, renderer
        self._queue, self._rollout_limits, self._put_timeout = queue, rollout_limits, put_timeout
        self._on_rollout, self._on_discard = on_rollout, on_discard
        self._indices = prompts
        self._prompts: dict[int, Prompt] = {}
        self._sessions: dict[int, list[Session]] = defaultdict(list)
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def settled(self, groups: int) -> None:
        """`groups` submitted groups were trained or dropped; room for as many new ones."""
        self._events.put_nowait(Settled(groups))

    def oldest_in_flight(self) -> Iterator[int]:
        """For each group under way with a sampled token: the oldest version of one."""
        for sessions in self._sessions.values():
            versions = [s.oldest_version for s in sessions if s.oldest_version != NOT_SAMPLED]
            if versions:
                yield min(versions)

    async def run(self) -> None:
        """Until cancelled. A fault of a program ends it, the failure of an environment does not."""
        async with asyncio.TaskGroup() as rollouts:
            self._events.put_nowait(Begin())
            while True:
                self.state, commands = decide(self.state, await self._events.get())
                for command in commands:
                    await self._perform(command, rollouts)

    async def _perform(self, command: Command, rollouts: asyncio.TaskGroup) -> None:
        match command:
            case StartRollout(key):
                if key.prompt not in self._prompts:
                    self._prompts[key.prompt] = self._task.prompt(next(self._indices))
                rollouts.create_task(self._rollout(key))
            case Submit(group):
                self._forget(group.prompt)
                rollouts.create_task(self._put(group))
            case Discard() as discard:
                self._forget(discard.prompt)
                await self._on_discard(discard)

    async def _put(self, group: Group) -> None:
        await self._queue.put(group, timeout=self._put_timeout)

    def _forget(self, prompt: int) -> None:
        del self._prompts[prompt]
        self._sessions.pop(prompt, None)
        self._queue.reconsider()

    async def _rollout(self, key: RolloutKey) -> None:
        trajectory = await run_rollout(
            self._task,
            self._prompts[key.prompt],
            key,
            self._sampler,
            self._renderer,
            self._rollout_limits,
            lambda key, session: self._sessions[key.prompt].append(session),
        )
        await self._on_rollout(trajectory)
        self._events.put_nowait(RolloutDone(trajectory))


async def evaluate(
    task: Task,
    indices: range,
    sampler: SamplerClient,
    renderer: Renderer,
    limits: RolloutLimits,
    *,
    at_once: int,
    on_done: Callable[[Trajectory], object] = lambda trajectory: None,
) -> list[tuple[Prompt, Trajectory]]:
    """One rollout of each prompt, at most `at_once` under way; in order of `indices`.

    Environment failures are kept, with their status: the caller decides what a rate is over.
    """
    room = asyncio.Semaphore(at_once)

    async def one(index: int) -> tuple[Prompt, Trajectory]:
        async with room:
            prompt, key = task.prompt(index), RolloutKey(task.name, index, 0)
            done = await run_rollout(task, prompt, key, sampler, renderer, limits)
            on_done(done)
            return prompt, done

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(index)) for index in indices]
    return [t.result() for t in tasks]


def solve_rate(done: list[Trajectory]) -> float:
    """Mean reward of the rollouts that the environment did not break; 0 where there is none."""
    rewards = [t.reward for t in done if t.status is not Status.FAILED and t.reward is not None]
    return sum(rewards) / len(rewards) if rewards else 0.0
