"""[N] Questions like "What is 7 + 5?": all of two levels, a fixed share of them held out."""

import re
from typing import NamedTuple

SIGNS = ("+", "-", "*")
LEVELS = ((1, range(1, 10), range(1, 10)), (2, range(10, 100), range(1, 10)))
"""(digits of the first number, first numbers, second numbers)."""
_HELDOUT_EVERY = 7
"""No multiple of the number of signs, so that all of them are held out."""
_NUMBER = re.compile(r"(?:(?<!\d)-)?\d(?:[\d,]*\d)?(?:\.\d+)?")


class Question(NamedTuple):
    first: int
    sign: str
    second: int
    level: int

    @property
    def text(self) -> str:
        return f"What is {self.first} {self.sign} {self.second}? Answer with the number only."

    @property
    def answer(self) -> int:
        match self.sign:
            case "+":
                return self.first + self.second
            case "-":
                return self.first - self.second
            case _:
                return self.first * self.second


class Questions(NamedTuple):
    train: tuple[Question, ...]
    heldout: tuple[Question, ...]
    """The levels take turns for as long as both have any."""


def build_questions() -> Questions:
    """The same always; no question is in both splits."""
    train: list[Question] = []
    heldout: list[tuple[int, Question]] = []
    for level, firsts, seconds in LEVELS:
        every = [Question(a, sign, b, level) for a in firsts for b in seconds for sign in SIGNS]
        own = every[::_HELDOUT_EVERY]
        heldout += enumerate(own)
        train += sorted(set(every) - set(own))
    return Questions(tuple(train), tuple(question for _, question in sorted(heldout)))


def last_number(text: str) -> float | None:
    """The last number that a text says, None where it says none; "1,234" is one number."""
    found = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return float(found[-1].replace(",", "")) if found else None
