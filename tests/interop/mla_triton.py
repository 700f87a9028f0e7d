"""Interprets the Triton kernels of latent attention on the CPU against one float64 softmax.

    TRITON_INTERPRET=1 PYTHONPATH=. ORACLE/bin/python tests/interop/mla_triton.py

in an environment made from requirements-triton.txt. Prints one line per case and exits with 1 where
one is over its limit. Relative L2 errors: those of `kda_triton.py`.
"""

import math
import sys
from dataclasses import dataclass

import numpy as np
import torch

from rl_jax.kernels.mla import triton as kernels
from tests.interop.kda_triton import CHUNK, LIMITS, error, mend_interpreter, said

LOG2E = math.log2(math.e)
ROUNDING = 5e-7
"""Relative L2 of two sums of the same float32 numbers in other orders."""
PART = 2
"""Pages per part; the launch layer takes more."""


@dataclass(frozen=True)
class Case:
    """Inputs of one comparison: lengths of a row's segments, the width of keys and of values.

    A length below 0 is padding.
    """

    name: str
    lengths: tuple[int, ...] = (150,)
    rows: int = 1
    heads: int = 2
    A: int = 48
    V: int = 32
    size: float = 1.0
    dtype: torch.dtype = torch.float32
    block: int = 64
    shards: int = 1
    """Into how many the queries of a row are cut."""


def parts(width: int) -> tuple[int, int]:
    """A width as two parts of a power of two, the last one padded; 16 at least."""
    first = max(16, 1 << (width.bit_length() - 1))
    rest = width - first
    return first, 0 if rest <= 0 else max(16, 1 << (rest - 1).bit_length())


def padded_width(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def padded(length: int) -> int:
    return math.ceil(length / CHUNK) * CHUNK


# --- heads with keys of their own


def make_segments(case: Case) -> torch.Tensor:
    """Each segment from a multiple of 64 on; what is left over is padding."""
    length = max(CHUNK, sum(padded(abs(n)) for n in case.lengths))
    segments, start = torch.full((case.rows, length), -1, dtype=torch.int32), 0
    for number, n in enumerate(case.lengths):
        segments[:, start : start + max(n, 0)] = number
        start += padded(abs(n))
    return segments


def spans(segments: torch.Tensor, block: int, at: int, length: int):
    """Token by token, for queries at .. at + length of the rows: `first` and `clear` of blocks of
    queries, then `last` and `clear` of blocks of keys, which count from the first query."""

    def found(r: int, start: int, end: int) -> tuple[list[int], list[int], bool]:
        of = segments[r, start:end].tolist()
        where = [(segments[r] == s).nonzero().flatten() for s in of if s >= 0]
        whole = len(where) == len(of)
        return [int(w[0]) for w in where], [int(w[-1]) + 1 for w in where], whole

    def here(token: int) -> int:
        return min(max(token - at, 0), length)

    rows, keys = segments.shape
    queries = torch.zeros(2, rows, math.ceil(length / block), dtype=torch.int32)
    made = torch.zeros(2, rows, math.ceil(keys / block), dtype=torch.int32)
    for r in range(rows):
        for n in range(queries.shape[2]):
            beyond = at + (n + 1) * block
            starts, _, _ = found(r, at + n * block, min(beyond, at + length))
            queries[0, r, n] = min([s // CHUNK * CHUNK for s in starts], default=beyond)
            queries[1, r, n] = max([padded(s) for s in starts], default=beyond)
        for n in range(made.shape[2]):
            _, ends, whole = found(r, n * block, (n + 1) * block)
            made[0, r, n] = max([here(padded(e)) for e in ends], default=0)
            made[1, r, n] = min(here(e // CHUNK * CHUNK) for e in ends) if whole else 0
    return *queries, *made


def sizes_of(q, v) -> dict[str, int]:
    A, V = q.shape[-1], v.shape[-1]
    A0, A1 = parts(A)
    return {"A": A, "A0": A0, "A1": A1, "V": V, "BV": padded_width(V), "BN": 32}


def run_forward(q, k, v, segments, scale, block, at=0):
    """Queries are tokens at.. of the rows of keys, whose segments are given."""
    rows, length, heads, _ = q.shape
    first, clear, _, _ = spans(segments, block, at, length)
    own, place = segments[:, at : at + length].contiguous(), torch.tensor([at], dtype=torch.int32)
    out = torch.empty(*q.shape[:3], v.shape[-1], dtype=v.dtype)
    log_mass = torch.empty(rows, heads, length)
    kernels.heads_forward[(first.shape[1], heads, rows)](
        q, k, v, own, segments, place, first, clear, heads, length, k.shape[1], out, log_mass,
        SCALE=scale * LOG2E, BM=block, **sizes_of(q, v),
    )  # fmt: skip
    return out, log_mass


def run_backward(q, k, v, segments, scale, block, out, log_mass, do, at=0):
    rows, length, heads, _ = q.shape
    first, clear, last, key_clear = spans(segments, block, at, length)
    own, place = segments[:, at : at + length].contiguous(), torch.tensor([at], dtype=torch.int32)
    delta = (out.float() * do.float()).sum(-1).transpose(1, 2).contiguous()
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    sizes = {"SCALE": scale * LOG2E, "FACTOR": scale, "BM": block, **sizes_of(q, v)}
    given = q, k, v, do, log_mass, delta, own, segments, place
    counts = heads, length, k.shape[1]
    kernels.heads_query_gradients[(first.shape[1], heads, rows)](
        *given, first, clear, *counts, dq, **sizes
    )
    kernels.heads_key_gradients[(last.shape[1], heads, rows)](
        *given, last, key_clear, *counts, dk, dv, **sizes
    )
    return dq, dk, dv


def attention(q, k, v, segments, scale):
    """One softmax per query over the keys of its segment up to itself; zeros for padding."""
    scores = torch.einsum("rlha,rmha->rhlm", q, k) * scale
    seen = (segments[:, :, None] == segments[:, None]) & (segments >= 0)[:, :, None]
    seen = torch.tril(seen)[:, None]
    weights = torch.softmax(torch.where(seen, scores, -math.inf), -1)
    return torch.einsum("rhlm,rmhv->rlhv", torch.where(seen, weights, 0.0), v)


def run_shards(case: Case, operands, segments, scale):
    """Outputs and gradients of all shards together; keys' gradients add up over them."""
    q, k, v, do = operands
    length, outs, made = q.shape[1] // case.shards, [], []
    for at in range(0, q.shape[1], length):
        own, own_do = (x[:, at : at + length].contiguous() for x in (q, do))
        given = own, k, v, segments, scale, case.block
        out, log_mass = run_forward(*given, at)
        outs.append(out)
        made.append(run_backward(*given, out, log_mass, own_do, at))
    dq, dk, dv = zip(*made, strict=True)
    sums = (sum(x.float() for x in own).to(case.dtype) for own in (dk, dv))
    return torch.cat(outs, 1), (torch.cat(dq, 1), *sums)


def compare(case: Case) -> bool:
    torch.manual_seed(0)
    segments = make_segments(case)
    shape, scale = (*segments.shape, case.heads), case.A**-0.5
    q, k, v, do = (torch.randn(*shape, n) for n in (case.A, case.A, case.V, case.V))
    q, k, v, do = ((x * s).to(case.dtype) for x, s in ((q, case.size), (k, 1), (v, 1), (do, 1)))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    want = attention(*exact, segments, scale)
    (want * do.double()).sum().backward()
    out, gradients = run_shards(case, (q, k, v, do), segments, scale)
    forward = error(out, want.detach())
    errors = {
        name: error(got, x.grad)
        for name, got, x in zip("qkv", gradients, exact, strict=True)
        if x.grad is not None
    }
    padding = segments < 0
    zeros = all(not torch.any(x[padding]) for x in (out, *gradients))
    limits = LIMITS[case.dtype]
    within = all(e <= limits[1] for e in errors.values())  # false where one is not a number
    good = forward <= limits[0] and within and zeros
    shown = " ".join(f"d{name} {e:.1e}" for name, e in errors.items())
    return said(case.name, good, f"out {forward:.1e} {shown}, zeros in padding {zeros}")


def check_packing() -> bool:
    """Bit for bit: a segment alone or packed, and queries before a changed token."""
    torch.manual_seed(1)
    case = Case("", (70, -10, 190, 64), rows=2, dtype=torch.bfloat16)
    segments, scale = make_segments(case), 0.2
    shape = (*segments.shape, case.heads)
    q, k, v = (torch.randn(*shape, n).bfloat16() for n in (case.A, case.A, case.V))
    out, _ = run_forward(q, k, v, segments, scale, 128)
    own = slice(192, 192 + 192)
    cut = [x[1:, own].contiguous() for x in (q, k, v, segments)]
    alone, _ = run_forward(*cut, scale, 128)
    packed = torch.equal(alone, out[1:, own])
    changed = [x.clone() for x in (q, k, v)]
    for x in changed:
        x[:, 280] += 1
    other, _ = run_forward(*changed, segments, scale, 128)
    causal = torch.equal(other[:, :280], out[:, :280]) and not torch.equal(other, out)
    return said("packing, causality to the bit", packed and causal, f"{packed} {causal}")


# --- pages


@dataclass(frozen=True)
class Paged:
    """Requests on pages: tokens before, new tokens, how many of those are valid."""

    name: str
    before: tuple[int, ...]
    valid: tuple[int, ...]
    n: int = 1
    heads: int = 3
    W: int = 48
    V: int = 32
    dtype: torch.dtype = torch.float32
    slices: int = 0
    """Columns of a product of scores; 0: all."""


def make_pages(case: Paged, rng: torch.Generator):
    """q, a pool whose unwritten words are NaN, its page table, positions, n_valid and latents."""
    rows, width = len(case.before), 1 + max(case.before) // CHUNK + case.n // CHUNK + 1
    lines = math.ceil(CHUNK * case.W / 1024) * 8 + 8
    order = 1 + torch.randperm(rows * width, generator=rng)
    pages = order.reshape(rows, width).to(torch.int32)
    pool = torch.full((1 + rows * width, lines * 128), math.nan)
    latents = []
    for r, (before, valid) in enumerate(zip(case.before, case.valid, strict=True)):
        latents.append(torch.randn(before + valid, case.W, generator=rng))
        for t in range(before + valid):
            at = t % CHUNK * case.W
            pool[int(pages[r, t // CHUNK]), at : at + case.W] = latents[r][t]
    q = torch.randn(rows, case.n, case.heads, case.W, generator=rng).to(case.dtype)
    bits = pool.view(torch.int32).view(torch.uint32).reshape(len(pool), lines, 128)
    numbers = [torch.tensor(x, dtype=torch.int32) for x in (case.before, case.valid)]
    return q, bits, pages, *numbers, latents


def run_pages(q, pool, pages, positions, n_valid, V, scale, split, slices=0):
    rows, n, heads, W = q.shape
    count, block, lines = n * heads, 64, pool.shape[1]
    W0, W1 = (slices, 0) if slices else parts(W)
    sizes = {"SCALE": scale * LOG2E, "V": V, "BV": padded_width(V)}
    wide = {"W": W, "W0": W0, "W1": W1, "BM": block, "BN": 32, **sizes}
    out, blocks = torch.full((rows, n, heads, V), math.nan, dtype=q.dtype), -(-count // block)
    given = q, pool, pages, positions, n_valid, heads, count, lines, pages.shape[1]
    if not split:
        kernels.pages_prefill[(blocks, rows)](*given, out, **wide)
        return out
    number = math.ceil(pages.shape[1] / PART)
    peaks, masses = (torch.full((rows, number, count), math.nan) for _ in range(2))
    sums = torch.full((rows, number, count, V), math.nan)
    kernels.pages_part[(blocks, number, rows)](*given, peaks, masses, sums, PART=PART, **wide)
    kernels.pages_merge[(count, rows)](
        peaks, masses, sums, positions, n_valid, heads, count, number, out, PART=PART, **sizes
    )
    return out


def attention_of(q, latents, before, V, scale):
    """Queries [n, H, W], the first after `before` tokens, over latents [before + n, W]."""
    scores = torch.einsum("nhw,cw->nhc", q, latents) * scale
    query = before + torch.arange(len(q))
    seen = torch.arange(len(latents)) <= query[:, None, None]
    return torch.softmax(torch.where(seen, scores, -math.inf), -1) @ latents[:, :V]


def compare_pages(case: Paged) -> bool:
    """Both ways against the oracle; a row alone, under a wider table, bit for bit."""
    rng = torch.Generator().manual_seed(0)
    q, pool, pages, positions, n_valid, latents = make_pages(case, rng)
    scale, errors, same, zeros = case.W**-0.5, [], True, True
    alone = range(len(case.before)) if case.n <= 16 else range(1)
    for split in (True, False) if case.n <= 16 else (False,):
        out = run_pages(q, pool, pages, positions, n_valid, case.V, scale, split, case.slices)
        for r, valid in enumerate(case.valid):
            exact = latents[r].to(case.dtype).double()
            want = attention_of(q[r, :valid].double(), exact, case.before[r], case.V, scale)
            zeros &= not torch.any(out[r, valid:])
            errors += [error(out[r, :valid], want)] if valid else []
        for r in alone:
            row = slice(r, r + 1)
            table = torch.cat([pages[row], torch.zeros(1, 5, dtype=torch.int32)], 1)
            own = q[row], pool, table, positions[row], n_valid[row]
            got = run_pages(*own, case.V, scale, split, case.slices)
            same &= torch.equal(got, out[row])
    within = all(e <= LIMITS[case.dtype][0] for e in errors)  # false where one is not a number
    good = within and same and zeros
    text = f"{max(errors):.1e}, alone equal {same}, zeros past the valid {zeros}"
    return said(case.name, good, text)


def rows_are_alone() -> bool:
    """Whether numpy's product of a row has the same bits beside any number of rows.

    The interpreter multiplies with numpy, whose kernels on some CPUs take several rows together; on
    a GPU a row of a tile is alone.
    """
    random = np.random.default_rng(0)
    rows, columns = (random.standard_normal((64, 64)).astype(np.float32) for _ in range(2))
    whole = rows @ columns
    return all(np.array_equal(rows[:n] @ columns, whole[:n]) for n in (1, 2, 5, 16, 32))


def check_tokens_one_by_one() -> bool:
    """Several tokens at once give what one at a time gives: bit for bit, if numpy lets them."""
    case = Paged("", (200, 63), (5, 3), n=5)
    q, pool, pages, positions, n_valid, _ = make_pages(case, torch.Generator().manual_seed(3))
    out = run_pages(q, pool, pages, positions, n_valid, case.V, 0.3, True)
    same, errors = True, []
    for t in range(case.n):
        valid = (n_valid > t).to(torch.int32)
        one = run_pages(
            q[:, t : t + 1].contiguous(), pool, pages, positions + t, valid, case.V, 0.3, True
        )
        same &= torch.equal(one[:, 0], out[:, t])
        there = valid > 0
        errors.append(error(one[there, 0], out[there, t].double()))
    if rows_are_alone():
        return said("tokens one by one, to the bit", same, "")
    text = f"{max(errors):.1e}, equal {same}: numpy's own rows differ beside others here"
    return said("tokens one by one, to a rounding", all(e <= ROUNDING for e in errors), text)


def cases() -> list[Case]:
    found = [Case(f"T {n}", (n,), heads=1) for n in (1, 63, 64, 65)]
    found += [Case("192 and 128 wide", (130,), heads=1, A=192, V=128)]
    found += [Case("A 24, V 8", A=24, V=8), Case("A 12, V 48", A=12, V=48)]
    found += [Case("A 64, V 64", A=64, V=64), Case("scores in the hundreds", size=40.0)]
    ragged = (70, 0, 64, -100, 1, 130)
    found += [Case("ragged, padding", ragged, rows=2, heads=1)]
    found += [Case(f"ragged, blocks of {n}", ragged, heads=1, block=n) for n in (32, 128)]
    found += [Case("all padding", (1, -64, -64), heads=1)]
    found += [Case("5 shards", (150, -20, 340), heads=1, shards=5, block=128)]
    found += [Case("5 shards, one segment", (640,), heads=1, shards=5, block=32)]
    bf16 = {"dtype": torch.bfloat16}
    found += [Case("bf16", (300,), **bf16), Case("bf16 ragged", ragged, **bf16, block=128)]
    return [*found, Case("bf16 192 and 128 wide", (130,), heads=1, A=192, V=128, **bf16)]


def paged_cases() -> list[Paged]:
    found = [Paged("decode", (0, 63, 64, 300, 127), (1, 1, 1, 1, 0))]
    found += [Paged("five tokens", (0, 62, 250), (5, 3, 0), n=5)]
    found += [Paged("prefill", (0, 64, 128), (70, 0, 33), n=70)]
    found += [Paged("decode 576 and 512 wide", (100, 7), (1, 1), heads=2, W=576, V=512)]
    found += [Paged("decode W 12, V 8", (100, 7), (1, 1), heads=1, W=12, V=8)]
    found += [Paged("decode by slices of 32", (100, 7), (1, 1), W=96, V=64, slices=32)]
    bf16 = {"dtype": torch.bfloat16}
    found += [Paged("bf16 decode", (0, 300), (1, 1), **bf16)]
    return [*found, Paged("bf16 prefill", (64, 0), (70, 20), n=70, **bf16)]


def main() -> int:
    mend_interpreter()
    results = [check_packing(), check_tokens_one_by_one()]
    results += [compare(case) for case in cases()]
    results += [compare_pages(case) for case in paged_cases()]
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
