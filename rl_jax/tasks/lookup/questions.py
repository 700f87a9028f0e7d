"""[N] Questions: a start entity and a chain of relations, 1 to 6 hops, for two disjoint splits.

In one question no relation occurs twice and no entity is passed twice, so the start, or an answer
given before the last hop, is never right. Draws are uniform over the last relation and over its
answers, so that a common answer (EUR) is asked for no more often than a rare one.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from rl_jax.tasks.base import Message
from rl_jax.tasks.lookup.world import World

HOPS = range(1, 7)
HELDOUT_PER_HOPS = 48
_HELDOUT_SHARE = 6
"""One in so many questions is kept out of training."""


class Question(NamedTuple):
    start: str
    relations: tuple[str, ...]
    path: tuple[str, ...]
    """The entity after each hop; the last is the answer."""

    @property
    def hops(self) -> int:
        return len(self.relations)

    @property
    def answer(self) -> str:
        return self.path[-1]

    @property
    def text(self) -> str:
        """What the user says, and the question's identity."""
        return " ".join((self.start, *self.relations))


Strata = tuple[tuple[tuple[Question, ...], ...], ...]
"""last relation -> answer -> questions."""


class Questions(NamedTuple):
    train: Mapping[int, Strata]
    """By number of hops."""
    heldout: tuple[Question, ...]
    """HELDOUT_PER_HOPS of each number of hops, the hops taking turns."""


def opening(question: Question) -> Message:
    """The message that asks `question`."""
    return {"role": "user", "content": question.text}


def hash_of(*parts: object) -> int:
    """64 bits that follow from the parts' text alone, the same in every process."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def is_heldout(question: Question) -> bool:
    """The split a question belongs to, by a hash of its whole text."""
    return hash_of("split", question.text) % _HELDOUT_SHARE == 0


def enumerate_questions(world: World, hops: int) -> Iterator[Question]:
    """Every question of this many hops, in the world's order."""

    def grow(relations: tuple[str, ...], passed: tuple[str, ...]) -> Iterator[Question]:
        if len(relations) == hops:
            yield Question(passed[0], relations, passed[1:])
            return
        for relation, table in world.relations.items():
            found = table.get(passed[-1])
            if found is not None and found not in passed and relation not in relations:
                yield from grow((*relations, relation), (*passed, found))

    for start in world.entities:
        yield from grow((), (start,))


def build_questions(world: World) -> Questions:
    """Both splits, the same always for the same world."""
    train, heldout = {}, {}
    for hops in HOPS:
        everything = list(enumerate_questions(world, hops))
        train[hops] = _stratify(q for q in everything if not is_heldout(q))
        heldout[hops] = _choose_heldout(q for q in everything if is_heldout(q))
    turns = zip(*heldout.values(), strict=True)
    return Questions(train, tuple(question for turn in turns for question in turn))


def train_question(questions: Questions, seed: int, index: int) -> Question:
    """Training question number `index` of the stream `seed`; the hops take turns."""
    chosen = questions.train[HOPS[index % len(HOPS)]]
    relation = chosen[hash_of("relation", seed, index) % len(chosen)]
    answer = relation[hash_of("answer", seed, index) % len(relation)]
    return answer[hash_of("question", seed, index) % len(answer)]


def _stratify(questions: Iterable[Question]) -> Strata:
    by_end: dict[str, dict[str, list[Question]]] = defaultdict(lambda: defaultdict(list))
    for question in questions:
        by_end[question.relations[-1]][question.answer].append(question)
    return tuple(
        tuple(tuple(same_answer) for same_answer in by_answer.values())
        for by_answer in by_end.values()
    )


def _choose_heldout(questions: Iterable[Question]) -> tuple[Question, ...]:
    """In order of hash, at most one question for each last relation and answer."""
    first: dict[tuple[str, str], Question] = {}
    for question in sorted(questions, key=lambda question: hash_of("heldout", question.text)):
        first.setdefault((question.relations[-1], question.answer), question)
    chosen = list(first.values())[:HELDOUT_PER_HOPS]
    if len(chosen) < HELDOUT_PER_HOPS:
        raise ValueError(f"the world holds only {len(chosen)} held-out questions of some length")
    return tuple(chosen)
