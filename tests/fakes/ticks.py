"""A logical clock that counts."""


class Ticks:
    def __init__(self, now: int = 0) -> None:
        self.now = now

    def tick(self) -> int:
        self.now += 1
        return self.now

    def witness(self, number: int) -> None:
        self.now = max(self.now, number)
