"""[N] A traced program as a list of operations on numbered arrays."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Var

DISSOLVED = (
    "jit", "pjit", "eval_jaxpr", "closed_call", "core_call", "remat", "remat2", "checkpoint",
    "custom_jvp_call", "custom_vjp_call",
)  # fmt: skip
"""Calls whose operations XLA takes as the caller's own."""
BARRIER = "optimization_barrier"
"""Each of its operands is an operation of its own here."""

LOOPS = ("scan", "while", "cond")
"""With programs of their own."""
ON_EACH = "shard_map"
"""A call of the part of a program that sees a device's own parts of arrays."""

Weigh = Callable[[Any, bool], int]
"""Bytes that an abstract value takes of a device; whether the value is a device's own part."""


class Operation(NamedTuple):
    """Arrays are told by number."""

    name: str
    """Of jax's primitive."""
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    params: Mapping[str, Any]
    own: bool
    """Whether its arrays are a device's own parts."""


class Trace(NamedTuple):
    """Operations in order, and the bytes of every array they know."""

    operations: tuple[Operation, ...]
    sizes: Mapping[int, int]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def trace_of(jaxpr: Jaxpr, weigh: Weigh, own: bool = False) -> Trace:
    """Calls dissolved, and without what nothing reads. Literals and constants take nothing. `own`
    tells whether the program sees a device's own parts alone."""
    made = _Made(weigh)
    inputs = [made.array(variable.aval, own) for variable in jaxpr.invars]
    outputs = made.all_of(jaxpr, inputs, own)
    needed, kept = set(outputs), []
    for operation in reversed(made.operations):
        if not needed.isdisjoint(operation.writes):
            needed.update(operation.reads)
            kept.append(operation)
    return Trace(tuple(reversed(kept)), made.sizes, tuple(inputs), tuple(outputs))


class _Made:
    """A trace while it grows. What was done before is not done again, as XLA sees to as well."""

    def __init__(self, weigh: Weigh):
        self.weigh = weigh
        self.sizes: dict[int, int] = {}
        self.operations: list[Operation] = []
        self.literals: dict[str, int] = {}
        self.done: dict[tuple[Any, ...], tuple[int, ...]] = {}

    def array(self, aval: Any = None, own: bool = False) -> int:
        self.sizes[len(self.sizes)] = 0 if aval is None else self.weigh(aval, own)
        return len(self.sizes) - 1

    def literal(self, atom: Literal) -> int:
        told = f"{atom.aval} {atom.val!r}"
        if told not in self.literals:
            self.literals[told] = self.array()
        return self.literals[told]

    def all_of(self, jaxpr: Jaxpr, given: Sequence[int], own: bool) -> list[int]:
        """Numbers of the results."""
        known: dict[Var, int] = dict(zip(jaxpr.invars, given, strict=True))
        known |= {constant: self.array() for constant in jaxpr.constvars}

        def read(atom: Any) -> int:
            return self.literal(atom) if isinstance(atom, Literal) else known[atom]

        for equation in jaxpr.eqns:
            reads = [read(atom) for atom in equation.invars]
            results = self.results(equation, reads, own)
            known.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def results(self, equation: Any, reads: list[int], own: bool) -> Sequence[int]:
        """Numbers of what one equation writes."""
        name, params, avals = equation.primitive.name, equation.params, _avals(equation)
        if name == ON_EACH:
            return self.all_of(params["jaxpr"], reads, True)
        inner = called(name, params)
        if inner is not None:
            if params.get("differentiated") and params.get("prevent_cse"):
                reads = self.behind_barrier(reads, params)
            return self.all_of(inner, reads, own)
        if name == BARRIER:
            return self.behind_barrier(reads, params)
        told = None if name in LOOPS else (name, tuple(reads), _told(params), own)
        known = self.done.get(told) if told else None
        if known is None:
            known = tuple(self.array(aval, own) for aval in avals)
            self.operations.append(Operation(name, tuple(reads), known, params, own))
        if told:
            self.done[told] = known
        return known

    def behind_barrier(self, reads: Sequence[int], params: Mapping[str, Any]) -> list[int]:
        """The same arrays as new ones, so that nothing made of them was done before."""
        fresh = []
        for read in reads:
            fresh.append(self.array())
            self.sizes[fresh[-1]] = self.sizes[read]
            self.operations.append(Operation(BARRIER, (read,), (fresh[-1],), params, False))
        return fresh


def _avals(equation: Any) -> list[Any]:
    return [variable.aval for variable in equation.outvars]


def _told(params: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{word}={params[word]!r}" for word in sorted(params))


def called(name: str, params: Mapping[str, Any]) -> Jaxpr | None:
    """What a call that is dissolved runs; None for every other operation."""
    if name not in DISSOLVED:
        return None
    inner = params["jaxpr"] if "jaxpr" in params else params["call_jaxpr"]
    return inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
