"""[H] Carries out what `decide` commands: rollouts as tasks, groups onto the queue."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator

from rl_jax.gateway.protocol import SamplerClient, SamplerLost
from rl_jax.gateway.renderer import Renderer
from rl_jax.gateway.session import Session
from rl_jax.orchestrator.decide import ATTEMPTS, decide, lost_for_good
from rl_jax.orchestrator.rollout import RolloutLimits, run_rollout
from rl_jax.orchestrator.state import (
    Begin,
    Cancel,
    Command,
    Discard,
    Dropped,
    Event,
    Limits,
    Published,
    Resume,
    RolloutDone,
    RolloutLost,
    Settled,
    StartRollout,
    Submit,
    Wake,
    Woken,
    initial,
)
from rl_jax.queues.base import SharedQueue
from rl_jax.tasks.base import Prompt, Task
from rl_jax.trajectories.types import NOT_SAMPLED, Group, RolloutKey, Status, Trajectory


class Orchestrator:
    """Rollouts of one task, from prompts to complete groups on the queue. `run` is its loop.

    `prompts` is the task's endless order from its beginning, also where `resume` goes on in it.
    """

    def __init__(
        self,
        task: Task,
        prompts: Iterator[int],
        sampler: SamplerClient,
        renderer: Renderer,
        queue: SharedQueue,
        limits: Limits,
        rollout_limits: RolloutLimits,
        *,
        put_timeout: float,
        on_rollout: Callable[[Trajectory], Awaitable[None]],
        on_discard: Callable[[Discard], Awaitable[None]],
        on_started: Callable[[RolloutKey], object] = lambda key: None,
        on_lost: Callable[[RolloutKey, str], object] = lambda key, reason: None,
        resume: Resume | None = None,
    ) -> None:
        self.state = initial(limits, task.name, resume)
        self._task, self._sampler, self._renderer = task, sampler, renderer
        self._queue, self._rollout_limits, self._put_timeout = queue, rollout_limits, put_timeout
        self._on_rollout, self._on_discard = on_rollout, on_discard
        self._on_started, self._on_lost = on_started, on_lost
        self._indices = prompts
        again = {prompt for prompt, _ in self.state.reissue}
        passed = [(number, next(prompts)) for number in range(self.state.next_prompt)]
        self._prompts = {number: task.prompt(index) for number, index in passed if number in again}
        self._sessions: dict[int, dict[int, Session]] = defaultdict(dict)
        self._rollouts: dict[int, list[asyncio.Task[None]]] = defaultdict(list)
        self._whole: dict[RolloutKey, Trajectory] = {}
        self._events: asyncio.Queue[Event] = asyncio.Queue()

    def settled(self, prompts: Iterable[int]) -> None:
        """A batch of these groups was trained on; room for as many new ones."""
        self._events.put_nowait(Settled(tuple(prompts)))

    def dropped(self, prompt: int) -> None:
        """The queue dropped this group; room for a new one."""
        self._events.put_nowait(Dropped(prompt))

    def published(self, version: int) -> None:
        """Nothing that starts from now on is sampled under an older version."""
        self._events.put_nowait(Published(version))

    def oldest_in_flight(self) -> Iterator[int]:
        """For each group not on the queue yet with a sampled token: the oldest version of one."""
        for sessions in self._sessions.values():
            versions = [
                session.oldest_version
                for session in sessions.values()
                if session.oldest_version != NOT_SAMPLED
            ]
            if versions:
                yield min(versions)

    def left(self) -> list[Trajectory]:
        """Rollouts that ended well and whose group was neither put nor given up."""
        return list(self._whole.values())

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
                self._on_started(key)
                self._rollouts[key.prompt].append(rollouts.create_task(self._rollout(key)))
            case Submit(group):
                rollouts.create_task(self._put(group))
            case Cancel(prompt):
                for rollout in self._rollouts[prompt]:
                    rollout.cancel()
            case Discard() as discard:
                self._forget(discard.prompt)
                self._pass(discard.members)
                await self._on_discard(discard)
            case Wake(seconds):
                asyncio.get_running_loop().call_later(seconds, self._events.put_nowait, Woken())

    async def _put(self, group: Group) -> None:
        self._pass(group.members)
        await self._queue.put(group, timeout=self._put_timeout)
        self._forget(group.prompt)  # until here it was in flight: nobody could take it

    def _forget(self, prompt: int) -> None:
        del self._prompts[prompt], self._rollouts[prompt]
        self._sessions.pop(prompt, None)
        self._queue.reconsider()

    def _pass(self, members: Iterable[Trajectory]) -> None:
        """Others see to these from now on."""
        for member in members:
            self._whole.pop(member.key, None)

    async def _rollout(self, key: RolloutKey) -> None:
        def opened(key: RolloutKey, session: Session) -> None:
            self._sessions[key.prompt][key.sample] = session

        try:
            trajectory = await run_rollout(
                self._task,
                self._prompts[key.prompt],
                key,
                self._sampler,
                self._renderer,
                self._rollout_limits,
                opened,
            )
        except SamplerLost as error:
            self._sessions.get(key.prompt, {}).pop(key.sample, None)
            self._on_lost(key, str(error))
            self._events.put_nowait(RolloutLost(key))
            return
        if trajectory.valid:
            self._whole[key] = trajectory
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

    Environment failures are kept, with their status: the caller decides what a rate is over. A
    rollout whose sampler went away begins again.
    """
    room = asyncio.Semaphore(at_once)

    async def one(index: int) -> tuple[Prompt, Trajectory]:
        async with room:
            prompt, key = task.prompt(index), RolloutKey(task.name, index, 0)
            done = await _retried(task, prompt, key, sampler, renderer, limits)
            on_done(done)
            return prompt, done

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(index)) for index in indices]
    return [t.result() for t in tasks]


async def _retried(
    task: Task,
    prompt: Prompt,
    key: RolloutKey,
    sampler: SamplerClient,
    renderer: Renderer,
    limits: RolloutLimits,
) -> Trajectory:
    for attempt in range(ATTEMPTS):
        key = key._replace(attempt=attempt)
        try:
            return await run_rollout(task, prompt, key, sampler, renderer, limits)
        except SamplerLost:
            continue
    return lost_for_good(key)


def solve_rate(done: list[Trajectory]) -> float:
    """Mean reward of the rollouts that the environment did not break; 0 where there is none."""
    rewards = [t.reward for t in done if t.status is not Status.FAILED and t.reward is not None]
    return sum(rewards) / len(rewards) if rewards else 0.0
