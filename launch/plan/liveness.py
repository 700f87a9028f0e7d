"""[N] The most bytes that the arrays of a traced program take at once.

What XLA does with a program, as far as it decides that. Elementwise arithmetic that one operation
reads is fused into it and takes no memory; what several read is kept, and so are the operands and
results of products, of loops, and what pads and reductions write. An array is gone after its last
reader. A loop has its carry in place; what it writes its results into begins as zeros, which depend
on nothing, so XLA makes them before everything else.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from jax.extend.core import Jaxpr

from launch.plan.traced import BARRIER, LOOPS, Operation, Trace, Weigh, trace_of

IN_PLACE = ("dynamic_update_slice", "scatter", "scatter-add")
"""Write into the operand that nothing else reads."""
WHOLE = (
    "dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated", "triangular_solve",
    "sort", "top_k", "gather", "cumsum", "cumlogsumexp", "cummax", "cumprod", "concatenate",
    "all_gather", "all_to_all", "ppermute", "psum", "psum_invariant", "reduce_scatter",
    *LOOPS, *IN_PLACE,
)  # fmt: skip
"""Operations whose operands and results are arrays in memory."""
WRITTEN = ("reduce_", "argmax", "argmin", "pad")
"""Beginnings of the names of what arithmetic is fused into, but which is fused into nothing."""
VIEWS = (
    "reshape", "squeeze", "expand_dims", "transpose", "bitcast_convert_type", "name", "copy",
    "sharding_constraint", "pvary", BARRIER,
)  # fmt: skip
"""The operand's bytes, seen otherwise: products take them in any order."""
MADE_AGAIN = (
    "broadcast_in_dim", "iota", "convert_element_type", "slice", "rev", "eq", "ne", "lt", "le",
    "gt", "ge", "and", "or", "not",
)  # fmt: skip
"""So cheap that every reader does them for itself."""


class _Lives(NamedTuple):
    """Which arrays of a trace are in memory, and until when."""

    roots: Mapping[int, frozenset[int]]
    """Array -> those in memory that it is made from; itself, if it is one."""
    end: Mapping[int, int]
    """Array in memory -> the operation after which it is gone."""


def fullest(jaxpr: Jaxpr, weigh: Weigh) -> int:
    """Bytes at most beside the inputs, the results being written where inputs were."""
    return _Walk(weigh).most(jaxpr, [False] * len(jaxpr.invars), results=False)


class _Walk:
    """Of one program; a loop's body is walked once."""

    def __init__(self, weigh: Weigh):
        self.weigh = weigh
        self.known: dict[tuple[int, tuple[bool, ...], bool], int] = {}

    def body(self, jaxpr: Jaxpr, counted: Sequence[bool], own: bool) -> int:
        key = id(jaxpr), tuple(counted), own
        if key not in self.known:
            self.known[key] = self.most(jaxpr, counted, results=True, own=own)
        return self.known[key]

    def most(self, jaxpr: Jaxpr, counted: Sequence[bool], results: bool, own: bool = False) -> int:
        """With those of the inputs that are `counted`, and with the results or without."""
        trace = trace_of(jaxpr, self.weigh, own)
        lives = _lives(trace)
        free = {v for v, yes in zip(trace.inputs, counted, strict=True) if not yes}
        free |= set() if results else set(trace.outputs)
        size = {v: 0 if v in free else trace.sizes[v] for v in trace.sizes}
        first = {v for op in trace.operations for v in _from_zeros(op, lives)}
        live = {v: size[v] for v in (*trace.inputs, *first) if v in lives.end}
        ends: dict[int, list[int]] = {}
        for v, n in lives.end.items():
            ends.setdefault(n, []).append(v)
        now = most = sum(live.values())
        for n, operation in enumerate(trace.operations):
            written = [v for v in operation.writes if v in lives.end and v not in first]
            gone = ends.get(n, [])
            most = max(most, now + self._at_once(operation, lives, size, live, gone, first))
            live |= {v: size[v] for v in written}
            for v in gone:
                live.pop(v, None)
            now = sum(live.values()) if written or gone else now
        return most

    def _at_once(
        self,
        operation: Operation,
        lives: _Lives,
        size: Mapping[int, int],
        live: Mapping[int, int],
        gone: Sequence[int],
        first: set[int],
    ) -> int:
        """What is there during an operation beyond what was before it."""
        if operation.name in LOOPS:
            return self._in_loop(operation, lives, size, live, gone, first)
        grown = sum(size[v] for v in operation.writes if lives.roots[v] == {v})
        if operation.name in WHOLE and operation.name not in IN_PLACE:
            return grown
        return max(grown - sum(live.get(v, 0) for v in gone), 0)

    def _in_loop(
        self,
        operation: Operation,
        lives: _Lives,
        size: Mapping[int, int],
        live: Mapping[int, int],
        gone: Sequence[int],
        first: set[int],
    ) -> int:
        """The body's, less the carry's part that is there already: zeros and what ends here."""
        if operation.name == "cond":
            parts = [branch.jaxpr for branch in operation.params["branches"]]
            inside = max(
                self.body(part, [False] * len(part.invars), operation.own) for part in parts
            )
            return max(inside, sum(size[v] for v in operation.writes))
        body, constants, carry = _loop(operation)
        rest = len(body.invars) - constants - len(carry)
        counted = [False] * constants + [True] * len(carry) + [False] * rest
        held, there = operation.writes[: len(carry)], 0
        taken: set[int] = set()
        for begun, result in zip(carry, held, strict=True):
            own = {v for v in lives.roots[begun] if v in gone} - taken
            there += size[result] if result in first else 0
            there += min(sum(live.get(v, 0) for v in own), size[result])
            taken |= own
        return max(self.body(body, counted, operation.own), sum(size[v] for v in held)) - there


def _loop(operation: Operation) -> tuple[Jaxpr, int, tuple[int, ...]]:
    """(body, inputs of it that stay the same, what the carry begins with)."""
    params, reads = operation.params, operation.reads
    if operation.name == "scan":
        constants, carry, _ = (tuple(part) for part in params["ft_in"].update(reads).unpack())
        return params["jaxpr"].jaxpr, len(constants), carry
    constants = params["body_nconsts"]
    return params["body_jaxpr"].jaxpr, constants, reads[params["cond_nconsts"] + constants :]


def _from_zeros(operation: Operation, lives: _Lives) -> Iterator[int]:
    """Results of a loop that lie in arrays which depend on nothing."""
    if operation.name not in ("scan", "while"):
        return
    carry = _loop(operation)[2]
    for begun, result in zip(carry, operation.writes, strict=False):
        if not lives.roots[begun] and result in lives.end:
            yield result
    yield from (v for v in operation.writes[len(carry) :] if v in lives.end)


def _lives(trace: Trace) -> _Lives:
    """Of every array of a trace."""
    readers = _readers(trace)
    asked = _asked_for(trace)
    roots: dict[int, frozenset[int]] = {v: frozenset() for v in trace.sizes}
    roots |= {v: frozenset((v,)) for v in trace.inputs}
    end: dict[int, int] = {}
    for n, operation in enumerate(trace.operations):
        below = frozenset[int]().union(*(roots[v] for v in operation.reads))
        several = operation.name not in MADE_AGAIN
        for v in operation.writes:
            kept = v in asked or (several and readers.get(v, 0) > 1)
            own = _always(operation) or (kept and operation.name not in VIEWS)
            roots[v] = frozenset((v,)) if own else below
        if any(roots[v] == {v} for v in operation.writes):
            end |= dict.fromkeys(below, n)
    last = len(trace.operations)
    end |= {root: last for v in trace.outputs for root in roots[v]}
    return _Lives(roots, end)


def _always(operation: Operation) -> bool:
    return operation.name in WHOLE or operation.name.startswith(WRITTEN)


def _readers(trace: Trace) -> dict[int, int]:
    """Array -> the number of operations that read it."""
    count: dict[int, int] = {}
    for operation in trace.operations:
        for v in set(operation.reads):
            count[v] = count.get(v, 0) + 1
    return count


def _asked_for(trace: Trace) -> set[int]:
    """Arrays that something needs in memory, if only as a view of them."""
    asked = set(trace.outputs)
    for operation in reversed(trace.operations):
        viewed = operation.name in VIEWS and asked.intersection(operation.writes)
        if operation.name in (BARRIER, *WHOLE) or viewed:
            asked.update(operation.reads)
    return asked
