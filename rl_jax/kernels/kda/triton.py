# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""[P] Kimi delta attention for NVIDIA GPUs: Triton kernels over chunks of 64 tokens.

Imported only where Triton is installed; `triton_launch` calls the kernels from jax. All exponents
are of base 2. A sum of log-decays never reaches past the row whose output it enters, so no output
sees a later gate.

In a chunk, with G the inclusive sum of log-decays, S the entering state and A[i, j] =
sum_d k_id k_jd 2^(G_id - G_jd) for j < i (arXiv 2510.26692, sec. 3, with beta on the columns):

    y = (I + A Diag(beta))^-1 (v - (k 2^G) S);  u = beta y
    o = (q 2^G) S + P u;  S' = Diag(2^G_C) S + (k 2^(G_C - G))^T u

P is A with rows of q and the diagonal. Forward: `prepare` makes what needs no state, `scan` the
rest. Backward: `prepare`, `replay` for the states, `scan_back` for their cotangents,
`score_cotangents` and `chunk_gradients` for the rest.

A matrix of a chunk lies as [R N H, parts, 64, K or 64]: one part of float32, or where operands are
bfloat16 its high and its low half, both bfloat16. Of squares, 16 x 16 blocks above the diagonal
are neither written nor read. Offsets that grow with the sequence are int64.
"""

import triton
import triton.language as tl

from rl_jax.kernels.kda import anchor

CHUNK = tl.constexpr(64)
BLOCK = tl.constexpr(anchor.BLOCK)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _flat(x):
    """A batch of one without its axis: the compiler gives every warp of a batched product a matrix
    of its own, so that of a single matrix each would make all.
    """
    if len(x.shape) == 3 and x.shape[0] == 1:
        x = tl.reshape(x, [x.shape[1], x.shape[2]])
    return x


@triton.jit
def _dot(a, b, TYPE: tl.constexpr):
    """a @ b of float32 in three products of the tensor cores.

    16 bits of each factor count where operands are bfloat16: with 8 the errors of slow decays add
    up over chunks (README.md). With float32 operands, 21 do.
    """
    PRECISION: tl.constexpr = "tf32x3" if tl.float32 == TYPE else "bf16x3"
    product = tl.dot(_flat(a), _flat(b), input_precision=PRECISION)
    if len(a.shape) == 3:
        product = tl.reshape(product, [a.shape[0], a.shape[1], b.shape[2]])
    return product


@triton.jit
def _plain_dot(a, b, TYPE: tl.constexpr):
    """a @ b with operands rounded to TYPE, for products whose errors stay in their chunk."""
    if tl.float32 == TYPE:
        product = _dot(a.to(TYPE), b.to(TYPE), TYPE)
    else:
        product = tl.dot(a.to(TYPE), b.to(TYPE))
    return product


@triton.jit
def _sum_rows(ones, x, TYPE: tl.constexpr):
    """ones @ x for float32 x and zeros and ones in bfloat16; the tensor cores lose nothing of it.

    Three bfloat16 parts hold all of a float32. Where operands are bfloat16, two are enough.
    """
    if len(x.shape) == 3:
        ones = tl.broadcast_to(ones, [x.shape[0], x.shape[1], x.shape[1]])
    shape: tl.constexpr = x.shape
    ones, x = _flat(ones), _flat(x)
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    sums = tl.dot(ones, middle, tl.dot(ones, high))
    if tl.float32 == TYPE:
        sums = tl.dot(ones, (rest - middle.to(tl.float32)).to(tl.bfloat16), sums)
    return tl.reshape(sums, shape)


@triton.jit
def _tile(pointer, first, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """ROWS x COLUMNS contiguous columns at `first`, rows `stride` apart."""
    offsets = tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, COLUMNS)[None, :]
    return pointer + first + offsets


@triton.jit
def _load(pointer, first, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The same, loaded as float32."""
    return tl.load(_tile(pointer, first, stride, ROWS, COLUMNS)).to(tl.float32)


@triton.jit
def _parts(TYPE: tl.constexpr):
    """Of how many parts a matrix of a chunk consists."""
    return 1 if tl.float32 == TYPE else 2


@triton.jit
def _store(at, x, size: tl.constexpr, TYPE: tl.constexpr):
    """x at pointers `at`; its low half `size` further."""
    high = x.to(TYPE)
    tl.store(at, high)
    if tl.float32 != TYPE:
        tl.store(at + size, (x - high.to(tl.float32)).to(TYPE))


@triton.jit
def _times(high, low, x, TYPE: tl.constexpr):
    """(high + low) @ x for float32 x, to 16 bits of each factor, or 21 (see `_dot`)."""
    if tl.float32 == TYPE:
        product = _dot(high, x, TYPE)
    else:
        above = x.to(TYPE)
        below = (x - above.to(tl.float32)).to(TYPE)
        product = tl.dot(high, above, tl.dot(high, below, tl.dot(low, above)))
    return product


@triton.jit
def _halves(pointer, tile, K: tl.constexpr, TYPE: tl.constexpr):
    """Both halves of a chunk's matrix of K columns; of float32, itself and anything."""
    at = _tile(pointer, tile * (_parts(TYPE) * CHUNK * K), K, CHUNK, K)
    high = tl.load(at)
    return high, high if tl.float32 == TYPE else tl.load(at + CHUNK * K)


@triton.jit
def _square_halves(pointer, tile, TYPE: tl.constexpr):
    """The same for a square, its upper blocks 0."""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    at = _tile(pointer, tile * (_parts(TYPE) * CHUNK * CHUNK), CHUNK, CHUNK, CHUNK)
    here = i // BLOCK >= j // BLOCK
    high = tl.load(at, mask=here, other=0.0)
    return high, high if tl.float32 == TYPE else tl.load(at + CHUNK * CHUNK, mask=here, other=0.0)


@triton.jit
def _blocks(pointer, first, stride, COUNT: tl.constexpr, ROWS: tl.constexpr, APART: tl.constexpr,
            COLUMNS: tl.constexpr):  # fmt: skip
    """COUNT blocks of ROWS rows, APART rows from one to the next, loaded as float32."""
    row = tl.arange(0, COUNT)[:, None, None] * APART + tl.arange(0, ROWS)[None, :, None]
    at = pointer + first + row * stride + tl.arange(0, COLUMNS)[None, None, :]
    return tl.load(at).to(tl.float32)


@triton.jit
def _squares(pointer, BELOW: tl.constexpr, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """COUNT squares of SIZE rows in a square of 64: on its diagonal, or BELOW of such a pair."""
    APART: tl.constexpr = 2 * SIZE if BELOW else SIZE
    b = tl.arange(0, COUNT)[:, None, None] * APART
    row = b + tl.arange(0, SIZE)[None, :, None] + (SIZE if BELOW else 0)
    return pointer + row * CHUNK + b + tl.arange(0, SIZE)[None, None, :]


@triton.jit
def _row(SIZE: tl.constexpr):
    return tl.arange(0, SIZE)[None, :, None]


@triton.jit
def _column(SIZE: tl.constexpr):
    return tl.arange(0, SIZE)[None, None, :]


@triton.jit
def _ones(which):
    """1 where `which`, else 0. By way of float32: the interpreter cannot make it from booleans."""
    return tl.where(which, 1.0, 0.0).to(tl.bfloat16)


@triton.jit
def _is_pair(half, SIZE: tl.constexpr):
    """Which (i, j) have i in the right and j in the left half of a pair of `half` rows each."""
    i, j = _row(SIZE), _column(SIZE)
    return (i // half == j // half + 1) & (j // half % 2 == 0)


@triton.jit
def _is_between(half):
    """Which gates of 16 lie between a row and the first row of the right half of its pair."""
    row, token = _row(BLOCK), _column(BLOCK)
    middle = row // (2 * half) * (2 * half) + half
    return (token > tl.minimum(row, middle)) & (token <= tl.maximum(row, middle))


@triton.jit
def _scores_within(
    q, k, g, first, stride, SCALE: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    CENTRE: tl.constexpr,
):  # fmt: skip
    """P and A in the four diagonal blocks of 16 rows.

    With a bound the decay from j to i is split at the block's first row, and its factors reach
    2^+-CENTRE. Without (CENTRE 0), blocks are split in halves down to one row: any gate is exact.
    """
    TYPE: tl.constexpr = q.dtype.element_ty
    row, token = _row(BLOCK), _column(BLOCK)
    p = tl.zeros([4, BLOCK, BLOCK], tl.float32)
    a = tl.zeros([4, BLOCK, BLOCK], tl.float32)
    for channel in range(0, K, BK):
        qs = _blocks(q, first + channel, stride, 4, BLOCK, BLOCK, BK) * SCALE
        ks = _blocks(k, first + channel, stride, 4, BLOCK, BLOCK, BK)
        gs = _blocks(g, first + channel, stride, 4, BLOCK, BLOCK, BK) * LOG2E
        p += tl.where(token == row, tl.sum(qs * ks, 2)[:, :, None], 0.0)
        if CENTRE > 0:
            held = _ones((token <= row) & (token > 0))
            sums = _sum_rows(held, gs, TYPE) + CENTRE
            rows = tl.exp2(sums)
            columns = tl.permute(ks * tl.exp2(-sums), 0, 2, 1)
            p += tl.where(token < row, _dot(qs * rows, columns, TYPE), 0.0)
            a += tl.where(token < row, _dot(ks * rows, columns, TYPE), 0.0)
        else:
            for level in tl.static_range(4):
                decay = tl.exp2(_sum_rows(_ones(_is_between(8 >> level)), gs, TYPE))
                columns = tl.permute(ks * decay, 0, 2, 1)
                kept = _is_pair(8 >> level, BLOCK)
                p += tl.where(kept, _dot(qs * decay, columns, TYPE), 0.0)
                a += tl.where(kept, _dot(ks * decay, columns, TYPE), 0.0)
    return p, a


@triton.jit
def _scores_below(
    q, k, g, first, stride, SCALE: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """P and A for rows of the right and columns of the left halves of pairs of HALF rows each.

    Rows and columns are aged to the border between them: both factors are at most 1.
    """
    TYPE: tl.constexpr = q.dtype.element_ty
    COUNT: tl.constexpr = CHUNK // (2 * HALF)
    row, token = _row(HALF), _column(HALF)
    p = tl.zeros([COUNT, HALF, HALF], tl.float32)
    a = tl.zeros([COUNT, HALF, HALF], tl.float32)
    for channel in range(0, K, BK):
        left = first + channel
        right = left + HALF * stride
        gs = _blocks(g, right, stride, COUNT, HALF, 2 * HALF, BK) * LOG2E
        decay = tl.exp2(_sum_rows(_ones(token <= row), gs, TYPE))
        gs = _blocks(g, left, stride, COUNT, HALF, 2 * HALF, BK) * LOG2E
        rest = tl.exp2(_sum_rows(_ones(token > row), gs, TYPE))
        columns = _blocks(k, left, stride, COUNT, HALF, 2 * HALF, BK) * rest
        columns = tl.permute(columns, 0, 2, 1)
        qs = _blocks(q, right, stride, COUNT, HALF, 2 * HALF, BK) * SCALE
        ks = _blocks(k, right, stride, COUNT, HALF, 2 * HALF, BK)
        p += _dot(qs * decay, columns, TYPE)
        a += _dot(ks * decay, columns, TYPE)
    return p, a


@triton.jit
def _every_second(x, PART: tl.constexpr, COUNT: tl.constexpr, SIZE: tl.constexpr):
    """Squares PART, PART + 2, ... of 2 COUNT."""
    x = tl.reshape(x, [COUNT, 2, SIZE, SIZE])
    part = tl.arange(0, 2)[None, :, None, None]
    return tl.sum(tl.where(part == PART, x, 0.0), 1)


@triton.jit
def _beside(left, right, COUNT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    both = tl.permute(tl.join(left, right), 0, 1, 3, 2)
    return tl.reshape(both, [COUNT, ROWS, 2 * COLUMNS])


@triton.jit
def _invert(within, pairs, halves, target, TYPE: tl.constexpr):
    """Writes (I + m)^-1 for strictly lower m, given as blocks of 16, those below, and the rest.

    From blocks of 1 row to one of 64, X21 = -X22 m21 X11. Never powers of m: those explode on
    correlated keys.
    """
    x = tl.where(_row(BLOCK) == _column(BLOCK), 1.0, 0.0) - tl.where(
        _is_pair(1, BLOCK), within, 0.0
    )
    for doubling in tl.static_range(1, 4):
        below = tl.where(_is_pair(1 << doubling, BLOCK), within, 0.0)
        x -= _dot(x, _dot(below, x, TYPE), TYPE)
    first, second = _every_second(x, 0, 2, BLOCK), _every_second(x, 1, 2, BLOCK)
    below = -_dot(second, _dot(pairs, first, TYPE), TYPE)
    top = _beside(first, tl.zeros_like(first), 2, BLOCK, BLOCK)
    bottom = _beside(below, second, 2, BLOCK, BLOCK)
    x = tl.reshape(tl.permute(tl.join(top, bottom), 0, 3, 1, 2), [2, 2 * BLOCK, 2 * BLOCK])
    _store(_squares(target, False, 2, 2 * BLOCK), x, CHUNK * CHUNK, TYPE)
    first, second = _every_second(x, 0, 1, 2 * BLOCK), _every_second(x, 1, 1, 2 * BLOCK)
    below = -_dot(second, _dot(halves, first, TYPE), TYPE)
    _store(_squares(target, True, 1, 2 * BLOCK), below, CHUNK * CHUNK, TYPE)


@triton.jit
def _decays(g, first, stride, COLUMNS: tl.constexpr, TYPE: tl.constexpr):
    """2^G, 2^(G_C - G) and 2^G_C of a chunk."""
    row, token = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    gs = _load(g, first, stride, CHUNK, COLUMNS) * LOG2E
    sums = _sum_rows(_ones(token <= row), gs, TYPE)
    rest = _sum_rows(_ones(token > row), gs, TYPE)
    total = tl.sum(tl.where(row == CHUNK - 1, sums, 0.0), 0)
    return tl.exp2(sums), tl.exp2(rest), tl.exp2(total)


@triton.jit
def prepare(
    q, k, g, beta, heads, read_q, read_k, write_k, total, causal, inverse, adjoint,
    SCALE: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, CENTRE: tl.constexpr,
):  # fmt: skip
    """What a chunk's outputs take from its keys, queries and gates; one program per chunk and head.

    Writes q 2^G (its high half alone), k 2^G, k 2^(G_C - G), 2^G_C, P and (I + A Diag(beta))^-1;
    where `adjoint` is given, (I + Diag(beta) A)^-1 too.
    """
    TYPE: tl.constexpr = q.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    chunk, head = program // heads, program % heads
    first = (chunk * CHUNK * heads + head) * K
    stride = heads * K
    for channel in range(0, K, BK):
        here = first + channel
        read, write, keep = _decays(g, here, stride, BK, TYPE)
        tl.store(total + program * K + channel + tl.arange(0, BK), keep)
        tile = program * CHUNK * K + channel
        qs = _load(q, here, stride, CHUNK, BK) * SCALE
        tl.store(_tile(read_q, tile, K, CHUNK, BK), (qs * read).to(TYPE))
        ks = _load(k, here, stride, CHUNK, BK)
        tile = program * (_parts(TYPE) * CHUNK * K) + channel
        _store(_tile(read_k, tile, K, CHUNK, BK), ks * read, CHUNK * K, TYPE)
        _store(_tile(write_k, tile, K, CHUNK, BK), ks * write, CHUNK * K, TYPE)
    square = program * (_parts(TYPE) * CHUNK * CHUNK)
    p, within = _scores_within(q, k, g, first, stride, SCALE, K, BK, CENTRE)
    _store(_squares(causal + square, False, 4, BLOCK), p, CHUNK * CHUNK, TYPE)
    p, pairs = _scores_below(q, k, g, first, stride, SCALE, K, BK, BLOCK)
    _store(_squares(causal + square, True, 2, BLOCK), p, CHUNK * CHUNK, TYPE)
    p, halves = _scores_below(q, k, g, first, stride, SCALE, K, BK, 2 * BLOCK)
    _store(_squares(causal + square, True, 1, 2 * BLOCK), p, CHUNK * CHUNK, TYPE)
    token = beta + chunk * CHUNK * heads + head
    by_block = tl.arange(0, 4)[:, None, None] * BLOCK
    by_pair = tl.arange(0, 2)[:, None, None] * (2 * BLOCK)
    columns = tl.load(token + (by_block + _column(BLOCK)) * heads)
    left = tl.load(token + (by_pair + _column(BLOCK)) * heads)
    half = tl.load(token + _column(2 * BLOCK) * heads)
    _invert(within * columns, pairs * left, halves * half, inverse + square, TYPE)
    if adjoint is not None:
        rows = tl.load(token + (by_block + _row(BLOCK)) * heads)
        right = tl.load(token + (by_pair + BLOCK + _row(BLOCK)) * heads)
        half = tl.load(token + (2 * BLOCK + _row(2 * BLOCK)) * heads)
        _invert(within * rows, pairs * right, halves * half, adjoint + square, TYPE)


@triton.jit
def _delta(S, read_k, inverse, v, tile, first, stride, K: tl.constexpr, BV: tl.constexpr):
    """y = (I + A Diag(beta))^-1 (v - (k 2^G) S) of one chunk."""
    TYPE: tl.constexpr = v.dtype.element_ty
    high, low = _halves(read_k, tile, K, TYPE)
    missing = _load(v, first, stride, CHUNK, BV) - _times(high, low, S, TYPE)
    high, low = _square_halves(inverse, tile, TYPE)
    return _times(high, low, missing, TYPE)


@triton.jit
def _write(S, u, write_k, total, tile, K: tl.constexpr, TYPE: tl.constexpr):
    """Diag(2^G_C) S + (k 2^(G_C - G))^T u."""
    high, low = _halves(write_k, tile, K, TYPE)
    keep = tl.load(total + tile * K + tl.arange(0, K))
    return S * keep[:, None] + _times(tl.trans(high), tl.trans(low), u, TYPE)


@triton.jit
def scan(
    read_q, read_k, write_k, v, beta, total, causal, inverse, state, reset, heads, chunks,
    out, final, after, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Outputs and final state, chunk after chunk. One program per BV columns, head and row.

    The state is zeroed before a chunk where `reset` is not 0. Where `after` is given, the state
    after every chunk is written there, as [N, R, H, K, V].
    """
    TYPE: tl.constexpr = v.dtype.element_ty
    head, r = tl.program_id(1), tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * BV
    square = (r * heads + head) * K * V + column
    S = tl.load(_tile(state, square, V, K, BV))
    for n in range(chunks):
        chunk = r * chunks + n
        tile = chunk * heads + head
        token = (chunk * CHUNK + tl.arange(0, CHUNK)) * heads + head
        first = (chunk * CHUNK * heads + head) * V + column
        S = tl.where(tl.load(reset + chunk) != 0, 0.0, S)
        u = _delta(S, read_k, inverse, v, tile, first, heads * V, K, BV)
        u *= tl.load(beta + token)[:, None]
        queries = tl.load(_tile(read_q, tile * CHUNK * K, K, CHUNK, K))
        high, low = _square_halves(causal, tile, TYPE)
        o = _plain_dot(queries, S, TYPE) + _times(high, low, u, TYPE)
        tl.store(_tile(out, first, heads * V, CHUNK, BV), o.to(TYPE))
        S = _write(S, u, write_k, total, tile, K, TYPE)
        if after is not None:
            exported = ((n * tl.num_programs(2) + r) * heads + head) * K * V + column
            tl.store(_tile(after, exported, V, K, BV), S)
    tl.store(_tile(final, square, V, K, BV), S)


@triton.jit
def replay(
    read_k, write_k, v, beta, total, inverse, state, reset, heads, chunks, entering, delta,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """The state entering each chunk and y, for the backward pass; otherwise as `scan`."""
    TYPE: tl.constexpr = v.dtype.element_ty
    head, r = tl.program_id(1), tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * BV
    S = tl.load(_tile(state, (r * heads + head) * K * V + column, V, K, BV))
    for n in range(chunks):
        chunk = r * chunks + n
        tile = chunk * heads + head
        token = (chunk * CHUNK + tl.arange(0, CHUNK)) * heads + head
        first = (chunk * CHUNK * heads + head) * V + column
        S = tl.where(tl.load(reset + chunk) != 0, 0.0, S)
        tl.store(_tile(entering, tile * K * V + column, V, K, BV), S.to(TYPE))
        y = _delta(S, read_k, inverse, v, tile, first, heads * V, K, BV)
        tl.store(_tile(delta, tile * CHUNK * V + column, V, CHUNK, BV), y.to(TYPE))
        S = _write(S, y * tl.load(beta + token)[:, None], write_k, total, tile, K, TYPE)


@triton.jit
def scan_back(
    do, read_q, read_k, write_k, beta, total, causal, adjoint, dfinal, dafter, reset, heads, chunks,
    dstates, du, dstate,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, EXPORTED: tl.constexpr,
):  # fmt: skip
    """Cotangents of the state after each chunk, of u and of the initial state, last chunk first.

    `dafter` holds cotangents of the exported states where EXPORTED, else it is not read.
    """
    TYPE: tl.constexpr = do.dtype.element_ty
    head, r = tl.program_id(1), tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * BV
    square = (r * heads + head) * K * V + column
    dS = tl.load(_tile(dfinal, square, V, K, BV))
    for back in range(chunks):
        chunk = (r + 1) * chunks - 1 - back
        tile = chunk * heads + head
        token = (chunk * CHUNK + tl.arange(0, CHUNK)) * heads + head
        if EXPORTED:
            n = chunks - 1 - back
            exported = ((n * tl.num_programs(2) + r) * heads + head) * K * V + column
            dS += tl.load(_tile(dafter, exported, V, K, BV))
        tl.store(_tile(dstates, tile * K * V + column, V, K, BV), dS.to(TYPE))
        first = (chunk * CHUNK * heads + head) * V + column
        outer = tl.load(_tile(do, first, heads * V, CHUNK, BV))
        queries = tl.load(_tile(read_q, tile * CHUNK * K, K, CHUNK, K))
        high, low = _square_halves(causal, tile, TYPE)
        asked = _plain_dot(tl.trans(queries), outer, TYPE)
        sums = _plain_dot(tl.trans(high), outer, TYPE)
        if tl.float32 != TYPE:
            sums = tl.dot(tl.trans(low), outer, sums)
        high, low = _halves(write_k, tile, K, TYPE)
        sums += _times(high, low, dS, TYPE)
        high, low = _square_halves(adjoint, tile, TYPE)
        change = _times(tl.trans(high), tl.trans(low), sums, TYPE)
        tl.store(_tile(du, tile * CHUNK * V + column, V, CHUNK, BV), change.to(TYPE))
        dv = change * tl.load(beta + token)[:, None]
        keep = tl.load(total + tile * K + tl.arange(0, K))
        high, low = _halves(read_k, tile, K, TYPE)
        dS = dS * keep[:, None] + asked - _times(tl.trans(high), tl.trans(low), dv, TYPE)
        dS = tl.where(tl.load(reset + chunk) != 0, 0.0, dS)
    tl.store(_tile(dstate, square, V, K, BV), dS)


@triton.jit
def score_cotangents(
    beta, do, delta, du, heads, dcausal, dlower, dv, dbeta, V: tl.constexpr, BV: tl.constexpr
):  # fmt: skip
    """dP = do u^T, dA = -(beta du) u^T, dv and dbeta from y and du. One program per chunk, head."""
    TYPE: tl.constexpr = do.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    chunk, head = program // heads, program % heads
    token = (chunk * CHUNK + tl.arange(0, CHUNK)) * heads + head
    betas = tl.load(beta + token)
    dp = tl.zeros([CHUNK, CHUNK], tl.float32)
    da = tl.zeros([CHUNK, CHUNK], tl.float32)
    dbetas = tl.zeros([CHUNK], tl.float32)
    for column in range(0, V, BV):
        first = (chunk * CHUNK * heads + head) * V + column
        inner = program * CHUNK * V + column
        outer = tl.load(_tile(do, first, heads * V, CHUNK, BV))
        y, change = _load(delta, inner, V, CHUNK, BV), _load(du, inner, V, CHUNK, BV)
        dbetas += tl.sum(y * change, 1)
        u, dvs = y * betas[:, None], change * betas[:, None]
        tl.store(_tile(dv, first, heads * V, CHUNK, BV), dvs.to(TYPE))
        dp += _plain_dot(outer, tl.trans(u), TYPE)
        da -= _plain_dot(dvs, tl.trans(u), TYPE)
    tl.store(dbeta + token, dbetas)
    square = program * CHUNK * CHUNK
    tl.store(_tile(dcausal, square, CHUNK, CHUNK, CHUNK), dp)
    tl.store(_tile(dlower, square, CHUNK, CHUNK, CHUNK), da)


@triton.jit
def _gradient_dot(a, b, TYPE: tl.constexpr, EXACT: tl.constexpr):
    """`_dot` where EXACT, else `_plain_dot`: only for narrow keys does rounding miss the bounds."""
    if EXACT:
        product = _dot(a, b, TYPE)
    else:
        product = tl.dot(_flat(a).to(TYPE), _flat(b).to(TYPE))
        product = tl.reshape(product, [a.shape[0], a.shape[1], b.shape[2]])
    return product


@triton.jit
def _score_gradients(dp, da, q, k, columns, rows, TYPE: tl.constexpr, EXACT: tl.constexpr):
    """Of q and k as rows, and of k as a column, from those of P and A.

    `rows` is the decay of a row and `columns` that of a column, which `q` and `k` (rows) lack and
    `columns` has.
    """
    dq = rows * _gradient_dot(dp, columns, TYPE, EXACT)
    as_row = rows * _gradient_dot(da, columns, TYPE, EXACT)
    as_column = _gradient_dot(tl.permute(dp, 0, 2, 1), q * rows, TYPE, EXACT)
    as_column += _gradient_dot(tl.permute(da, 0, 2, 1), k * rows, TYPE, EXACT)
    return dq, as_row, as_column


@triton.jit
def _gradients_within(
    q, k, g, first, stride, dcausal, dlower, SCALE: tl.constexpr, BK: tl.constexpr,
    CENTRE: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Of q, k and g [4, 16, BK] through the diagonal blocks of 16 rows, as in `_scores_within`."""
    TYPE: tl.constexpr = q.dtype.element_ty
    row, token = _row(BLOCK), _column(BLOCK)
    qs = _blocks(q, first, stride, 4, BLOCK, BLOCK, BK) * SCALE
    ks = _blocks(k, first, stride, 4, BLOCK, BLOCK, BK)
    gs = _blocks(g, first, stride, 4, BLOCK, BLOCK, BK) * LOG2E
    dp = tl.load(_squares(dcausal, False, 4, BLOCK))
    da = tl.load(_squares(dlower, False, 4, BLOCK))
    diagonal = tl.sum(tl.where(token == row, dp, 0.0), 2)[:, :, None]
    dq, dk = diagonal * ks, diagonal * qs
    dg = tl.zeros([4, BLOCK, BK], tl.float32)
    if CENTRE > 0:
        dp, da = tl.where(token < row, dp, 0.0), tl.where(token < row, da, 0.0)
        sums = _sum_rows(_ones((token <= row) & (token > 0)), gs, TYPE) + CENTRE
        decay, rest = tl.exp2(sums), tl.exp2(-sums)
        x, y, z = _score_gradients(dp, da, qs, ks, ks * rest, decay, TYPE, EXACT)
        z *= rest
        dq, dk = dq + x, dk + y + z
        dg = _sum_rows(_ones((row <= token) & (row > 0)), qs * x + ks * (y - z), TYPE)
    else:
        for level in tl.static_range(4):
            held, kept = _is_between(8 >> level), _is_pair(8 >> level, BLOCK)
            decay = tl.exp2(_sum_rows(_ones(held), gs, TYPE))
            dp_here, da_here = tl.where(kept, dp, 0.0), tl.where(kept, da, 0.0)
            x, y, z = _score_gradients(dp_here, da_here, qs, ks, ks * decay, decay, TYPE, EXACT)
            z *= decay
            dq, dk = dq + x, dk + y + z
            back = tl.permute(_ones(held), 0, 2, 1)
            dg += _sum_rows(back, qs * x + ks * (y + z), TYPE)
    shape: tl.constexpr = [CHUNK, BK]
    return tl.reshape(dq, shape), tl.reshape(dk, shape), tl.reshape(dg, shape)


@triton.jit
def _interleaved(left, right, COUNT: tl.constexpr, HALF: tl.constexpr, BK: tl.constexpr):
    """Left and right halves of COUNT pairs as the rows of a chunk."""
    both = tl.permute(tl.join(left, right), 0, 3, 1, 2)
    return tl.reshape(both, [CHUNK, BK])


@triton.jit
def _gradients_below(
    q, k, g, first, stride, dcausal, dlower, SCALE: tl.constexpr, BK: tl.constexpr,
    HALF: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Of q, k and g [64, BK] through pairs of HALF rows each, as in `_scores_below`."""
    TYPE: tl.constexpr = q.dtype.element_ty
    COUNT: tl.constexpr = CHUNK // (2 * HALF)
    row, token = _row(HALF), _column(HALF)
    right = first + HALF * stride
    gs = _blocks(g, right, stride, COUNT, HALF, 2 * HALF, BK) * LOG2E
    decay = tl.exp2(_sum_rows(_ones(token <= row), gs, TYPE))
    gs = _blocks(g, first, stride, COUNT, HALF, 2 * HALF, BK) * LOG2E
    rest = tl.exp2(_sum_rows(_ones(token > row), gs, TYPE))
    qs = _blocks(q, right, stride, COUNT, HALF, 2 * HALF, BK) * SCALE
    ks = _blocks(k, right, stride, COUNT, HALF, 2 * HALF, BK)
    keys = _blocks(k, first, stride, COUNT, HALF, 2 * HALF, BK)
    dp = tl.load(_squares(dcausal, True, COUNT, HALF))
    da = tl.load(_squares(dlower, True, COUNT, HALF))
    x, y, z = _score_gradients(dp, da, qs, ks, keys * rest, decay, TYPE, EXACT)
    z *= rest
    on_rows = _sum_rows(_ones(token >= row), qs * x + ks * y, TYPE)
    on_columns = _sum_rows(_ones(token < row), keys * z, TYPE)
    dq = _interleaved(tl.zeros_like(x), x, COUNT, HALF, BK)
    dk = _interleaved(z, y, COUNT, HALF, BK)
    return dq, dk, _interleaved(on_columns, on_rows, COUNT, HALF, BK)


@triton.jit
def chunk_gradients(
    q, k, g, beta, do, entering, delta, dstates, du, dcausal, dlower, heads, dq, dk, dg,
    SCALE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    CENTRE: tl.constexpr,
):  # fmt: skip
    """Gradients of q, k and g within a chunk. One program per BK channels of a chunk and head.

    The gradient of a sum of log-decays goes to those it holds, so that nothing is added and taken
    away again but within 16 rows.
    """
    TYPE: tl.constexpr = q.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    chunk, head = program // heads, program % heads
    channel = tl.program_id(1) * BK
    betas = tl.load(beta + (chunk * CHUNK + tl.arange(0, CHUNK)) * heads + head)[:, None]
    dread_q = tl.zeros([CHUNK, BK], tl.float32)
    dread_k = tl.zeros([CHUNK, BK], tl.float32)
    dwrite_k = tl.zeros([CHUNK, BK], tl.float32)
    dtotal = tl.zeros([BK], tl.float32)
    for column in range(0, V, BV):
        first = (chunk * CHUNK * heads + head) * V + column
        inner = program * CHUNK * V + column
        square = program * K * V + channel * V + column
        outer = tl.load(_tile(do, first, heads * V, CHUNK, BV))
        u = _load(delta, inner, V, CHUNK, BV) * betas
        dvs = _load(du, inner, V, CHUNK, BV) * betas
        S = tl.load(_tile(entering, square, V, BK, BV))
        dS = tl.load(_tile(dstates, square, V, BK, BV))
        dread_q += _plain_dot(outer, tl.trans(S), TYPE)
        dread_k -= _plain_dot(dvs, tl.trans(S), TYPE)
        dwrite_k += _plain_dot(u, tl.trans(dS), TYPE)
        dtotal += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
    first = (chunk * CHUNK * heads + head) * K + channel
    stride = heads * K
    row, token = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    read, write, keep = _decays(g, first, stride, BK, TYPE)
    qs, ks = _load(q, first, stride, CHUNK, BK) * SCALE, _load(k, first, stride, CHUNK, BK)
    dqs, dks, written = dread_q * read, dread_k * read, dwrite_k * write
    dgs = _sum_rows(_ones(token >= row), qs * dqs + ks * dks, TYPE)
    dgs += _sum_rows(_ones(token < row), ks * written, TYPE)
    dgs += (dtotal * keep)[None, :]
    dks += written
    square = program * CHUNK * CHUNK
    EXACT: tl.constexpr = K <= 32 or tl.float32 == TYPE
    x, y, z = _gradients_within(
        q, k, g, first, stride, dcausal + square, dlower + square, SCALE, BK, CENTRE, EXACT
    )
    dqs, dks, dgs = dqs + x, dks + y, dgs + z
    for level in tl.static_range(2):
        x, y, z = _gradients_below(
            q, k, g, first, stride, dcausal + square, dlower + square, SCALE, BK, 32 >> level, EXACT
        )
        dqs, dks, dgs = dqs + x, dks + y, dgs + z
    tl.store(_tile(dq, first, stride, CHUNK, BK), (dqs * SCALE).to(TYPE))
    tl.store(_tile(dk, first, stride, CHUNK, BK), dks.to(TYPE))
    tl.store(_tile(dg, first, stride, CHUNK, BK), dgs)


@triton.jit
def decode(
    q, k, v, g, beta, pages, n_valid, fresh, pool, heads, tokens, words, pages_per_row,
    out, updated, SCALE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HEADS_PER_PAGE: tl.constexpr, HEAD_WORDS: tl.constexpr,
):  # fmt: skip
    """A few tokens per request on state pages in place. One program per BV columns, head, request.

    `updated` is `pool`, aliased: uint32 pages of `words` words that hold HEADS_PER_PAGE heads of
    HEAD_WORDS words, the state first (`sampler/layout.py`). A row where `fresh` is not 0 starts
    from zeros, whatever its page holds. Rows without a valid token touch no page; tokens past a
    row's `n_valid` change no state.
    """
    TYPE: tl.constexpr = q.dtype.element_ty
    head, r = tl.program_id(1), tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * BV
    valid = tl.load(n_valid + r)
    channels, columns = tl.arange(0, K), column + tl.arange(0, BV)
    page = tl.load(pages + r * pages_per_row + head // HEADS_PER_PAGE).to(tl.int64)
    place = page * words + head % HEADS_PER_PAGE * HEAD_WORDS + column
    read = (valid > 0) & (tl.load(fresh + r) == 0)
    S = tl.load(_tile(pool, place, V, K, BV), mask=read, other=0).to(tl.float32, bitcast=True)
    for n in range(tokens):
        token = (r * tokens + n) * heads + head
        ks = tl.load(k + token * K + channels).to(tl.float32)
        qs = tl.load(q + token * K + channels).to(tl.float32) * SCALE
        decayed = S * tl.exp2(tl.load(g + token * K + channels) * LOG2E)[:, None]
        vs = tl.load(v + token * V + columns).to(tl.float32)
        u = tl.load(beta + token) * (vs - tl.sum(decayed * ks[:, None], 0))
        o = tl.sum(decayed * qs[:, None], 0) + u * tl.sum(qs * ks, 0)
        tl.store(out + token * V + columns, o.to(TYPE))
        S = tl.where(n < valid, decayed + ks[:, None] * u[None, :], S)
    bits = S.to(tl.uint32, bitcast=True)
    tl.store(_tile(updated, place, V, K, BV), bits, mask=valid > 0)
