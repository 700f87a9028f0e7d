"""The lookup questions: splits, balance, determinism, and what a guesser gets."""

import hashlib
import os
import subprocess
import sys
from collections import Counter, defaultdict
from itertools import permutations

import pytest

from rl_jax.tasks.lookup.data import load_world
from rl_jax.tasks.lookup.questions import (
    HELDOUT_PER_HOPS,
    HOPS,
    Question,
    build_questions,
    enumerate_questions,
    is_heldout,
    train_question,
)
from rl_jax.tasks.lookup.world import lookup

WORLD = load_world()
QUESTIONS = build_questions(WORLD)
TRAIN = [train_question(QUESTIONS, 0, index) for index in range(12_000)]

DIGEST_SCRIPT = """
import hashlib
from rl_jax.tasks.lookup.data import load_world
from rl_jax.tasks.lookup.questions import build_questions, train_question
questions = build_questions(load_world())
asked = [*questions.heldout, *(train_question(questions, 7, index) for index in range(600))]
text = "\\n".join(f"{question.text} {question.answer}" for question in asked)
print(hashlib.sha256(text.encode()).hexdigest()[:16])
"""


def test_every_answer_follows_from_the_relations():
    for question in [*QUESTIONS.heldout, *TRAIN[:600]]:
        entity, passed = question.start, [question.start]
        for relation, expected in zip(question.relations, question.path, strict=True):
            assert lookup(WORLD, relation, entity) == expected
            entity = expected
            passed.append(entity)
        assert question.answer == entity
        assert len(set(passed)) == len(passed)
        assert len(set(question.relations)) == question.hops


@pytest.mark.parametrize("hops", [1, 2, 3])
def test_enumeration_misses_nothing(hops: int):
    expected = set()
    for start in WORLD.entities:
        for chain in permutations(WORLD.relations, hops):
            path = [start]
            for relation in chain:
                path.append(lookup(WORLD, relation, path[-1]) or "")
            if "" not in path and len(set(path)) == len(path):
                expected.add((start, chain))
    found = [(q.start, q.relations) for q in enumerate_questions(WORLD, hops)]
    assert len(found) == len(set(found)) and set(found) == expected


def test_splits_are_disjoint_and_together_everything():
    for hops in HOPS:
        train = {q.text for by in QUESTIONS.train[hops] for same in by for q in same}
        everything = {q.text: q for q in enumerate_questions(WORLD, hops)}
        assert not any(is_heldout(everything[text]) for text in train)
        assert train == {text for text, q in everything.items() if not is_heldout(q)}
    assert all(is_heldout(question) for question in QUESTIONS.heldout)
    assert not {q.text for q in TRAIN} & {q.text for q in QUESTIONS.heldout}


def test_balanced_over_hops_relations_and_answers():
    texts = [question.text for question in QUESTIONS.heldout]
    assert len(set(texts)) == len(texts) == HELDOUT_PER_HOPS * len(HOPS) >= 256
    assert Counter(q.hops for q in QUESTIONS.heldout) == dict.fromkeys(HOPS, HELDOUT_PER_HOPS)
    assert [q.hops for q in QUESTIONS.heldout[:12]] == [1, 2, 3, 4, 5, 6] * 2
    assert Counter(q.hops for q in TRAIN) == dict.fromkeys(HOPS, 2000)
    last = Counter(q.relations[-1] for q in TRAIN)
    assert all(abs(count / 1500 - 1) < 0.1 for count in last.values()) and len(last) == 8
    euros = [q for q in TRAIN if q.answer == "EUR"]
    assert len(euros) / last["currency"] < 0.05


def test_at_every_length_there_are_many_questions():
    assert [len({q.text for q in TRAIN if q.hops == hops}) > 370 for hops in HOPS] == [True] * 6


def test_guessing_hardly_ever_pays():
    """Five guessers: two know only the question's words, one has learned all training answers."""
    by_last: dict[str, Counter[str]] = defaultdict(Counter)
    by_start: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for question in TRAIN:
        by_last[question.relations[-1]][question.answer] += 1
        by_start[question.start, question.relations[-1]][question.answer] += 1

    def usual(question: Question) -> str:
        return by_last[question.relations[-1]].most_common(1)[0][0]

    def usual_from_start(question: Question) -> str:
        seen = by_start[question.start, question.relations[-1]]
        return seen.most_common(1)[0][0] if seen else usual(question)

    guessers = {
        "start": lambda q: q.start,
        "one hop short": lambda q: (q.start, *q.path)[-2],
        "last relation of the start": lambda q: (
            q.hops > 1 and lookup(WORLD, q.relations[-1], q.start)
        ),
        "usual answer of the last relation": usual,
        "usual answer of start and last relation": usual_from_start,
    }
    for name, guess in guessers.items():
        solved = [guess(question) == question.answer for question in QUESTIONS.heldout]
        assert sum(solved) / len(solved) < 0.05, name
    assert sum(usual(question) == question.answer for question in TRAIN) / len(TRAIN) < 0.05


def test_a_question_follows_from_seed_and_index_alone():
    again = build_questions(WORLD)
    assert [train_question(again, 0, index) for index in (5, 3, 11_999)] == [
        TRAIN[5],
        TRAIN[3],
        TRAIN[11_999],
    ]
    other = [train_question(QUESTIONS, 1, index) for index in range(600)]
    same = sum(a == b for a, b in zip(other, TRAIN, strict=False))
    assert same < 30


def test_questions_are_the_same_in_every_process():
    """Golden: a change of the packages' data or of the drawing shows here."""
    printed = [
        subprocess.run(
            [sys.executable, "-c", DIGEST_SCRIPT],
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("1", "2")
    ]
    asked = [*QUESTIONS.heldout, *(train_question(QUESTIONS, 7, index) for index in range(600))]
    text = "\n".join(f"{question.text} {question.answer}" for question in asked)
    here = hashlib.sha256(text.encode()).hexdigest()[:16]
    assert printed == [here, here]
    assert here == "bc8e5c9552c0d60f"
