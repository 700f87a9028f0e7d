"""A made-up run of 40 updates: what its record would hold, in memory and written to a directory.

Held together like a real one: groups are put, dropped for their age or trained on once, versions
are pushed every 4 updates, long trajectories span versions, some rollouts fail, some groups never
come to be, and two groups still wait at the end. Numbers follow from a fixed seed.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from rl_jax.config.load import resolved
from rl_jax.metrics import names
from rl_jax.metrics.trace import FOLDER, PUSH, STEP, SWAP, WAIT, TraceWriter
from rl_jax.metrics.writers import JsonlWriter
from rl_jax.replay import events
from rl_jax.replay.fates import Fate, Kind, Recorded
from rl_jax.replay.log import Clock, open_log
from rl_jax.replay.trajectory_log import open_trajectory_log
from rl_jax.trajectories.types import (
    NOT_SAMPLED,
    Group,
    Origin,
    RolloutKey,
    Segment,
    Status,
    Trajectory,
    copy_of,
)
from tests.fakes.runs import config

BROKEN = "tool: no answer after 5 s"
UPDATES, GROUPS, SIZE, PUSH_EVERY, TAU = 40, 4, 4, 4, 2
RELATIONS = "border bigger hub north east country smaller currency capital west".split()
LOOKUP = Path(__file__).parents[2] / "rl_jax" / "tasks" / "lookup"
TOKENIZER: Tokenizer = Tokenizer.from_file(str(LOOKUP / "tokenizer.json"))


def decode(ids: Sequence[int]) -> str:
    return TOKENIZER.decode(list(ids), skip_special_tokens=False)


def hops(prompt: int) -> int:
    return prompt % 6 + 1


def label(trajectory: Trajectory) -> str:
    return f"hops={hops(trajectory.key.prompt)}"


@dataclass
class MadeRun:
    told: list[tuple[str, events.Event]] = field(default_factory=list)
    """(program, event) in the order of the run."""
    puts: list[tuple[Group, Fate]] = field(default_factory=list)
    added: list[tuple[tuple[Trajectory, ...], Fate]] = field(default_factory=list)
    """By the orchestrator."""
    lines: list[dict[str, Any]] = field(default_factory=list)
    spans: list[tuple[str, str, str, float, float, dict[str, Any]]] = field(default_factory=list)

    @property
    def events(self) -> list[events.Event]:
        return [event for _, event in self.told]

    @property
    def recorded(self) -> list[Recorded]:
        own = [Recorded(m, fate, "trainer") for group, fate in self.puts for m in group.members]
        return own + [Recorded(t, f, "orchestrator") for ts, f in self.added for t in ts]


def made_trajectory(
    rng: np.random.Generator, key: RolloutKey, version: int, skill: float, *, task_hops: int
) -> Trajectory:
    """One conversation with a tool call a hop, sampled under `version` and, if long, the next."""
    solved = rng.random() < skill ** (0.35 * task_hops)
    made = task_hops if solved else int(rng.integers(1, task_hops + 1))
    relations = " ".join(rng.choice(RELATIONS, task_hops, replace=False))
    parts = [(f"<|user|> IE {relations}<|assistant|>", False)]
    for hop in range(made):
        parts += [(f" look IE {RELATIONS[hop]}<|call|>", True), ("<|tool|> GB<|assistant|>", False)]
    parts += [(" GB<|end|>" if solved else " IE<|end|>", True)]
    ids = [TOKENIZER.encode(text, add_special_tokens=False).ids for text, _ in parts]
    mask = np.repeat([sampled for _, sampled in parts], [len(i) for i in ids])
    tokens = np.array([i for part in ids for i in part], np.int32)
    swap = int(rng.integers(24, 60))
    versions = np.where(np.arange(len(tokens)) < swap, version, version + 1)
    logprobs = -rng.exponential(0.25 if solved else 0.6, len(tokens))
    cut = min(swap, len(tokens))
    segments = [Segment(0, cut, version, Origin.PREFILL)]
    if cut < len(tokens):
        segments.append(Segment(cut, len(tokens), version + 1, Origin.RECOMPUTE))
    truncated = not solved and rng.random() < 0.15
    return Trajectory(
        key=key,
        tokens=tokens,
        loss_mask=mask,
        behavior_logprobs=np.where(mask, logprobs, 0).astype(np.float32),
        versions=np.where(mask, versions, NOT_SAMPLED).astype(np.int32),
        segments=tuple(segments),
        temperature=0.7,
        reward=float(solved),
        status=Status.TRUNCATED if truncated else Status.COMPLETED,
        reason="turn limit of 10" if truncated else "",
        turns=made + 1,
    )


def made_run(*, ended: str | None = "finished") -> MadeRun:
    """`ended` is the reason of the run's end; None: it was killed."""
    making = _Making()
    run = making.run
    run.told.append(("trainer", events.RunStarted(7, "cpu, 2 threads", 0)))
    making.publish(0)
    making.evaluate("before", 0.62)
    for update in range(1, UPDATES + 1):
        making.update(update, 0.62 + 0.33 * update / UPDATES)
    for _ in range(2):
        waiting = making.group(0.95)
        if waiting is not None:
            run.puts.append((waiting, Fate(Kind.OPEN)))
    if ended is not None:
        making.evaluate("after", 0.93)
        run.told.append(("trainer", events.RunEnded(ended)))
    return run


class _Making:
    """A run so far."""

    def __init__(self) -> None:
        self.run = MadeRun()
        self.rng = np.random.default_rng(7)
        self.clock, self.version, self.prompt = 60.0, 0, 0
        self.tokens = self.dropped = self.failed = 0

    def publish(self, update: int) -> None:
        run, version, clock = self.run, self.version, self.clock
        run.spans.append(("trainer", "cpu:0", PUSH, clock - 0.2, clock, {"version": version}))
        digest = f"{version:02d}c0ffee" * 8
        run.told.append(("trainer", events.VersionPublished(version, digest, update)))
        applied = (clock + 0.3, clock + 0.34, {"version": version})
        run.spans.append(("sampler", "cpu:1", SWAP, *applied))
        run.told.append(("sampler", events.VersionApplied(version, 0.04)))

    def evaluate(self, when: str, skill: float) -> None:
        asked = []
        for prompt in range(48):
            key = RolloutKey("heldout", prompt, 0)
            asked.append(self.trajectory(key, self.version, skill))
        self.run.added.append((tuple(asked), Fate(Kind.EVALUATED, self.version)))
        rates = {"all": float(np.mean([t.reward for t in asked]))}
        for n in range(1, 7):
            own = [t.reward for t in asked if hops(t.key.prompt) == n]
            rates[f"hops={n}"] = float(np.mean(own))
        told = events.Evaluated(when, self.version, rates)
        self.run.told.append(("orchestrator", told))

    def trajectory(self, key: RolloutKey, version: int, skill: float) -> Trajectory:
        made = made_trajectory(self.rng, key, version, skill, task_hops=hops(key.prompt))
        segments = (s._replace(version=min(s.version, self.version)) for s in made.segments)
        versions = np.minimum(made.versions, self.version)
        return replace(made, versions=versions, segments=tuple(segments))

    def group(self, skill: float) -> Group | None:
        """The next group, put; None where too many of its rollouts failed. Long ones are older."""
        self.prompt += 1
        age = int(self.rng.choice([0, 0, 0, 1, 1, 2]))
        age += 2 * (hops(self.prompt) > 4 and self.rng.random() < 0.4)
        keys = [RolloutKey("lookup", self.prompt, sample) for sample in range(SIZE)]
        members = [self.trajectory(key, max(self.version - age, 0), skill) for key in keys]
        luck = self.rng.random()
        broken = SIZE - 1 if luck < 0.06 else int(luck < 0.12)
        if broken:
            self.fail(members[-broken:])
        if broken > 1:
            self.discard(members[0])
            return None
        if broken:
            members[-1] = copy_of(members[0])
        group = Group("lookup", self.prompt, tuple(members))
        put = events.GroupPut(events.group_id(group), group.oldest_version, group.sampled_tokens)
        self.run.told.append(("trainer", put))
        return group

    def fail(self, members: Sequence[Trajectory]) -> None:
        gone = {"reward": None, "status": Status.FAILED, "reason": BROKEN}
        failed = tuple(replace(member, **gone) for member in members)
        self.run.added.append((failed, Fate(Kind.FAILED, reason=BROKEN)))
        self.failed += len(failed)

    def discard(self, member: Trajectory) -> None:
        reason = f"1 of {SIZE} rollouts valid: {BROKEN}"
        self.run.added.append(((member,), Fate(Kind.DISCARDED, reason=reason)))
        name = events.GroupId("lookup", self.prompt)
        self.run.told.append(("orchestrator", events.GroupDiscarded(name, reason)))

    def batch(self, update: int, skill: float) -> list[Group]:
        batch: list[Group] = []
        while len(batch) < GROUPS:
            group = self.group(skill)
            if group is None:
                continue
            age = self.version - group.oldest_version
            fate = Fate(Kind.TRAINED, update)
            if age > TAU:
                fate = Fate(Kind.DROPPED, reason=f"{age} pushes old")
                dropped = events.GroupDropped(events.group_id(group), fate.reason)
                self.run.told.append(("trainer", dropped))
                self.dropped += SIZE
            else:
                batch.append(group)
            self.run.puts.append((group, fate))
        return batch

    def update(self, update: int, skill: float) -> None:
        run, rng = self.run, self.rng
        batch = self.batch(update, skill)
        ids = tuple(events.group_id(group) for group in batch)
        run.told.append(("trainer", events.BatchTaken(update, self.version, ids)))
        own = [m for group in batch for m in group.members if m.copy_of is None]
        lags = np.concatenate([self.version - m.versions[m.loss_mask] for m in own])
        self.tokens += sum(group.sampled_tokens for group in batch)

        wait, step = float(rng.exponential(0.5)), 1.6 + 0.1 * float(rng.random())
        push = 0.0 if update % PUSH_EVERY else 0.2
        busy = 0.3 + 0.5 * float(rng.random())
        for name, seconds in ((WAIT, wait), (STEP, step)):
            end = self.clock + seconds
            run.spans.append(("trainer", "cpu:0", name, self.clock, end, {"update": update}))
            self.clock = end
        for start in self.clock - step + np.arange(3) * step / 3:
            run.spans.append(
                ("sampler", "cpu:1", "decode", float(start), float(start + busy * step / 3), {})
            )
        run.told.append(("trainer", events.UpdateDone(update, 0.1, 0.4)))
        if push:
            self.clock += push
            self.version += 1
            self.publish(update)

        fresh = {names.DLOGP_FRESH: 1e-6 * (3 + float(rng.random()))}
        lag = float(lags.mean())
        run.lines.append(
            {
                names.STEP: update, names.POLICY_VERSION: self.version,
                names.WALL_SECONDS: self.clock,
                names.REWARD: float(np.mean([m.reward for m in own])),
                names.LAG_MEAN: lag, names.LAG_MAX: int(lags.max()),
                names.MASKED_SHARE: 0.002 + 0.01 * lag * float(rng.random()),
                names.ESS_SHARE: 1 - 0.05 * lag - 0.02 * float(rng.random()),
                names.TRAINED_TOKENS: self.tokens, names.DROPPED: self.dropped,
                names.FAILED: self.failed, names.QUEUE_DEPTH: int(rng.integers(0, 9)),
                names.SAMPLER_TOKENS_PER_SECOND: 500 + 200 * float(rng.random()),
                names.TRAINER_BUSY_SHARE: step / (wait + step + push),
                names.SAMPLER_BUSY_SHARE: busy,
                names.WAIT_SECONDS: wait, names.STEP_SECONDS: step, names.PUSH_SECONDS: push,
            } | (fresh if update % PUSH_EVERY == 1 else {})
        )  # fmt: skip


def write_run(run_dir: Path, made: MadeRun, *, settle: bool = True) -> Path:
    """Leaves `made` in `run_dir` as the programs of a run would; without `settle`, as if they had
    been killed before the trajectory log learnt of any group's fate."""
    run_dir.mkdir(parents=True)
    own = config(staleness={"tau": TAU}, trainer={"updates": UPDATES, "push_every": PUSH_EVERY})
    (run_dir / "config.toml").write_text(f"# resolved from made.toml\n{resolved(own)}")

    async def record() -> None:
        clock = Clock()
        logs = {name: open_log(run_dir, name, clock) for name in {p for p, _ in made.told}}
        # In line together: they share what it takes to bring them to the disk.
        await asyncio.gather(*(logs[program].append(event) for program, event in made.told))
        for log in logs.values():
            await log.close()
        trained = open_trajectory_log(run_dir, "trainer")
        for some in batched(made.puts, 50):
            await asyncio.gather(*(trained.put(group) for group, _ in some))
            for group, fate in some:
                if settle and fate.kind is not Kind.OPEN:
                    trained.settle(events.group_id(group), fate)
            if len(some) == 50:
                await trained.rotate()
        await trained.close()
        other = open_trajectory_log(run_dir, "orchestrator")
        await asyncio.gather(*(other.add(*one) for one in made.added))
        await other.close()

    asyncio.run(record())
    with JsonlWriter(run_dir / "metrics.jsonl") as writer:
        for line in made.lines:
            writer.write(
                line[names.STEP], line[names.POLICY_VERSION], line[names.WALL_SECONDS], line
            )
    (run_dir / FOLDER).mkdir()
    for program in ("trainer", "sampler"):
        with TraceWriter(run_dir / FOLDER / f"{program}.json", program) as trace:
            for process, track, name, start, end, more in made.spans:
                if process == program:
                    trace.span(track, name, start, end, **more)
    return run_dir
