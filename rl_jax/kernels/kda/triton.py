# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""[P] Kimi delta attention for NVIDIA GPUs: Triton kernels over chunks of 64 tokens.

Imported only where Triton is installed; `triton_launch` calls the kernels from jax. All exponents
are of base 2 and are sums of log-decays over a range of rows, never differences of longer sums. A
range never reaches past the row whose output it enters, so no output sees a later gate.

In a chunk, with G the inclusive sum of log-decays, S the entering state and A[i, j] =
sum_d k_id k_jd 2^(G_id - G_jd) for j < i (arXiv 2510.26692, sec. 3, with beta on the columns):

    y = (I + A Diag(beta))^-1 (v - (k 2^G) S);  u = beta y
    o = (q 2^G) S + P u;  S' = Diag(2^G_C) S + (k 2^(G_C - G))^T u

P is A with rows of q and the diagonal. Forward: `prepare` makes what needs no state, `scan` the
rest. Backward: `prepare`, `replay` for the states, `scan_back` for their cotangents,
`score_cotangents` and `chunk_gradients` for the rest. Tiles lie as [R N, H, 64, K or 64]. Offsets
that grow with the sequence are int64.
"""

import triton
import triton.language as tl

CHUNK = tl.constexpr(64)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _dot(a, b, TYPE: tl.constexpr):
    """a @ b in float32 from operands of TYPE; float32 operands keep float32's precision."""
    if tl.float32 == TYPE:
        return tl.dot(a.to(TYPE), b.to(TYPE), input_precision="tf32x3")
    return tl.dot(a.to(TYPE), b.to(TYPE))


@triton.jit
def _tile(pointer, first, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """ROWS x COLUMNS contiguous columns at `first`, rows `stride` apart."""
    offsets = tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, COLUMNS)[None, :]
    return pointer + first + offsets


@triton.jit
def _range(ranges, index):
    """Which tokens each row's sum number `index` holds; see `triton_launch.row_ranges`."""
    return tl.load(_tile(ranges, index * CHUNK * CHUNK, CHUNK, CHUNK, CHUNK))


@triton.jit
def _sum_rows(ones, x, TYPE: tl.constexpr):
    """ones @ x for float32 x and zeros and ones in bfloat16; the tensor cores lose nothing of it.

    Three bfloat16 parts hold all of a float32. Where operands are bfloat16, two are enough.
    """
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    sums = tl.dot(ones, middle, tl.dot(ones, high))
    if tl.float32 == TYPE:
        sums = tl.dot(ones, (rest - middle.to(tl.float32)).to(tl.bfloat16), sums)
    return sums


@triton.jit
def _is_pair(level):
    """Which (i, j) have i in the right and j in the left half of a pair of 32 >> level rows."""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    return ((i ^ j) >> (5 - level) == 1) & (i > j)


@triton.jit
def _is_block():
    """Which (i, j < i) lie in one diagonal block of 16 rows."""
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    return (i // 16 == j // 16) & (i > j)


@triton.jit
def _is_diagonal():
    return tl.arange(0, CHUNK)[:, None] == tl.arange(0, CHUNK)[None, :]


@triton.jit
def _invert(m, PRECISION: tl.constexpr):
    """(I + m)^-1 for strictly lower m, from blocks of 1 row to one of 64: X -= X m_b X.

    Never powers of m: those explode on correlated keys.
    """
    x = tl.where(_is_diagonal(), 1.0, 0.0) - tl.where(_is_pair(5), m, 0.0)
    for doubling in range(1, 6):
        below = tl.where(_is_pair(5 - doubling), m, 0.0)
        product = tl.dot(below, x, input_precision=PRECISION)
        x -= tl.dot(x, product, input_precision=PRECISION)
    return x


@triton.jit
def prepare(
    q, k, g, beta, ranges, heads, read_q, read_k, write_k, total, causal, inverse, adjoint,
    SCALE: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, LEVELS: tl.constexpr,
    CENTRE: tl.constexpr,
):  # fmt: skip
    """What a chunk's outputs take from its keys, queries and gates. One program per chunk and head.

    Writes q 2^G, k 2^G, k 2^(G_C - G), 2^G_C, P and (I + A Diag(beta))^-1; where `adjoint` is
    given, (I + Diag(beta) A)^-1 too. P and A come from LEVELS pairs of halves (32, 16, ... rows),
    whose factors are at most 1. With 2 levels, diagonal blocks of 16 rows follow, whose factors
    reach 2^+-CENTRE; with 6, any gate is exact.
    """
    TYPE: tl.constexpr = q.dtype.element_ty
    program = tl.program_id(0).to(tl.int64)
    chunk, head = program // heads, program % heads
    row, token = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    p = tl.zeros([CHUNK, CHUNK], tl.float32)
    a = tl.zeros([CHUNK, CHUNK], tl.float32)
    for channel in range(0, K, BK):
        first = (chunk * CHUNK * heads + head) * K + channel
        qs = tl.load(_tile(q, first, heads * K, CHUNK, BK)).to(tl.float32) * SCALE
        ks = tl.load(_tile(k, first, heads * K, CHUNK, BK)).to(tl.float32)
        gs = tl.load(_tile(g, first, heads * K, CHUNK, BK)) * LOG2E
        tile = program * CHUNK * K + channel
        decay = tl.exp2(_sum_rows(_range(ranges, 0), gs, TYPE))
        tl.store(_tile(read_q, tile, K, CHUNK, BK), (qs * decay).to(TYPE))
        tl.store(_tile(read_k, tile, K, CHUNK, BK), (ks * decay).to(TYPE))
        rest = tl.exp2(_sum_rows(_range(ranges, 1), gs, TYPE))
        tl.store(_tile(write_k, tile, K, CHUNK, BK), (ks * rest).to(TYPE))
        channels = program * K + channel + tl.arange(0, BK)
        tl.store(total + channels, tl.exp2(tl.sum(gs, 0)))
        p += tl.where(token == row, tl.sum(qs * ks, 1)[:, None], 0.0)
        for level in range(LEVELS):
            decay = tl.exp2(_sum_rows(_range(ranges, 2 + level), gs, TYPE))
            right = tl.trans((ks * decay).to(TYPE))
            p += tl.where(_is_pair(level), _dot(qs * decay, right, TYPE), 0.0)
            a += tl.where(_is_pair(level), _dot(ks * decay, right, TYPE), 0.0)
        if LEVELS == 2:
            within = _sum_rows(_range(ranges, 2 + LEVELS), gs, TYPE) + CENTRE
            decay = tl.exp2(within)
            right = tl.trans((ks * tl.exp2(-within)).to(TYPE))
            p += tl.where(_is_block(), _dot(qs * decay, right, TYPE), 0.0)
            a += tl.where(_is_block(), _dot(ks * decay, right, TYPE), 0.0)
    square = program * CHUNK * CHUNK
    tl.store(_tile(causal, square, CHUNK, CHUNK, CHUNK), p.to(TYPE))
    PRECISION: tl.constexpr = "tf32x3" if tl.float32 == TYPE else "bf16x3"
    rows = tl.arange(0, CHUNK)
    betas = tl.load(beta + (chunk * CHUNK + rows) * heads + head)
    x = _invert(a * betas[None, :], PRECISION)
    tl.store(_tile(inverse, square, CHUNK, CHUNK, CHUNK), x.to(TYPE))
    if adjoint is not None:
        x = tl.where(_is_diagonal(), 1.0, 0.0) - betas[:, None] * tl.dot(
            x, a, input_precision=PRECISION
        )
        tl.store(_tile(adjoint, square, CHUNK, CHUNK, CHUNK), x.to(TYPE))


@triton.jit
def _delta(S, read_k, inverse, v, tile, first, stride, K: tl.constexpr, BV: tl.constexpr):
    """y = (I + A Diag(beta))^-1 (v - (k 2^G) S) of one chunk."""
    TYPE: tl.constexpr = v.dtype.element_ty
    keys = tl.load(_tile(read_k, tile * CHUNK * K, K, CHUNK, K))
    values = tl.load(_tile(v, first, stride, CHUNK, BV)).to(tl.float32)
    solve = tl.load(_tile(inverse, tile * CHUNK * CHUNK, CHUNK, CHUNK, CHUNK))
    return _dot(solve, values - _dot(keys, S, TYPE), TYPE)


@triton.jit
def _write(S, u, write_k, total, tile, K: tl.constexpr, TYPE: tl.constexpr):
    """Diag(2^G_C) S + (k 2^(G_C - G))^T u."""
    keys = tl.load(_tile(write_k, tile * CHUNK * K, K, CHUNK, K))
    keep = tl.load(total + tile * K + tl.arange(0, K))
    return S * keep[:, None] + _dot(tl.trans(keys), u, TYPE)


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
        scores = tl.load(_tile(causal, tile * CHUNK * CHUNK, CHUNK, CHUNK, CHUNK))
        o = _dot(queries, S, TYPE) + _dot(scores, u, TYPE)
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
        scores = tl.load(_tile(causal, tile * CHUNK * CHUNK, CHUNK, CHUNK, CHUNK))
        keys = tl.load(_tile(write_k, tile * CHUNK * K, K, CHUNK, K))
        sums = _dot(tl.trans(scores), outer, TYPE) + _dot(keys, dS, TYPE)
        solve = tl.load(_tile(adjoint, tile * CHUNK * CHUNK, CHUNK, CHUNK, CHUNK))
        change = _dot(tl.trans(solve), sums, TYPE)
        tl.store(_tile(du, tile * CHUNK * V + column, V, CHUNK, BV), change.to(TYPE))
        dv = change * tl.load(beta + token)[:, None]
        keep = tl.load(total + tile * K + tl.arange(0, K))
        queries = tl.load(_tile(read_q, tile * CHUNK * K, K, CHUNK, K))
        keys = tl.load(_tile(read_k, tile * CHUNK * K, K, CHUNK, K))
        dS = dS * keep[:, None] + _dot(tl.trans(queries), outer, TYPE)
        dS -= _dot(tl.trans(keys), dv, TYPE)
        dS = tl.where(tl.load(reset + chunk) != 0, 0.0, dS)
    tl.store(_tile(dstate, square, V, K, BV), dS)


@triton.jit
def _score_gradients(dp, da, q, k, rows, columns, mask, TYPE: tl.constexpr):
    """Gradients of q and k (as row, as column) from cotangents of P and A where `mask`.

    `rows` and `columns` are the two factors of the decay between a row and a column.
    """
    keys = (k * columns).to(TYPE)
    dp = tl.where(mask, dp, 0.0).to(TYPE)
    dq = rows * _dot(dp, keys, TYPE)
    as_column = _dot(tl.trans(dp), q * rows, TYPE)
    da = tl.where(mask, da, 0.0).to(TYPE)
    as_row = rows * _dot(da, keys, TYPE)
    as_column += _dot(tl.trans(da), k * rows, TYPE)
    return dq, as_row, columns * as_column


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
        y = tl.load(_tile(delta, inner, V, CHUNK, BV)).to(tl.float32)
        change = tl.load(_tile(du, inner, V, CHUNK, BV)).to(tl.float32)
        dbetas += tl.sum(y * change, 1)
        u, dvs = (y * betas[:, None]).to(TYPE), (change * betas[:, None]).to(TYPE)
        tl.store(_tile(dv, first, heads * V, CHUNK, BV), dvs)
        dp += _dot(outer, tl.trans(u), TYPE)
        da -= _dot(dvs, tl.trans(u), TYPE)
    tl.store(dbeta + token, dbetas)
    square = program * CHUNK * CHUNK
    tl.store(_tile(dcausal, square, CHUNK, CHUNK, CHUNK), dp.to(TYPE))
    tl.store(_tile(dlower, square, CHUNK, CHUNK, CHUNK), da.to(TYPE))


@triton.jit
def chunk_gradients(
    q, k, g, beta, do, entering, delta, dstates, du, dcausal, dlower, ranges, heads, dq, dk, dg,
    SCALE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    LEVELS: tl.constexpr, CENTRE: tl.constexpr,
):  # fmt: skip
    """Gradients of q, k and g within a chunk. One program per BK channels of a chunk and head.

    Decay factors as in `prepare`. The gradient of a sum of log-decays goes to those it holds, so
    that nothing is added and taken away again but within 16 rows.
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
        u = tl.load(_tile(delta, inner, V, CHUNK, BV)).to(tl.float32) * betas
        dvs = tl.load(_tile(du, inner, V, CHUNK, BV)).to(tl.float32) * betas
        S = tl.load(_tile(entering, square, V, BK, BV))
        dS = tl.load(_tile(dstates, square, V, BK, BV))
        dread_q += _dot(outer, tl.trans(S), TYPE)
        dread_k -= _dot(dvs, tl.trans(S), TYPE)
        dwrite_k += _dot(u, tl.trans(dS), TYPE)
        dtotal += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
    square = program * CHUNK * CHUNK
    dp = tl.load(_tile(dcausal, square, CHUNK, CHUNK, CHUNK))
    da = tl.load(_tile(dlower, square, CHUNK, CHUNK, CHUNK))
    row, token = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    first = (chunk * CHUNK * heads + head) * K + channel
    qs = tl.load(_tile(q, first, heads * K, CHUNK, BK)).to(tl.float32) * SCALE
    ks = tl.load(_tile(k, first, heads * K, CHUNK, BK)).to(tl.float32)
    gs = tl.load(_tile(g, first, heads * K, CHUNK, BK)) * LOG2E
    diagonal = tl.sum(tl.where(token == row, dp, 0.0).to(tl.float32), 1)[:, None]
    decay = tl.exp2(_sum_rows(_range(ranges, 0), gs, TYPE))
    dqs, dks = dread_q * decay, dread_k * decay
    dgs = _sum_rows(tl.trans(_range(ranges, 0)), qs * dqs + ks * dks, TYPE)
    dgs += (dtotal * tl.exp2(tl.sum(gs, 0)))[None, :]
    written = dwrite_k * tl.exp2(_sum_rows(_range(ranges, 1), gs, TYPE))
    dgs += _sum_rows(tl.trans(_range(ranges, 1)), ks * written, TYPE)
    dqs, dks = dqs + diagonal * ks, dks + diagonal * qs + written
    for level in range(LEVELS):
        decay = tl.exp2(_sum_rows(_range(ranges, 2 + level), gs, TYPE))
        mask = _is_pair(level)
        x, y, z = _score_gradients(dp, da, qs, ks, decay, decay, mask, TYPE)
        dqs, dks = dqs + x, dks + y + z
        dgs += _sum_rows(tl.trans(_range(ranges, 2 + level)), qs * x + ks * (y + z), TYPE)
    if LEVELS == 2:
        sums = _sum_rows(_range(ranges, 2 + LEVELS), gs, TYPE) + CENTRE
        rows, columns = tl.exp2(sums), tl.exp2(-sums)
        x, y, z = _score_gradients(dp, da, qs, ks, rows, columns, _is_block(), TYPE)
        dqs, dks = dqs + x, dks + y + z
        dgs += _sum_rows(tl.trans(_range(ranges, 2 + LEVELS)), qs * x + ks * (y - z), TYPE)
    tl.store(_tile(dq, first, heads * K, CHUNK, BK), (dqs * SCALE).to(TYPE))
    tl.store(_tile(dk, first, heads * K, CHUNK, BK), dks.to(TYPE))
    tl.store(_tile(dg, first, heads * K, CHUNK, BK), dgs)


@triton.jit
def decode(
    q, k, v, g, beta, pages, n_valid, pool, heads, tokens, words, pages_per_row,
    out, updated, SCALE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HEADS_PER_PAGE: tl.constexpr, HEAD_WORDS: tl.constexpr,
):  # fmt: skip
    """A few tokens per request on state pages in place. One program per BV columns, head, request.

    `updated` is `pool`, aliased: uint32 pages of `words` words that hold HEADS_PER_PAGE heads of
    HEAD_WORDS words, the state first (`sampler/layout.py`). Rows without a valid token touch no
    page; tokens past a row's `n_valid` change no state.
    """
    TYPE: tl.constexpr = q.dtype.element_ty
    head, r = tl.program_id(1), tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * BV
    valid = tl.load(n_valid + r)
    channels, columns = tl.arange(0, K), column + tl.arange(0, BV)
    page = tl.load(pages + r * pages_per_row + head // HEADS_PER_PAGE).to(tl.int64)
    place = page * words + head % HEADS_PER_PAGE * HEAD_WORDS + column
    S = tl.load(_tile(pool, place, V, K, BV), mask=valid > 0, other=0).to(tl.float32, bitcast=True)
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
