"""[N] `decide(state, event) -> (state, commands)`: the orchestrator without input and output.

It starts groups as the limits allow, collects their rollouts and assembles them. Pacing is in
groups, counted until the trainer is done with them: that is what bounds how far samplers run ahead.
"""

from dataclasses import replace

import numpy as np

from rl_jax.orchestrator.state import (
    Begin,
    Cancel,
    Command,
    Discard,
    Dropped,
    Event,
    OpenGroup,
    Published,
    RolloutDone,
    RolloutLost,
    Settled,
    StartRollout,
    State,
    Submit,
    Wake,
    Woken,
)
from rl_jax.trajectories.groups import assemble
from rl_jax.trajectories.types import RolloutKey, Status, Trajectory

ATTEMPTS = 5
"""Of one rollout, where samplers go away under it."""
LONGEST_PAUSE_S, MOST_DOUBLINGS = 60.0, 30

Step = tuple[State, list[Command]]


def decide(state: State, event: Event) -> Step:
    """Applies one event, then fills what it made room for."""
    state, commands = _apply(state, event)
    return _fill(state, commands)


def lost_for_good(key: RolloutKey) -> Trajectory:
    """What becomes of a rollout whose samplers went away `ATTEMPTS` times: a failed one, empty."""
    return Trajectory(
        key=key,
        tokens=np.zeros(0, np.int32),
        loss_mask=np.zeros(0, np.bool_),
        behavior_logprobs=np.zeros(0, np.float32),
        versions=np.zeros(0, np.int32),
        segments=(),
        temperature=1.0,
        reward=None,
        status=Status.FAILED,
        reason=f"sampler lost {ATTEMPTS} times",
    )


def may_start(state: State) -> bool:
    """Whether one more group fits all limits.

    The pace: with G groups an update, K updates a push and v the oldest start version of an
    unsettled group, at most G K (v + tau + 1) groups may have been started and not given up.
    Nothing gets stale: even if that group is trained on last of all, its update is at most number
    K (v + tau + 1), and before that no version above v + tau is published. Nothing gets stuck:
    trained groups are a multiple of G, so while fewer than G are left the bound can hold back the
    next one only where none is left, but then v is the published version, and fewer than
    G K (v + 1) were trained.
    """
    limits = state.limits
    fits = (
        state.outstanding < limits.outstanding
        and state.running + limits.group_size <= limits.in_flight
        and not state.paused
    )
    if not fits or limits.pace is None:
        return fits
    oldest = min(state.unsettled.values(), default=state.published)
    batches = limits.pace.push_every * (oldest + limits.pace.tau + 1)
    return state.trained + state.outstanding < limits.groups_per_update * batches


def _apply(state: State, event: Event) -> Step:
    match event:
        case Begin():
            return state, []
        case Published(version):
            return replace(state, published=version), []
        case Woken():
            return replace(state, paused=False), []
        case Dropped(prompt):
            return _without(state, prompt), []
        case Settled(prompts):
            return _settle(state, prompts)
        case RolloutDone(trajectory):
            return _collect(state, trajectory)
        case RolloutLost(key):
            return _reissue(state, key)


def _settle(state: State, prompts: tuple[int, ...]) -> Step:
    # A batch may be told of twice, to an orchestrator that took another's place.
    known = len(state.unsettled.keys() & set(prompts))
    state = replace(_without(state, *prompts), trained=state.trained + known)
    if not known or not state.limits.over_sample:
        return state, []
    commands: list[Command] = []
    for prompt, group in state.open.items():
        valid = tuple(t for t in group.done if t.valid)
        commands += [Cancel(prompt), Discard(state.task, prompt, "over-sampled", valid)]
        running = state.limits.group_size - len(group.done)
        state = replace(_without(state, prompt), running=state.running - running)
    return replace(state, open={}), commands


def _collect(state: State, trajectory: Trajectory) -> Step:
    prompt, size = trajectory.key.prompt, state.limits.group_size
    if prompt not in state.open:  # cancelled as it ended
        return state, []
    open_group = state.open[prompt]
    done = (*open_group.done, trajectory)
    state = replace(state, running=state.running - 1)
    if len(done) < size:
        return replace(state, open={**state.open, prompt: replace(open_group, done=done)}), []
    state = replace(state, open={p: group for p, group in state.open.items() if p != prompt})
    group, reason = assemble(state.task, prompt, done, size)
    if group is not None:
        return replace(state, pauses=0), [Submit(group)]
    discard = Discard(state.task, prompt, reason, tuple(t for t in done if t.valid))
    return _pause(_without(state, prompt), [discard])


def _reissue(state: State, key: RolloutKey) -> Step:
    if key.prompt not in state.open:
        return state, []
    again = key._replace(attempt=key.attempt + 1)
    if again.attempt - state.open[key.prompt].attempt >= ATTEMPTS:
        return _collect(state, lost_for_good(key))
    return state, [StartRollout(again)]


def _pause(state: State, commands: list[Command]) -> Step:
    if state.paused or not state.limits.retry_pause_s:
        return state, commands
    seconds = min(state.limits.retry_pause_s * 2**state.pauses, LONGEST_PAUSE_S)
    pauses = min(state.pauses + 1, MOST_DOUBLINGS)
    return replace(state, paused=True, pauses=pauses), [*commands, Wake(seconds)]


def _without(state: State, *prompts: int) -> State:
    kept = {p: version for p, version in state.unsettled.items() if p not in prompts}
    return replace(state, unsettled=kept)


def _fill(state: State, commands: list[Command]) -> Step:
    while may_start(state):
        first, *rest = state.reissue or ((state.next_prompt, 0),)
        prompt, attempt = first
        commands += [
            StartRollout(RolloutKey(state.task, prompt, sample, attempt))
            for sample in range(state.limits.group_size)
        ]
        state = replace(
            state,
            reissue=tuple(rest),
            next_prompt=max(state.next_prompt, prompt + 1),
            running=state.running + state.limits.group_size,
            unsettled={**state.unsettled, prompt: state.published},
            open={**state.open, prompt: OpenGroup(attempt)},
        )
    return state, commands
