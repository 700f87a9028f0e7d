# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""[P] Latent attention for NVIDIA GPUs: Triton kernels over heads' own keys and over pool pages.

Imported only where Triton is installed; `triton_launch` calls the kernels from jax. All are flash
attention (arXiv 2205.14135): keys in ascending blocks, an online softmax in base 2, scores never
stored. A block in which a query sees no key changes no bit of its output. A width is two parts of a
power of two, W0 + W1 (192 = 128 + 64), the last one padded; W1 is 0 where one part is enough.
`heads_*` take rows [R, L, H, width] and write the logarithm of the mass, base 2, as [R, H, L];
`pages_*` take absorbed queries [R, n, H, W] and pages of `lines` lines, 64 tokens x W numbers each;
a token's value is the first V of its W. W0 + W1 < W asks for scores from slices of W0 columns.
Offsets that grow with rows, tokens or pages are int64. No kernel adds to memory that another
program writes, so results are the same in every run.
"""

import triton
import triton.language as tl

CHUNK = tl.constexpr(64)
LANES = tl.constexpr(128)
"""Words per line; a multiple of 4, so that wide loads are known to be aligned."""
LOWEST = tl.constexpr(-1e30)
"""Stands for minus infinity: differences of it stay numbers."""


@triton.jit
def _dot(a, b, added, TYPE: tl.constexpr):
    """added + a @ b in float32, operands of TYPE; those of float32 keep float32's precision."""
    if tl.float32 == TYPE:
        product = tl.dot(a.to(TYPE), b.to(TYPE), added, input_precision="tf32x3")
    else:
        product = tl.dot(a.to(TYPE), b.to(TYPE), added)
    return product


@triton.jit
def _places(pointer, stride, ROWS: tl.constexpr, FROM: tl.constexpr, COLUMNS: tl.constexpr):
    """ROWS x COLUMNS numbers from column FROM on, rows `stride` apart."""
    columns = FROM + tl.arange(0, COLUMNS)
    return pointer + tl.arange(0, ROWS)[:, None] * stride + columns[None, :]


@triton.jit
def _mask(inside, FROM: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr):
    """Rows that are `inside` (None: all) and columns before WIDTH; None where that is all."""
    mask = None if inside is None else inside[:, None]
    if FROM + COLUMNS > WIDTH:
        known = (FROM + tl.arange(0, COLUMNS) < WIDTH)[None, :]
        mask = known if mask is None else mask & known
    return mask


@triton.jit
def _read(
    pointer, stride, inside,
    ROWS: tl.constexpr, FROM: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Zeros where a row is not `inside` and past WIDTH columns."""
    places = _places(pointer, stride, ROWS, FROM, COLUMNS)
    mask = _mask(inside, FROM, COLUMNS, WIDTH)
    return tl.load(places) if mask is None else tl.load(places, mask=mask, other=0)


@triton.jit
def _write(
    pointer, stride, inside, x,
    ROWS: tl.constexpr, FROM: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    places = _places(pointer, stride, ROWS, FROM, COLUMNS)
    tl.store(places, x.to(pointer.dtype.element_ty), mask=_mask(inside, FROM, COLUMNS, WIDTH))


@triton.jit
def _read_parts(
    pointer, stride, inside,
    ROWS: tl.constexpr, W: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
):  # fmt: skip
    """Both parts of ROWS rows of width W; the first twice where there is no second."""
    low = _read(pointer, stride, inside, ROWS, 0, W0, W)
    high = low
    if W1 > 0:
        high = _read(pointer, stride, inside, ROWS, W0, W1, W)
    return low, high


@triton.jit
def _scores(a0, a1, b0, b1, W1: tl.constexpr, TYPE: tl.constexpr):
    """a @ b^T over both parts."""
    scores = _dot(a0, tl.trans(b0), None, TYPE)
    if W1 > 0:
        scores = _dot(a1, tl.trans(b1), scores, TYPE)
    return scores


@triton.jit
def _fold(scores, seen, values, peak, mass, total, SCALE: tl.constexpr, TYPE: tl.constexpr):
    """One step of the online softmax; `seen` says which keys a query sees, None: all.

    The multiply-add is spelled out so that blocks with and without `seen` round alike.
    """
    if seen is not None:
        scores = tl.where(seen, scores, LOWEST)
    higher = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(tl.fma(scores, SCALE, -higher[:, None] * SCALE))
    if seen is not None:
        weights = tl.where(seen, weights, 0.0)
    keep = tl.exp2((peak - higher) * SCALE)
    mass = mass * keep + tl.sum(weights, 1)
    return higher, mass, _dot(weights, values, total * keep[:, None], TYPE)


# --- heads with keys and values of their own, packed rows


@triton.jit
def _is_seen(row_of_query, row_of_key, of_query, of_key):
    """Which (query, key) are of one segment, the key no later."""
    return (of_query[:, None] == of_key[None, :]) & (row_of_query[:, None] >= row_of_key[None, :])


@triton.jit
def _fold_keys(
    q0, q1, of_query, query, k, v, of_keys, row, begin, end, heads, peak, mass, total,
    MASKED: tl.constexpr, SCALE: tl.constexpr, A: tl.constexpr, A0: tl.constexpr, A1: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Keys begin .. end of a row into the softmax of a block of queries."""
    TYPE: tl.constexpr = q0.dtype
    for n in range(begin, end, BN):
        token = row + n
        k0, k1 = _read_parts(k + token * heads * A, heads * A, None, BN, A, A0, A1)
        scores = _scores(q0, q1, k0, k1, A1, TYPE)
        values = _read(v + token * heads * V, heads * V, None, BN, 0, BV, V)
        seen = None
        if MASKED:
            key = n + tl.arange(0, BN)
            seen = _is_seen(query, key, of_query, tl.load(of_keys + row + key))
        peak, mass, total = _fold(scores, seen, values, peak, mass, total, SCALE, TYPE)
    return peak, mass, total


@triton.jit
def heads_forward(
    q, k, v, segments, of_keys, at, first, clear, heads, length, keys, out, log_mass,
    SCALE: tl.constexpr, A: tl.constexpr, A0: tl.constexpr, A1: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Outputs of BM queries of a head of a row: one program. The last block, the longest, is first.

    A row's `length` queries are tokens at[0].. of its `keys` keys, at[0] a multiple of 64. From
    `first` on keys are of some query's segment; those from `clear` on and before the block are of
    every query's. SCALE includes log2 e. Padding gets zeros, and a mass so large that the backward
    pass gives it no weight.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head, r = tl.program_id(1), tl.program_id(2).to(tl.int64)
    own = block * BM + tl.arange(0, BM)
    inside = own < length
    of_query = tl.load(segments + r * length + own, mask=inside, other=-1)
    place = (r * length + block * BM) * heads + head
    q0, q1 = _read_parts(q + place * A, heads * A, inside, BM, A, A0, A1)
    begin = tl.load(first + r * tl.num_programs(0) + block)
    plain = tl.load(clear + r * tl.num_programs(0) + block)
    peak = tl.full([BM], LOWEST, tl.float32)
    mass = tl.zeros([BM], tl.float32)
    total = tl.zeros([BM, BV], tl.float32)
    row, start = r * keys, tl.load(at) + block * BM
    query = start + tl.arange(0, BM)
    k += head * A
    v += head * V
    peak, mass, total = _fold_keys(
        q0, q1, of_query, query, k, v, of_keys, row, begin, tl.minimum(plain, start), heads,
        peak, mass, total, True, SCALE, A, A0, A1, V, BV, BN,
    )  # fmt: skip
    peak, mass, total = _fold_keys(
        q0, q1, of_query, query, k, v, of_keys, row, plain, start, heads,
        peak, mass, total, False, SCALE, A, A0, A1, V, BV, BN,
    )  # fmt: skip
    peak, mass, total = _fold_keys(
        q0, q1, of_query, query, k, v, of_keys, row, tl.maximum(begin, start),
        tl.minimum(start + BM, keys), heads,
        peak, mass, total, True, SCALE, A, A0, A1, V, BV, BN,
    )  # fmt: skip
    real = of_query >= 0
    mass = tl.where(real & (mass > 0), mass, 1.0)
    total = tl.where(real[:, None], total / mass[:, None], 0.0)
    _write(out + place * V, heads * V, inside, total, BM, 0, BV, V)
    logs = tl.where(real, peak * SCALE + tl.log2(mass), -LOWEST)
    tl.store(log_mass + (r * heads + head) * length + own, logs, mask=inside)


@triton.jit
def _pull_queries(
    q0, q1, outer, logs, inner, of_query, query, k, v, of_keys, row, begin, end, heads, dq0, dq1,
    MASKED: tl.constexpr, SCALE: tl.constexpr, A: tl.constexpr, A0: tl.constexpr, A1: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Adds what keys begin .. end of a row give to the gradients of a block of queries."""
    TYPE: tl.constexpr = q0.dtype
    for n in range(begin, end, BN):
        token = row + n
        k0, k1 = _read_parts(k + token * heads * A, heads * A, None, BN, A, A0, A1)
        values = _read(v + token * heads * V, heads * V, None, BN, 0, BV, V)
        scores = _scores(q0, q1, k0, k1, A1, TYPE)
        weights = tl.exp2(tl.fma(scores, SCALE, -logs[:, None]))
        if MASKED:
            key = n + tl.arange(0, BN)
            seen = _is_seen(query, key, of_query, tl.load(of_keys + row + key))
            weights = tl.where(seen, weights, 0.0)
        change = _dot(outer, tl.trans(values), None, TYPE)
        change = weights * (change - inner[:, None])
        dq0 = _dot(change, k0, dq0, TYPE)
        if A1 > 0:
            dq1 = _dot(change, k1, dq1, TYPE)
    return dq0, dq1


@triton.jit
def heads_query_gradients(
    q, k, v, do, log_mass, delta, segments, of_keys, at, first, clear, heads, length, keys, dq,
    SCALE: tl.constexpr, FACTOR: tl.constexpr,
    A: tl.constexpr, A0: tl.constexpr, A1: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradients of BM queries: one program. `delta` is sum(do * out); FACTOR scales scores."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head, r = tl.program_id(1), tl.program_id(2).to(tl.int64)
    own = block * BM + tl.arange(0, BM)
    inside = own < length
    of_query = tl.load(segments + r * length + own, mask=inside, other=-1)
    place = (r * length + block * BM) * heads + head
    q0, q1 = _read_parts(q + place * A, heads * A, inside, BM, A, A0, A1)
    outer = _read(do + place * V, heads * V, inside, BM, 0, BV, V)
    kept = (r * heads + head) * length + own
    logs = tl.load(log_mass + kept, mask=inside, other=-LOWEST)
    inner = tl.load(delta + kept, mask=inside, other=0.0)
    begin = tl.load(first + r * tl.num_programs(0) + block)
    plain = tl.load(clear + r * tl.num_programs(0) + block)
    dq0 = tl.zeros([BM, A0], tl.float32)
    dq1 = tl.zeros([BM, A1 if A1 > 0 else 16], tl.float32)
    row, start = r * keys, tl.load(at) + block * BM
    query = start + tl.arange(0, BM)
    k += head * A
    v += head * V
    dq0, dq1 = _pull_queries(
        q0, q1, outer, logs, inner, of_query, query, k, v, of_keys, row,
        begin, tl.minimum(plain, start), heads, dq0, dq1, True, SCALE, A, A0, A1, V, BV, BN,
    )  # fmt: skip
    dq0, dq1 = _pull_queries(
        q0, q1, outer, logs, inner, of_query, query, k, v, of_keys, row,
        plain, start, heads, dq0, dq1, False, SCALE, A, A0, A1, V, BV, BN,
    )  # fmt: skip
    dq0, dq1 = _pull_queries(
        q0, q1, outer, logs, inner, of_query, query, k, v, of_keys, row,
        tl.maximum(begin, start), tl.minimum(start + BM, keys), heads,
        dq0, dq1, True, SCALE, A, A0, A1, V, BV, BN,
    )  # fmt: skip
    _write(dq + place * A, heads * A, inside, dq0 * FACTOR, BM, 0, A0, A)
    if A1 > 0:
        _write(dq + place * A, heads * A, inside, dq1 * FACTOR, BM, A0, A1, A)


@triton.jit
def _pull_keys(
    k0, k1, values, of_key, key, q, do, log_mass, delta, segments, row, begin, end, heads,
    dk0, dk1, dv,
    MASKED: tl.constexpr, SCALE: tl.constexpr, A: tl.constexpr, A0: tl.constexpr, A1: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Adds what queries begin .. end of a row give to a block's keys and values; `key` counts as
    they do.

    Scores lie transposed, keys x queries, so that they are the products' left operands.
    """
    TYPE: tl.constexpr = k0.dtype
    for n in range(begin, end, BN):
        token = row + n
        query = n + tl.arange(0, BN)
        q0, q1 = _read_parts(q + token * heads * A, heads * A, None, BN, A, A0, A1)
        outer = _read(do + token * heads * V, heads * V, None, BN, 0, BV, V)
        scores = _scores(k0, k1, q0, q1, A1, TYPE)
        weights = tl.exp2(tl.fma(scores, SCALE, -tl.load(log_mass + query)[None, :]))
        if MASKED:
            of_query = tl.load(segments + row + query)
            seen = (of_key[:, None] == of_query[None, :]) & (key[:, None] <= query[None, :])
            weights = tl.where(seen, weights, 0.0)
        dv = _dot(weights, outer, dv, TYPE)
        change = _dot(values, tl.trans(outer), None, TYPE)
        change = weights * (change - tl.load(delta + query)[None, :])
        dk0 = _dot(change, q0, dk0, TYPE)
        if A1 > 0:
            dk1 = _dot(change, q1, dk1, TYPE)
    return dk0, dk1, dv


@triton.jit
def heads_key_gradients(
    q, k, v, do, log_mass, delta, segments, of_keys, at, last, clear, heads, length, keys, dk, dv,
    SCALE: tl.constexpr, FACTOR: tl.constexpr,
    A: tl.constexpr, A0: tl.constexpr, A1: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Gradients of BM keys and values: one program.

    Queries before `last` are of some key's segment; those past the block and before `clear` are of
    every key's. Both count a row's `length` queries, tokens at[0].. of its `keys` keys.
    """
    block, head = tl.program_id(0), tl.program_id(1)
    r = tl.program_id(2).to(tl.int64)
    own = block * BM + tl.arange(0, BM)
    inside = own < keys
    of_key = tl.load(of_keys + r * keys + own, mask=inside, other=-1)
    place = (r * keys + block * BM) * heads + head
    k0, k1 = _read_parts(k + place * A, heads * A, inside, BM, A, A0, A1)
    values = _read(v + place * V, heads * V, inside, BM, 0, BV, V)
    end = tl.load(last + r * tl.num_programs(0) + block)
    row, start = r * length, block * BM - tl.load(at)
    key, begin, past = start + tl.arange(0, BM), tl.maximum(start, 0), tl.maximum(start + BM, 0)
    plain = tl.maximum(tl.load(clear + r * tl.num_programs(0) + block), past)
    dk0 = tl.zeros([BM, A0], tl.float32)
    dk1 = tl.zeros([BM, A1 if A1 > 0 else 16], tl.float32)
    dvs = tl.zeros([BM, BV], tl.float32)
    q += head * A
    do += head * V
    log_mass += (r * heads + head) * length
    delta += (r * heads + head) * length
    dk0, dk1, dvs = _pull_keys(
        k0, k1, values, of_key, key, q, do, log_mass, delta, segments, row,
        begin, tl.minimum(past, end), heads,
        dk0, dk1, dvs, True, SCALE, A, A0, A1, V, BV, BN,
    )  # fmt: skip
    dk0, dk1, dvs = _pull_keys(
        k0, k1, values, of_key, key, q, do, log_mass, delta, segments, row,
        past, plain, heads, dk0, dk1, dvs, False, SCALE, A, A0, A1, V, BV, BN,
    )  # fmt: skip
    dk0, dk1, dvs = _pull_keys(
        k0, k1, values, of_key, key, q, do, log_mass, delta, segments, row,
        plain, end, heads, dk0, dk1, dvs, True, SCALE, A, A0, A1, V, BV, BN,
    )  # fmt: skip
    _write(dk + place * A, heads * A, inside, dk0 * FACTOR, BM, 0, A0, A)
    if A1 > 0:
        _write(dk + place * A, heads * A, inside, dk1 * FACTOR, BM, A0, A1, A)
    _write(dv + place * V, heads * V, inside, dvs, BM, 0, BV, V)


# --- absorbed queries on pool pages


@triton.jit
def _scores_by_slices(
    own, inside, place, written,
    W: tl.constexpr, SLICE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """q @ k^T from SLICE columns of both at a time, for queries too wide for the registers."""
    scores = tl.zeros([BM, BN], tl.float32)
    for column in range(0, W, SLICE):
        qs = _read(own + column, W, inside, BM, 0, SLICE, SLICE)
        ks = _read(place + column, W, written, BN, 0, SLICE, SLICE)
        ks = ks.to(tl.float32, bitcast=True)
        scores = _dot(qs, tl.trans(ks), scores, own.dtype.element_ty)
    return scores


@triton.jit
def _fold_pages(
    own, inside, q0, q1, limit, pool, table, begin, end, lines, peak, mass, total,
    MASKED: tl.constexpr, SCALE: tl.constexpr, W: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Tokens begin .. end of one request into the softmax of queries that see up to `limit`.

    All of them are written; the rest of the last page, where MASKED, is not read.
    """
    TYPE: tl.constexpr = q0.dtype
    for n in range(begin, end, BN):
        number = n // CHUNK
        page = tl.load(table + number).to(tl.int64)
        place = pool + page * lines * LANES + (n - number * CHUNK) * W
        seen = None
        written = None
        if MASKED:
            key = n + tl.arange(0, BN)
            written = key < end
            seen = key[None, :] <= limit[:, None]
        if W0 + W1 < W:
            scores = _scores_by_slices(own, inside, place, written, W, W0, BM, BN)
            values = _read(place, W, written, BN, 0, BV, V).to(tl.float32, bitcast=True)
        else:
            k0, k1 = _read_parts(place, W, written, BN, W, W0, W1)
            k0 = k0.to(tl.float32, bitcast=True).to(TYPE)
            k1 = k1.to(tl.float32, bitcast=True).to(TYPE)
            values = k0
            if V != W0:
                values = _read(place, W, written, BN, 0, BV, V).to(tl.float32, bitcast=True)
            scores = _scores(q0, q1, k0, k1, W1, TYPE)
        peak, mass, total = _fold(scores, seen, values, peak, mass, total, SCALE, TYPE)
    return peak, mass, total


@triton.jit
def _limits(rows, r, positions, n_valid, heads, count):
    """The last token that each query (a token's head) sees; -1 where it is none or not valid."""
    token = rows // heads
    valid = (rows < count) & (token < tl.load(n_valid + r))
    return tl.where(valid, tl.load(positions + r) + token, -1)


@triton.jit
def _attend_pages(
    q, pool, pages, r, first, limit, begin, end, lines, width, count,
    SCALE: tl.constexpr, W: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Peak, mass and weighted values of BM queries over the tokens begin .. end they see."""
    end = tl.minimum(end, tl.max(limit) + 1)
    clear = (tl.min(tl.where(limit < 0, 2**30, limit)) + 1) // BN * BN
    plain = tl.minimum(clear, end)
    inside = first + tl.arange(0, BM) < count
    own = q + (r * count + first) * W
    q0, q1 = _read_parts(own, W, inside, BM, W, W0, W1)
    peak = tl.full([BM], LOWEST, tl.float32)
    mass = tl.zeros([BM], tl.float32)
    total = tl.zeros([BM, BV], tl.float32)
    table = pages + r * width
    peak, mass, total = _fold_pages(
        own, inside, q0, q1, limit, pool, table, begin, plain, lines,
        peak, mass, total,
        False, SCALE, W, W0, W1, V, BV, BM, BN,
    )  # fmt: skip
    return _fold_pages(
        own, inside, q0, q1, limit, pool, table, tl.maximum(begin, plain), end, lines,
        peak, mass, total,
        True, SCALE, W, W0, W1, V, BV, BM, BN,
    )  # fmt: skip


@triton.jit
def pages_part(
    q, pool, pages, positions, n_valid, heads, count, lines, width, peaks, masses, sums,
    SCALE: tl.constexpr, W: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """What PART pages of a request give to BM of its `count` queries (tokens x heads): one program.

    Writes peaks and masses [R, parts, count] and sums [R, parts, count, V] of the parts that some
    query of its block sees.
    """
    part, r = tl.program_id(1), tl.program_id(2).to(tl.int64)
    first = tl.program_id(0) * BM
    rows = first + tl.arange(0, BM)
    limit = _limits(rows, r, positions, n_valid, heads, count)
    begin = part * PART * CHUNK
    if begin > tl.max(limit):
        return
    peak, mass, total = _attend_pages(
        q, pool, pages, r, first, limit, begin, begin + PART * CHUNK, lines, width, count,
        SCALE, W, W0, W1, V, BV, BM, BN,
    )  # fmt: skip
    at = (r * tl.num_programs(1) + part) * count
    inside = rows < count
    tl.store(peaks + at + rows, peak, mask=inside)
    tl.store(masses + at + rows, mass, mask=inside)
    _write(sums + (at + first) * V, V, inside, total, BM, 0, BV, V)


@triton.jit
def pages_merge(
    peaks, masses, sums, positions, n_valid, heads, count, parts, out,
    SCALE: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The parts a query sees, in ascending order: one program per query."""
    query, r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = query // heads
    valid = token < tl.load(n_valid + r)
    limit = tl.load(positions + r) + token
    used = tl.where(valid, limit // (PART * CHUNK) + 1, 0)
    columns = tl.arange(0, BV)
    known = columns < V
    peak, mass = LOWEST + 0.0, 0.0
    total = tl.zeros([BV], tl.float32)
    for part in range(used):
        at = (r * parts + part) * count + query
        other = tl.load(peaks + at)
        higher = tl.maximum(peak, other)
        keep, take = tl.exp2((peak - higher) * SCALE), tl.exp2((other - higher) * SCALE)
        mass = mass * keep + tl.load(masses + at) * take
        total = total * keep + tl.load(sums + at * V + columns, mask=known, other=0.0) * take
        peak = higher
    total /= tl.where(valid, mass, 1.0)
    place = out + (r * count + query) * V + columns
    tl.store(place, total.to(out.dtype.element_ty), mask=known)


@triton.jit
def pages_prefill(
    q, pool, pages, positions, n_valid, heads, count, lines, width, out,
    SCALE: tl.constexpr, W: tl.constexpr, W0: tl.constexpr, W1: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """BM of a request's queries (tokens x heads) over all pages they see: one program."""
    r = tl.program_id(1).to(tl.int64)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    rows = first + tl.arange(0, BM)
    limit = _limits(rows, r, positions, n_valid, heads, count)
    _, mass, total = _attend_pages(
        q, pool, pages, r, first, limit, 0, 2**30, lines, width, count,
        SCALE, W, W0, W1, V, BV, BM, BN,
    )  # fmt: skip
    total = tl.where((limit >= 0)[:, None], total / tl.where(mass > 0, mass, 1.0)[:, None], 0.0)
    _write(out + (r * count + first) * V, V, rows < count, total, BM, 0, BV, V)
