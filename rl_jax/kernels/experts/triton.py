# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""[P] Grouped products for NVIDIA GPUs: rows sorted by group, a matrix for each group.

Imported only where Triton is installed; `triton_launch` calls the kernels from jax. A tile is at
most BM rows of one group, from the group's first row on, so a row's sums do not depend on where it
lies. Tiles past the last one are told to have no rows. Offsets into arrays are int64. No kernel
adds to memory that another program writes, so results are the same in every run.
"""

import triton
import triton.language as tl


@triton.jit
def _dot(a, b, added, TYPE: tl.constexpr):
    """added + a @ b in float32; operands of float32 keep float32's precision."""
    if tl.float32 == TYPE:
        product = tl.dot(a, b, added, input_precision="tf32x3")
    else:
        product = tl.dot(a, b, added)
    return product


@triton.jit
def rows_product(
    rows, matrices, groups, first, end, out,
    K: tl.constexpr, N: tl.constexpr, ALONG_K: tl.constexpr, ALONG_N: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[i] = rows[i] @ matrices[g] for each row i of a tile of group g; [K, N] matrices.

    Neighbours along K lie ALONG_K numbers apart, along N ALONG_N.
    """
    TYPE: tl.constexpr = rows.dtype.element_ty
    tile = tl.program_id(1)
    begin, stop = tl.load(first + tile), tl.load(end + tile)
    if begin >= stop:
        return
    row = begin.to(tl.int64) + tl.arange(0, BM)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    there, known = (row < stop)[:, None], (column < N)[None, :]
    matrix = matrices + tl.load(groups + tile).to(tl.int64) * K * N
    total = tl.zeros([BM, BN], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        inside = k < K
        left = tl.load(rows + row[:, None] * K + k[None, :], there & inside[None, :], 0)
        places = matrix + k[:, None] * ALONG_K + column[None, :] * ALONG_N
        right = tl.load(places, inside[:, None] & known, 0)
        total = _dot(left, right, total, TYPE)
    tl.store(out + row[:, None] * N + column[None, :], total.to(TYPE), there & known)


@triton.jit
def groups_product(
    rows, slopes, first, end, out,
    K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out[g] = sum of rows[i]^T slopes[i] over the rows i of group g; zeros for a group of none."""
    TYPE: tl.constexpr = rows.dtype.element_ty
    group = tl.program_id(2)
    begin, stop = tl.load(first + group), tl.load(end + group)
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    inside, known = k < K, (column < N)[None, :]
    total = tl.zeros([BK, BN], tl.float32)
    for start in range(begin, stop, BM):
        row = (start + tl.arange(0, BM)).to(tl.int64)
        there = row < stop
        left = tl.load(rows + row[None, :] * K + k[:, None], inside[:, None] & there[None, :], 0)
        right = tl.load(slopes + row[:, None] * N + column[None, :], there[:, None] & known, 0)
        total = _dot(left, right, total, TYPE)
    places = out + group.to(tl.int64) * K * N + k[:, None] * N + column[None, :]
    tl.store(places, total.to(TYPE), inside[:, None] & known)
