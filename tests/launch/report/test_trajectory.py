"""[N] Turns against the masks they come from, and which trajectories are picked."""

import math
from dataclasses import replace

import numpy as np
from hypothesis import given

from launch.report.trajectory import LEFT_OUT, Token, fate_text, name_of, outcome, picks, turns
from rl_jax.replay.events import BatchTaken
from rl_jax.replay.fates import Fate, Kind
from rl_jax.trajectories.types import NOT_SAMPLED, RolloutKey, Status
from tests.launch.report.test_numbers import row
from tests.trajectories.build import steady, trajectories, trajectory


def spell(ids):
    return "".join(f"<{i}>" for i in ids)


def masked(mask: str):
    """A trajectory of tokens 0, 1, 2, ... where `mask` has a 1 for a sampled one."""
    sampled = np.array([c == "1" for c in mask])
    n = len(mask)
    return replace(
        trajectory(versions=(0,) * (n - 1)),
        loss_mask=sampled,
        versions=np.where(sampled, 5, NOT_SAMPLED).astype(np.int32),
        behavior_logprobs=np.where(sampled, -0.25, 0).astype(np.float32),
    )


def test_turns_part_where_the_speaker_changes():
    got = turns(masked("0011101"), spell)
    assert [(t.speaker, t.start, t.text) for t in got] == [
        ("prompt", 0, "<0><1>"),
        ("policy", 2, "<2><3><4>"),
        ("environment", 5, "<5>"),
        ("policy", 6, "<6>"),
    ]
    assert got[1].tokens[0] == Token(2, "<2>", 5, -0.25)
    assert got[2].tokens[0] == Token(5, "<5>", NOT_SAMPLED, 0.0)


def test_the_middle_of_a_long_one_is_left_out():
    got = turns(masked("00111" + "0" * 10 + "1011"), spell, limit=6)
    assert [(t.speaker, t.start, t.text) for t in got] == [
        ("prompt", 0, "<0><1>"),
        ("policy", 2, "<2><3>"),
        (LEFT_OUT, 4, "13 tokens left out"),
        ("policy", 17, "<17><18>"),
    ]
    assert len(turns(masked("0011"), spell, limit=4)) == 2


@steady
@given(trajectories())
def test_turns_hold_every_token_once(t):
    told = turns(t, spell)
    tokens = [token for turn in told for token in turn.tokens]
    assert [token.id for token in tokens] == t.tokens.tolist()
    assert [token.version for token in tokens] == t.versions.tolist()
    assert [token.version != NOT_SAMPLED for token in tokens] == t.loss_mask.tolist()
    np.testing.assert_array_equal([token.logprob for token in tokens], t.behavior_logprobs)
    assert [turn.start for turn in told] == [
        sum(len(x.tokens) for x in told[:i]) for i in range(len(told))
    ]


def test_grades_fall_with_probability():
    grades = [Token(0, "", 0, math.log(p)).grade for p in (1.0, 0.9, 0.5, 0.2, 0.05, 0.01)]
    assert grades == [0, 1, 2, 3, 4, 5]
    assert Token(0, "", NOT_SAMPLED, 0.0).grade == -1


def test_names_outcomes_and_fates_in_words():
    assert name_of(RolloutKey("lookup", 3, 1)) == "lookup/3/1"
    assert name_of(RolloutKey("lookup", 3, 1, 2)) == "lookup/3/1/2"
    cut = replace(trajectory(reward=0.5), status=Status.TRUNCATED, reason="turn limit")
    assert outcome(cut) == "truncated (turn limit), reward 0.5"
    assert outcome(trajectory(reward=None, reason="gone")) == "failed (gone), no reward"
    assert fate_text(Fate(Kind.TRAINED, 4)) == "trained in update 4"
    assert fate_text(Fate(Kind.DROPPED, reason="old")) == "dropped: old"
    assert fate_text(Fate(Kind.EVALUATED, 2)) == "evaluated under version 2"
    assert fate_text(Fate(Kind.OPEN)) == "no fate yet"


def test_picks_show_the_variety_each_once():
    def own(sample, fate, reward=1.0, length=10, versions=None):
        made = row(fate, length, versions or {2: 5}, reward=reward)
        return made._replace(key=RolloutKey("t", 0, sample))

    rows = [
        own(0, Fate(Kind.TRAINED, 1)),
        own(1, Fate(Kind.TRAINED, 1), reward=0.0),
        own(2, Fate(Kind.TRAINED, 2), length=99),
        own(3, Fate(Kind.TRAINED, 2), versions={0: 1, 1: 1}),
        own(4, Fate(Kind.TRAINED, 2), versions={1: 1, 2: 1, 3: 1}),
        own(5, Fate(Kind.TRAINED, 3), reward=0.0),
        own(6, Fate(Kind.TRAINED, 3)),
        own(7, Fate(Kind.DROPPED, reason="old")),
        own(8, Fate(Kind.FAILED, reason="gone"), reward=None),
        own(9, Fate(Kind.EVALUATED, 0), reward=0.0),
    ]
    batches = [BatchTaken(step, 3, ()) for step in (1, 2, 3)]
    got = {p.row.key.sample: p.why for p in picks(rows, batches)}
    assert got == {
        6: "solved, among the last trained on",
        5: "not solved, among the last trained on",
        0: "solved, among the first trained on",
        1: "not solved, among the first trained on",
        4: "tokens of most versions",
        3: "oldest when trained on",
        2: "longest trained on",
        7: "dropped at the queue",
        8: "the environment broke",
        9: "held out, not solved",
    }
    assert picks([], []) == []
