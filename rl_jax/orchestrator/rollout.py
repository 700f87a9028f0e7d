"""[H] One rollout: the policy speaks, tools answer, a verifier scores the end.

A tool that fails or never answers ends the rollout as failed, with the reason, and so does a
request that the sampler gave up; every other exception is a fault of the program.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from rl_jax.gateway.protocol import Completion, Finish, RequestFailed, SamplerClient
from rl_jax.gateway.renderer import Renderer
from rl_jax.gateway.session import Session
from rl_jax.tasks.base import Episode, Message, Prompt, Task, TaskError, ToolCall
from rl_jax.trajectories.types import RolloutKey, Status, Trajectory


class RolloutLimits(NamedTuple):
    """Of one rollout; a limit that the policy runs into truncates, one of the environment fails."""

    temperature: float
    max_new_tokens: int
    """Per turn."""
    max_turns: int
    tool_deadline_s: float
    request_deadline_s: float
    training: bool = True


OnSession = Callable[[RolloutKey, Session], object]
"""Hears of every session that opens."""


async def run_rollout(
    task: Task,
    prompt: Prompt,
    key: RolloutKey,
    sampler: SamplerClient,
    renderer: Renderer,
    limits: RolloutLimits,
    on_session: OnSession = lambda key, session: None,
) -> Trajectory:
    """Runs one execution of `prompt` to its end.

    Raises SamplerLost where the sampler went away, and else only for faults of the program itself.
    """
    session = Session(
        sampler,
        key,
        temperature=limits.temperature,
        stop_ids=frozenset(renderer.stop_ids),
        training=limits.training,
    )
    async with session:
        on_session(key, session)
        try:
            async with asyncio.timeout(limits.tool_deadline_s):
                episode = await task.open(prompt, key)
        except (TaskError, TimeoutError) as error:
            return session.trajectory(Status.FAILED, None, reason=_reason("open", error, limits))
        try:
            ended = await _converse(session, episode, prompt, renderer, limits)
        finally:
            broken = await _close(episode, limits)
        if broken:
            return session.trajectory(Status.FAILED, None, reason=broken, turns=ended.turns)
        return ended


async def _close(episode: Episode, limits: RolloutLimits) -> str:
    """Why the episode could not be closed; empty where it was."""
    try:
        async with asyncio.timeout(limits.tool_deadline_s):
            await episode.close()
    except (TaskError, TimeoutError) as error:
        return _reason("close", error, limits)
    return ""


async def _converse(
    session: Session, episode: Episode, prompt: Prompt, renderer: Renderer, limits: RolloutLimits
) -> Trajectory:
    messages: list[Message] = list(prompt.messages)
    session.append(renderer.prompt(messages))
    for turn in range(1, limits.max_turns + 1):
        try:
            completion = await _sample(session, limits)
        except RequestFailed as error:
            return session.trajectory(Status.FAILED, None, reason=str(error), turns=turn)
        if completion.finish is Finish.LENGTH:
            return session.trajectory(Status.TRUNCATED, 0.0, reason="token limit", turns=turn)
        messages.append(renderer.parse(completion.tokens))
        calls = messages[-1].get("tool_calls") or []
        try:
            if not calls:
                async with asyncio.timeout(limits.tool_deadline_s):
                    reward = await episode.score(messages)
                return session.trajectory(Status.COMPLETED, reward, turns=turn)
            if turn == limits.max_turns:
                # Nobody would read the answers, and the context may have no room for them.
                break
            new = [await _answer(episode, ToolCall(**call), limits) for call in calls]
        except (TaskError, TimeoutError) as error:
            what = calls[-1]["name"] if calls else "verifier"
            return session.trajectory(
                Status.FAILED, None, reason=_reason(what, error, limits), turns=turn
            )
        session.append(renderer.extend(messages, new, closed=True))
        messages += new
    return session.trajectory(Status.TRUNCATED, 0.0, reason="turn limit", turns=limits.max_turns)


async def _sample(session: Session, limits: RolloutLimits) -> Completion:
    try:
        async with asyncio.timeout(limits.request_deadline_s):
            return await session.generate(limits.max_new_tokens)
    except TimeoutError:
        seconds = limits.request_deadline_s
        raise TimeoutError(f"the sampler has not answered a request in {seconds:g} s") from None


async def _answer(episode: Episode, call: ToolCall, limits: RolloutLimits) -> Message:
    async with asyncio.timeout(limits.tool_deadline_s):
        return {"role": "tool", "content": await episode.call(call)}


def _reason(what: str, error: Exception, limits: RolloutLimits) -> str:
    if isinstance(error, TimeoutError) and not str(error):
        return f"{what}: no answer in {limits.tool_deadline_s:g} s"
    return f"{what}: {error}"
