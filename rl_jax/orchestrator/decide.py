"""[N] `decide(state, event) -> (state, commands)`: the orchestrator without input and output.

It starts groups as the limits allow, collects their rollouts and assembles them. Pacing is in
groups, counted until the trainer is done with them: that is what bounds how far samplers run ahead.
"""

from dataclasses import replace

from rl_jax.orchestrator.state import (
    Begin,
    Command,
    Discard,
    Event,
    OpenGroup,
    RolloutDone,
    Settled,
    StartRollout,
    State,
    Submit,
)
from rl_jax.trajectories.groups import assemble
from rl_jax.trajectories.types import RolloutKey, Trajectory


def decide(state: State, event: Event) -> tuple[State, list[Command]]:
    """Applies one event, then fills what it made room for."""
    commands: list[Command] = []
    match event:
        case Begin():
            pass
        case Settled(groups):
            state = replace(state, outstanding=state.outstanding - groups)
        case RolloutDone(trajectory):
            state, commands = _collect(state, trajectory)
    return _fill(state, commands)


def _collect(state: State, trajectory: Trajectory) -> tuple[State, list[Command]]:
    prompt = trajectory.key.prompt
    done = (*state.open[prompt].done, trajectory)
    state = replace(state, running=state.running - 1)
    if len(done) < state.limits.group_size:
        return replace(state, open={**state.open, prompt: OpenGroup(done)}), []
    rest = {number: group for number, group in state.open.items() if number != prompt}
    state = replace(state, open=rest)
    group, reason = assemble(state.task, prompt, done, state.limits.group_size)
    if group is not None:
        return state, [Submit(group)]
    state = replace(state, outstanding=state.outstanding - 1)
    return state, [Discard(state.task, prompt, reason, sum(t.valid for t in done))]


def _fill(state: State, commands: list[Command]) -> tuple[State, list[Command]]:
    limits = state.limits
    while (
        state.outstanding < limits.outstanding
        and state.running + limits.group_size <= limits.in_flight
    ):
        prompt = state.next_prompt
        commands += [
            StartRollout(RolloutKey(state.task, prompt, sample))
            for sample in range(limits.group_size)
        ]
        state = replace(
            state,
            next_prompt=prompt + 1,
            running=state.running + limits.group_size,
            outstanding=state.outstanding + 1,
            open={**state.open, prompt: OpenGroup()},
        )
    return state, commands
