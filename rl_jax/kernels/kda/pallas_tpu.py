"""[P] Kimi delta attention on TPUs: a Pallas kernel over chunks of 64 tokens of packed rows.

The grid goes over rows, blocks of heads and chunks, the last one after the other: the states of a
block of heads stay on the chip from chunk to chunk. Tokens come and go as they lie in memory,
[R, L, H, K]; a head is every H-th row of a block. The backward pass (`pallas_tpu_backward.py`)
keeps the inputs and the state entering every eighth chunk. A call is opaque to XLA's partitioner:
on a mesh, call it under `shard_map` over rows or heads.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from rl_jax.arrays import CHUNK, Array
from rl_jax.kernels.kda.pallas_tpu_backward import backward
from rl_jax.kernels.kda.pallas_tpu_chunk import (
    GROUP,
    VMEM_LIMIT,
    Form,
    by_block,
    causal_scores,
    heads_of,
    heads_together,
    invert_heads,
    levels,
    put_pair,
    split_pair,
    sums_of,
    take,
)
from rl_jax.kernels.pages import LANES


def obstacle(key_width: int, value_width: int, dtype: DTypeLike) -> str:
    """Why the kernels cannot run such operands here; empty where they can."""
    if jax.default_backend() != "tpu":
        return f"jax's default backend is {jax.default_backend()}, not tpu"
    return unsupported(key_width, value_width, dtype)


def unsupported(key_width: int, value_width: int, dtype: DTypeLike) -> str:
    """Why there is no kernel for such operands on any TPU; empty where there is."""
    if key_width % 8 or not 0 < key_width <= LANES:
        return f"key width {key_width} is not a multiple of 8 up to {LANES}"
    if value_width % LANES or not value_width:
        return f"value width {value_width} is not a multiple of {LANES}"
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        return f"{jnp.dtype(dtype)} is not float32 or bfloat16"
    return ""


def chunked(
    q: Float[Array, "R L H K"],
    k: Float[Array, "R L H K"],
    v: Float[Array, "R L H V"],
    g: Float[Array, "R L H K"],
    beta: Float[Array, "R L H"],
    state: Float[Array, "R H K V"],
    reset: Bool[Array, "R N"],
    *,
    bounded: bool,
    export: bool,
) -> tuple[Float[Array, "R L H V"], Float[Array, "R H K V"], Float[Array, "N R H K V"] | None]:
    """Outputs, final state and, if `export`, the states after every chunk; see `api.chunked`.

    Columns of a state know nothing of each other: wide values go through in parts of 128.
    """
    heads = q.shape[2]
    extra = -heads % heads_together(heads)
    q, k, v, g, beta = (_with_heads(x, extra, 2) for x in (q, k, v, g, beta))
    state, reset = _with_heads(state, extra, 1), reset.astype(jnp.int32)
    parts = [
        _chunked(q, k, v[..., part], g, beta, state[..., part], reset, bounded, export)
        for part in (slice(i, i + LANES) for i in range(0, v.shape[-1], LANES))
    ]
    outs, finals, states = zip(*parts, strict=True)
    out, final = jnp.concatenate(outs, -1)[:, :, :heads], jnp.concatenate(finals, -1)[:, :heads]
    return out, final, jnp.concatenate(states, -1)[:, :, :heads] if export else None


def _with_heads(x: Array, extra: int, axis: int) -> Array:
    """Heads of zeros at the end, so that blocks of heads are whole."""
    if not extra:
        return x
    return jnp.pad(x, [(0, extra if i == axis else 0) for i in range(x.ndim)])


@partial(jax.custom_vjp, nondiff_argnums=(7, 8))
def _chunked(q, k, v, g, beta, state, reset, bounded, export):
    return _forward(q, k, v, g, beta, state, reset, bounded, export, False)[:3]


def _chunked_forward(q, k, v, g, beta, state, reset, bounded, export):
    *made, entering = _forward(q, k, v, g, beta, state, reset, bounded, export, True)
    return tuple(made), (q, k, v, g, beta, reset, entering)


def _chunked_backward(bounded, export, saved, cotangents):
    *operands, reset, entering = saved
    form = Form(bounded, operands[0].dtype == jnp.bfloat16)
    return *backward(form, tuple(operands), reset, entering, cotangents), None


_chunked.defvjp(_chunked_forward, _chunked_backward)


def _forward(q, k, v, g, beta, state, reset, bounded, export, keep):
    """(out, final, states after chunks if `export`, states entering groups if `keep`)."""
    rows, length, heads, width = q.shape
    chunks, value_width, together = length // CHUNK, v.shape[-1], heads_together(heads)
    form = Form(bounded, q.dtype == jnp.bfloat16)

    def tokens(width):
        return pl.BlockSpec((1, CHUNK, together, width), lambda r, h, n, _: (r, n, h, 0))

    def states(index, *shape):
        return pl.BlockSpec((1, 1, together, *shape), index)

    key, value = tokens(width), tokens(value_width)
    betas = pl.BlockSpec((1, 1, CHUNK, together), lambda r, h, n, _: (r, h, n, 0))
    whole = pl.BlockSpec((1, together, width, value_width), lambda r, h, n, _: (r, h, 0, 0))
    outs = [(v.shape, v.dtype, value), (state.shape, jnp.float32, whole)]
    if export:
        spec = states(lambda r, h, n, _: (n, r, h, 0, 0), width, value_width)
        outs.append(((chunks, *state.shape), jnp.float32, spec))
    if keep:
        spec = states(lambda r, h, n, _: (n // GROUP, r, h, 0, 0), value_width, width)
        shape = (-(-chunks // GROUP), rows, heads, value_width, width)
        outs.append((shape, jnp.float32, spec))
    made = pl.pallas_call(
        partial(_kernel, form=form, export=export, keep=keep),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(rows, heads // together, chunks),
            in_specs=[key, key, value, key, betas, whole],
            out_specs=[spec for _, _, spec in outs],
            scratch_shapes=[
                pltpu.VMEM((form.sums, CHUNK, together, width), jnp.float32),
                pltpu.VMEM((together, value_width, width), jnp.float32),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, _ in outs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        name="kda_forward",
    )(reset.reshape(-1), q, k, v, g, by_block(beta, together), state)
    more = list(made[2:])
    return made[0], made[1], more.pop(0) if export else None, more[0] if keep else None


def _kernel(
    reset: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, *refs: Any,
    form: Form, export: bool, keep: bool,
):  # fmt: skip
    """One chunk of a block of heads; `refs` are outputs, then the sums' and the states' scratch."""
    out, final, *more, sums, carried = refs
    row, chunk, chunks = pl.program_id(0), pl.program_id(2), pl.num_programs(2)
    heads = carried.shape[0]

    @pl.when(chunk == 0)
    def _enter():
        for head in range(heads):
            carried[head] = state[0, head].T

    @pl.when(reset[row * chunks + chunk] != 0)
    def _clear():
        carried[...] = jnp.zeros_like(carried)

    if keep:

        @pl.when(chunk % GROUP == 0)
        def _keep():
            more[-1][0, 0] = carried[...]

    sums[...] = jnp.stack(sums_of(form, g[0]))
    for first in range(0, heads, 2):
        pair = heads_of(form, (q, k, v, beta), sums, first)
        at = [levels(form, head.log) for head in pair]
        inverses = split_pair(invert_heads(form, pair, at))
        outs = []
        for i, head in enumerate(pair):
            entering = carried[first + i]
            taken = take(form, head, inverses[i], entering)
            carried[first + i] = taken.state
            read = form.coarse(head.q * head.entered, entering, 1, 1)
            causal = causal_scores(form.coarse, head, at[i])
            outs.append(read + form.exact(causal, taken.update, 1, 0))
            if export:
                more[0][0, 0, first + i] = taken.state.T
        put_pair(out, first, *outs)

    @pl.when(chunk == chunks - 1)
    def _leave():
        for head in range(heads):
            final[0, head] = carried[head].T
