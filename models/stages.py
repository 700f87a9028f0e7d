"""[P] Layers one after the other: repeated ones stacked and scanned, activations kept or not."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from models.execution import Execution
from rl_jax.arrays import Array, Tree

Body = Callable[[Any, Array, Tree], tuple[Array, Tree]]
"""(block, x, the layer's own input) -> (x, the layer's own output)."""


class Stage(NamedTuple):
    """`unit` layers, `repeats` times one after the other."""

    unit: tuple[Hashable, ...]
    repeats: int


def stages(kinds: Sequence[Hashable]) -> tuple[Stage, ...]:
    """The cut of a list of layers into repeated units that has the fewest bodies.

    Layers with equal kinds have equal bodies and parameters of equal shapes. A stage has as many
    bodies as its unit has layers; of cuts with equally many, one with the fewest stages.
    """
    kinds = tuple(kinds)
    best: list[tuple[int, tuple[Stage, ...]]] = [(0, ())]
    for start in reversed(range(len(kinds))):
        cuts = []
        for stage in _from(kinds[start:]):
            bodies, rest = best[-1 - (len(stage.unit) * stage.repeats - 1)]
            cuts.append((len(stage.unit) + bodies, (stage, *rest)))
        best.append(min(cuts, key=lambda cut: (cut[0], len(cut[1]))))
    return best[-1][1]


def _from(kinds: tuple[Hashable, ...]) -> Iterator[Stage]:
    """Every stage that these layers can begin with."""
    for size in range(1, len(kinds) + 1):
        unit, repeats = kinds[:size], 0
        while kinds[size * repeats : size * (repeats + 1)] == unit:
            repeats += 1
            yield Stage(unit, repeats)


def run(
    body: Body,
    blocks: Sequence[nnx.Module],
    kinds: Sequence[Hashable],
    x: Array,
    inputs: Sequence[Tree],
    execution: Execution,
) -> tuple[Array, list[Tree]]:
    """x through all blocks; `inputs` and the outputs that come back are one tree per layer.

    `body` runs one block and may close over what all layers share. Blocks of one kind differ in
    the values of their parameters alone; so do their inputs and outputs.
    """
    plan = stages(kinds) if execution.scan else tuple(Stage((kind,), 1) for kind in kinds)
    outputs, start = [], 0
    for stage in plan:
        end = start + len(stage.unit) * stage.repeats
        x, made = _run_stage(body, blocks[start:end], x, inputs[start:end], stage, execution)
        outputs, start = outputs + made, end
    return x, outputs


def _run_stage(
    body: Body,
    blocks: Sequence[nnx.Module],
    x: Array,
    inputs: Sequence[Tree],
    stage: Stage,
    execution: Execution,
) -> tuple[Array, list[Tree]]:
    size, repeats = len(stage.unit), stage.repeats
    graphs, states = zip(*(nnx.split(block) for block in blocks), strict=True)
    layers = tuple(zip(states, inputs, strict=True))
    run_one = [
        _remat(partial(_merged, body, graph), execution, repeats > 1) for graph in graphs[:size]
    ]

    def unit(x: Array, layers: tuple[Tree, ...]) -> tuple[Array, tuple[Tree, ...]]:
        outputs = []
        for one, layer in zip(run_one, layers, strict=True):
            x, out = one(x, *layer)
            outputs.append(out)
        return x, tuple(outputs)

    if repeats == 1:
        x, outputs = unit(x, layers)
        return x, list(outputs)
    units = [layers[i * size : (i + 1) * size] for i in range(repeats)]
    x, stacked = jax.lax.scan(unit, x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *units))
    split = [jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(repeats)]
    return x, [out for outputs in split for out in outputs]


def _merged(body: Body, graph: Any, x: Array, state: Tree, own: Tree) -> tuple[Array, Tree]:
    return body(nnx.merge(graph, state), x, own)


def _remat(one: Callable, execution: Execution, scanned: bool) -> Callable:
    """Inside a scan nothing can merge a recomputation with the first run."""
    match execution.remat:
        case "none":
            return one
        case "block":
            return jax.checkpoint(one, prevent_cse=not scanned)
        case _:
            policy = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
            return jax.checkpoint(one, prevent_cse=not scanned, policy=policy)
