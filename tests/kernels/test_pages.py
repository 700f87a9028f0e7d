"""Kernels on pool pages: float64 oracles, and bits that go nowhere else and come from nowhere."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.kernels.kda import api as kda
from rl_jax.kernels.kda import reference as kda_reference
from rl_jax.kernels.mla import api as mla
from rl_jax.kernels.mla import checks
from rl_jax.kernels.mla import reference as mla_reference
from rl_jax.kernels.mla import walk as page_walk
from rl_jax.kernels.pages import read_lines, write_lines
from tests.fakes.compiling import QUICK

H, K, V = 4, 8, 24
STATE_LINES, HEAD_LINES, LINES = 2, 8, 24
ROWS, PAGES = 3, 40
NAN = 0x7FC00123

decode = jax.jit(partial(kda.decode, head_lines=HEAD_LINES))
quick_decode = jax.jit(partial(kda.decode, head_lines=HEAD_LINES), compiler_options=QUICK)


def garbage(seed: int, pages: int = PAGES, lines: int = LINES) -> np.ndarray:
    """Pool bits, every second word a NaN with a payload."""
    words = np.random.default_rng(seed).integers(0, 2**32, (pages, lines, 128), np.uint32)
    return np.where(words % 2, np.uint32(NAN), words)


# --- states --------------------------------------------------------------------------------------


class Case(NamedTuple):
    operands: list[np.ndarray]
    pool: np.ndarray
    pages: np.ndarray
    states: np.ndarray
    """float32[R, H, K, V]: what the pool holds."""


def place(head: int) -> tuple[int, slice]:
    """(number of the page within the row, lines of the state): two heads a page."""
    start = head % 2 * HEAD_LINES
    return head // 2, slice(start, start + STATE_LINES)


def states_of(pool: np.ndarray, pages: np.ndarray) -> np.ndarray:
    found = np.empty((len(pages), H, K, V), np.float32)
    for row, head in np.ndindex(len(pages), H):
        page, lines = place(head)
        words = pool[pages[row, page], lines].reshape(-1)[: K * V]
        found[row, head] = words.view(np.float32).reshape(K, V)
    return found


def case(tokens: int, seed: int = 0) -> Case:
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, ROWS, tokens, H, K))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((ROWS, tokens, H, V))
    g = -5 * rng.random((ROWS, tokens, H, K)) ** 4
    beta = 2 * rng.random((ROWS, tokens, H))
    pool, pages = garbage(seed), rng.permutation(np.arange(1, PAGES, dtype=np.int32))
    pages = pages[: ROWS * 2].reshape(ROWS, 2)
    states = rng.standard_normal((ROWS, H, K, V)).astype(np.float32)
    for row, head in np.ndindex(ROWS, H):
        page, lines = place(head)
        words = np.zeros(STATE_LINES * 128, np.float32)
        words[: K * V] = states[row, head].reshape(-1)
        pool[pages[row, page], lines] = words.view(np.uint32).reshape(-1, 128)
    return Case([x.astype(np.float32) for x in (q, k, v, g, beta)], pool, pages, states)


@partial(jax.jit, compiler_options=QUICK)
def recurrence(tokens, states):
    return jax.vmap(kda_reference.recurrent)(*tokens, states)


def oracle(made: Case, n_valid: np.ndarray, states: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float64 (out[R, 16, H, V], states[R, H, K, V]) of the first tokens of each row.

    Zeros behind them leave the state as it is, and make one program of all lengths.
    """
    tokens = [np.zeros((ROWS, kda.SHORT, *x.shape[2:])) for x in made.operands]
    for row, n in enumerate(n_valid):
        for padded, x in zip(tokens, made.operands, strict=True):
            padded[row, :n] = x[row, :n]
    with jax.enable_x64(True):
        out, final = recurrence(tokens, np.float64(states))
        return np.asarray(out), np.asarray(final)


@pytest.mark.parametrize("tokens", [1, 5, 16])
def test_decode_equals_the_recurrence_in_float64(tokens: int) -> None:
    """Row 0 whole, row 1 cut short with NaN behind the cut, row 2 fresh on pages of NaN."""
    made = case(tokens)
    short = max(tokens - 2, 1)
    for x in made.operands:
        x[1, short:] = np.nan
    pool = made.pool.copy()
    pool[made.pages[2]] = NAN
    n_valid, fresh = np.array([tokens, short, tokens]), np.array([False, False, True])
    out, after = quick_decode(*made.operands, pool, made.pages, n_valid, fresh)
    starts = np.where(fresh[:, None, None, None], 0, made.states)
    want_out, want_states = oracle(made, n_valid, starts)
    for row, n in enumerate(n_valid):
        np.testing.assert_allclose(out[row, :n], want_out[row, :n], atol=3e-6)
    np.testing.assert_allclose(states_of(np.asarray(after), made.pages), want_states, atol=3e-6)


def test_decode_of_bfloat16_keeps_states_in_float32() -> None:
    made = case(4)
    rounded = [jnp.asarray(x, jnp.bfloat16) for x in made.operands[:3]]
    exact = made._replace(
        operands=[*(np.asarray(x, np.float32) for x in rounded), *made.operands[3:]]
    )
    n_valid = np.full(ROWS, 4)
    rest = made.pool, made.pages, n_valid, np.zeros(ROWS, bool)
    out, after = quick_decode(*rounded, *made.operands[3:], *rest)
    states = states_of(np.asarray(after), made.pages)
    assert out.dtype == jnp.bfloat16
    want_out, want_states = oracle(exact, n_valid, made.states)
    np.testing.assert_allclose(np.float32(out), want_out[:, :4], rtol=2**-8, atol=3e-6)
    np.testing.assert_allclose(states, want_states, atol=3e-6)


def test_decode_touches_only_the_states_of_rows_with_tokens() -> None:
    made = case(5)
    idle = [x.copy() for x in made.operands]
    for x in idle:
        x[1] = np.nan
    n_valid, fresh = np.array([5, 0, 2]), np.array([False, True, False])
    after = np.asarray(decode(*idle, made.pool, made.pages, n_valid, fresh)[1])
    allowed = np.zeros(made.pool.shape, bool)
    allowed[0] = True
    for row, head in np.ndindex(ROWS, H):
        page, lines = place(head)
        allowed[made.pages[row, page], lines] = row != 1
    changed = after != made.pool
    assert not np.any(changed & ~allowed)
    assert np.all(changed[made.pages[[0, 2]]].any((1, 2)))


def test_decode_of_a_row_is_the_same_alone_in_any_place_and_among_others() -> None:
    made, other = case(5), case(5, seed=5)
    fresh = np.zeros(ROWS, bool)
    out, after = decode(*made.operands, made.pool, made.pages, np.full(ROWS, 5), fresh)
    moved = [
        np.stack([y[0], x[1], x[0]]) for x, y in zip(made.operands, other.operands, strict=True)
    ]
    pages = np.array([made.pages[2], [0, 0], made.pages[0]])
    out_b, after_b = decode(*moved, made.pool, pages, np.array([5, 0, 5]), fresh)
    assert np.array_equal(out[0], out_b[2])
    assert np.array_equal(after[made.pages[0]], after_b[made.pages[0]])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": 17}, "q: 17 tokens per row must be at least 1 and at most 16"),
        ({"pages": np.ones((ROWS, 3), np.int32)}, "pages: 4 heads do not divide over 3 pages"),
        ({"head_lines": 12}, "head_lines: 12 must be a multiple of 8"),
        ({"head_lines": 0}, "head_lines: 0 must be a multiple of 8 that holds a state of 2 lines"),
        ({"head_lines": 16}, "pool: a page of 24 lines cannot hold 2 heads of 16"),
        ({"backend": "cuda"}, "backend: 'cuda' is not one of"),
        ({"dtype": "float16"}, "q: float16 must be float32 or bfloat16"),
    ],
)
def test_what_decode_cannot_take_is_named(change: dict, said: str) -> None:
    made = case(change.pop("tokens", 1))
    pages = change.pop("pages", made.pages)
    made.operands[0] = jnp.asarray(made.operands[0], change.pop("dtype", "float32"))
    call = jax.jit(partial(kda.decode, **({"head_lines": HEAD_LINES} | change)))
    with pytest.raises(ValueError, match=said):
        call(*made.operands, made.pool, pages, np.ones(ROWS, int), np.zeros(ROWS, bool))


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("pool", lambda x: x.view(np.int32), "pool: int32 must be uint32"),
        ("pool", lambda x: x[0], r"pool: shape \(24, 128\) must be \(pages, lines, 128\)"),
        ("pool", lambda x: x[..., :64], r"pool: shape \(40, 24, 64\) must be"),
        ("pages", lambda x: x.astype(np.float32), "pages: float32 must be an integer"),
        ("pages", lambda x: x[0], r"pages: shape \(2,\) must be \(3, pages of a row\)"),
        ("pages", lambda x: x[:2], r"pages: shape \(2, 2\) must be \(3, pages of a row\)"),
        ("pages", lambda x: x[:, :0], r"pages: shape \(3, 0\) must be .*, at least 1"),
        ("n_valid", lambda x: x.astype(np.float32), "n_valid: float32 must be an integer"),
        ("n_valid", lambda x: x > 0, "n_valid: bool must be an integer"),
        ("n_valid", lambda x: x[:2], r"n_valid: shape \(2,\) must be \(3,\)"),
        ("fresh", lambda x: x.astype(np.int32), "fresh: int32 must be bool"),
        ("fresh", lambda x: x[:, None], r"fresh: shape \(3, 1\) must be \(3,\)"),
        ("q", lambda x: x[:0], r"q: rows, heads and width of shape \(0, 1, 4, 8\) must be at"),
        ("v", lambda x: x[..., :0], "v: width 0 must be at least 1"),
    ],
)
def test_wrong_operands_of_decode_are_named(name: str, wrong, said: str) -> None:
    """Without the test session's own check of shapes, which would speak first."""
    made = case(1)
    given = dict(zip(("q", "k", "v", "g", "beta"), made.operands, strict=True))
    given |= {"pool": made.pool, "pages": made.pages}
    given |= {"n_valid": np.ones(ROWS, int), "fresh": np.zeros(ROWS, bool)}
    given = {key: jnp.asarray(x) for key, x in given.items()}
    given[name] = wrong(given[name])
    with pytest.raises(ValueError, match=said):
        kda.decode.__wrapped__(**given, head_lines=HEAD_LINES)


# --- tokens --------------------------------------------------------------------------------------

W, C = 12, 8
SHAPE = {"value_width": C, "scale": 0.3}
attend_pages = jax.jit(mla.attend_pages, static_argnames=("value_width", "scale"))
write_pages = jax.jit(mla.write_pages)


class Tokens(NamedTuple):
    q: np.ndarray
    latents: np.ndarray
    pages: np.ndarray


def tokens(length: int, rows: int = ROWS, table: int = 4, seed: int = 0) -> Tokens:
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((rows, length, H, W)).astype(np.float32)
    latents = rng.standard_normal((rows, length, W)).astype(np.float32)
    pages = rng.permutation(np.arange(1, PAGES, dtype=np.int32))[: rows * table]
    return Tokens(q, latents, pages.reshape(rows, table))


softmaxes = jax.jit(jax.vmap(partial(mla_reference.attend, **SHAPE)), compiler_options=QUICK)


def exact(made: Tokens) -> np.ndarray:
    """float64[R, L, H, C]: no token sees a later one, so a row may end anywhere."""
    with jax.enable_x64(True):
        return np.asarray(softmaxes(np.float64(made.q), np.float64(made.latents)))


def written(made: Tokens, lengths: list[int]) -> np.ndarray:
    """Pool bits: garbage but for the first tokens of each row."""
    pool = garbage(1)
    for row, length in enumerate(lengths):
        for t in range(length):
            words = pool[made.pages[row, t // 64]].reshape(-1)
            words[t % 64 * W : t % 64 * W + W] = made.latents[row, t].view(np.uint32)
    return pool


def test_writing_puts_tokens_where_the_table_says_and_nowhere_else() -> None:
    made = tokens(100)
    positions, n_valid = np.array([0, 60, 130]), np.array([100, 9, 0])
    pool = garbage(1)
    after = np.asarray(write_pages(pool, made.pages, positions, n_valid, made.latents))
    want = pool.copy()
    for row, (start, n) in enumerate(zip(positions, n_valid, strict=True)):
        for t in range(n):
            words = want[made.pages[row, (start + t) // 64]].reshape(-1)
            at = (start + t) % 64 * W
            words[at : at + W] = made.latents[row, t].view(np.uint32)
    assert np.array_equal(after[1:], want[1:])


@pytest.mark.parametrize("n", [1, 5, 64])
def test_attention_to_pages_equals_one_softmax(n: int) -> None:
    """Rows that end inside, at and after a page; whatever lies behind the end is NaN."""
    made = tokens(200)
    positions, n_valid = np.array([200 - n, 128 - n, 0]), np.array([n, n, max(n - 1, 1)])
    ends = positions + n_valid
    q = np.stack([np.roll(made.q[r], -positions[r], 0)[:n] for r in range(ROWS)])
    out = attend_pages(q, written(made, list(ends)), made.pages, positions, n_valid, **SHAPE)
    want = exact(made)
    for row, (start, end) in enumerate(zip(positions, ends, strict=True)):
        np.testing.assert_allclose(out[row, : end - start], want[row, start:end], atol=3e-6)


@pytest.mark.parametrize("step", [64, 128])
def test_prefill_at_chunk_borders_equals_training_bit_for_bit(step: int) -> None:
    """The second row is idle and its pages are NaN: it gives zeros."""
    made = tokens(192, rows=2)
    rows = jax.jit(partial(mla.attend_rows, **SHAPE))
    whole = np.asarray(rows(made.q[:1], made.latents[:1], np.zeros((1, 192), int)))[0]
    pool = garbage(1)
    pool[made.pages[1]] = NAN
    for start in range(0, 192, step):
        n = min(step, 192 - start)
        values = np.zeros((2, step, W), np.float32)
        values[0, :n] = made.latents[0, start : start + n]
        positions, n_valid = np.array([start, 7]), np.array([n, 0])
        pool = write_pages(pool, made.pages, positions, n_valid, values)
        q = np.zeros((2, step, H, W), np.float32)
        q[0, :n] = made.q[0, start : start + n]
        out = np.asarray(attend_pages(q, pool, made.pages, positions, n_valid, **SHAPE))
        assert np.array_equal(out[0, :n], whole[start : start + n])
        assert not out[1].any()


@pytest.mark.parametrize("n", [1, 64])
def test_attention_of_a_row_is_the_same_alone_in_any_place_and_among_others(n: int) -> None:
    """Also with a longer table and beside rows that use more pages and idle rows."""
    made = tokens(230)
    pool = written(made, [100, 230, 10])
    positions, n_valid = np.array([100 - n, 230 - n, 3]), np.array([n, n, min(n, 7)])
    q = made.q[:, :n]
    alone = attend_pages(q[:1], pool, made.pages[:1], positions[:1], n_valid[:1], **SHAPE)
    order = np.array([1, 2, 0])
    pages = np.pad(made.pages[order], ((0, 0), (0, 3)))
    turned = attend_pages(q[order], pool, pages, positions[order], n_valid[order], **SHAPE)
    idle = attend_pages(q, pool, made.pages, positions, np.array([n, 0, 0]), **SHAPE)
    assert np.array_equal(alone[0], turned[2])
    assert np.array_equal(alone[0], idle[0])


def test_garbage_in_pages_of_others_and_behind_the_end_changes_nothing() -> None:
    made = tokens(130)
    lengths = [130, 64, 1]
    n_valid, positions = np.ones(ROWS, int), np.array(lengths) - 1
    pool = written(made, lengths)
    filled = np.where(pool == NAN, np.uint32(0x7F800000), pool)  # NaN becomes infinity
    one, two = (
        attend_pages(made.q[:, :1], bits, made.pages, positions, n_valid, **SHAPE)
        for bits in (pool, filled)
    )
    assert np.all(np.isfinite(one)) and np.array_equal(one, two)


@pytest.mark.parametrize("n", [1, 64])
def test_memory_does_not_grow_with_the_longest_context(n: int) -> None:
    """Neither the entries of a context nor its scores are ever there."""

    def temporaries(table: int) -> int:
        sizes = (ROWS, n, H, W), (PAGES, LINES, 128), (ROWS, table), (ROWS,), (ROWS,)
        kinds = jnp.float32, jnp.uint32, jnp.int32, jnp.int32, jnp.int32
        given = [jax.ShapeDtypeStruct(*x) for x in zip(sizes, kinds, strict=True)]
        compiled = attend_pages.lower(*given, **SHAPE).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(1024) <= temporaries(4) + ROWS * 1024 * 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"value_width": 13}, "value_width: 13 must be between 1 and 12"),
        ({"backend": "cuda"}, "backend: 'cuda' is not one of"),
    ],
)
def test_what_attention_cannot_take_is_named(change: dict, said: str) -> None:
    made, zeros = tokens(1), np.zeros(ROWS, int)
    call = jax.jit(partial(mla.attend_pages, **(SHAPE | change)))
    with pytest.raises(ValueError, match=said):
        call(made.q, garbage(0), made.pages, zeros, zeros)


def test_an_unusable_backend_is_an_error_by_name_and_passed_over_by_default(monkeypatch) -> None:
    asked = []

    def obstacle(*operands):
        asked.append(operands)
        return "needs a chip that is not here"

    broken = mla.BACKENDS["xla"]._replace(obstacle=obstacle)
    monkeypatch.setattr(mla, "BACKENDS", {"chip": broken, "xla": mla.BACKENDS["xla"]})
    made, zeros = tokens(1), np.zeros(ROWS, int)
    with pytest.raises(ValueError, match="backend: chip cannot run here: needs a chip"):
        jax.jit(partial(mla.write_pages, backend="chip"))(
            garbage(0), made.pages, zeros, zeros, made.latents
        )
    jax.jit(partial(mla.attend_pages, **SHAPE))(made.q, garbage(0), made.pages, zeros, zeros)
    assert asked == [(W, None, jnp.float32), (W, C, jnp.float32)]
    assert mla.backends(W, C, jnp.float32) == {"chip": "needs a chip that is not here", "xla": ""}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"x": np.zeros((ROWS, W), np.float32)}, r"{x}: needs . axes, not shape \(3, 12\)"),
        ({"x": "float16"}, "{x}: float16 must be float32 or bfloat16"),
        ({"x": 257}, "{x}: 257 tokens a row exceed the 256 of 4 pages a row"),
        ({"pool": np.zeros((9, 1024), np.uint32)}, r"pool: needs 3 axes, not shape \(9, 1024\)"),
        ({"pool": np.zeros((9, 8, 128), np.int32)}, r"pool: int32\[9, 8, 128\] must be uint32 in"),
        (
            {"pool": np.zeros((9, 8, 64), np.uint32)},
            r"pool: uint32\[9, 8, 64\] must .* lines of 128",
        ),
        ({"pages": np.zeros(ROWS, int)}, r"pages: needs 2 axes, not shape \(3,\)"),
        ({"pages": np.zeros((2, 4), int)}, "pages: 2 rows must be {x}'s 3"),
        ({"positions": np.zeros(2, int)}, "positions: 2 rows must be {x}'s 3"),
        ({"n_valid": np.zeros(ROWS, np.float32)}, "n_valid: float32 must be integers"),
    ],
)
@pytest.mark.parametrize("name", ["q", "values"])
def test_what_pages_cannot_take_is_named(name: str, change: dict, said: str) -> None:
    """Not through jaxtyping, which is off outside tests."""
    x = change.get("x")
    tokens = x if isinstance(x, int) else 1
    values = np.zeros((ROWS, tokens, H, W) if name == "q" else (ROWS, tokens, W), np.float32)
    given = {"pool": garbage(0), "pages": np.zeros((ROWS, 4), int)}
    given |= {"positions": np.zeros(ROWS, int), "n_valid": np.zeros(ROWS, int)} | change
    given["x"] = values.astype(x) if isinstance(x, str) else x if np.ndim(x) else values
    with pytest.raises(ValueError, match=said.format(x=name)):
        checks.check_pages(name, **{key: jnp.asarray(value) for key, value in given.items()})


def test_tokens_in_bfloat16_are_written_as_float32() -> None:
    made, zeros = tokens(3), np.zeros(ROWS, np.int32)
    values, n = jnp.asarray(made.latents, jnp.bfloat16), np.full(ROWS, 3, np.int32)
    write = partial(write_pages, garbage(1), made.pages, zeros, n)
    assert np.array_equal(write(values), write(np.asarray(values, np.float32)))


@pytest.fixture(scope="module")
def folds():
    """Pages folded for rows with these many tokens, 0 for an idle row."""
    folded, plain = [], page_walk.online.fold

    def fold(carry, *operands):
        jax.debug.callback(folded.append, carry[0][0, 0, 0])  # of a lane, so once for each
        return plain(carry, *operands)

    run = jax.jit(partial(mla.attend_pages, **SHAPE), compiler_options=QUICK)

    def count(ends: list[int], n: int = 1) -> int:
        made, lengths = tokens(256, len(ends)), np.array(ends)
        pool, place = (
            written(made, [0] * len(ends)),
            (np.maximum(lengths - n, 0), lengths.clip(0, n)),
        )
        del folded[:]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(page_walk.online, "fold", fold)
            run(made.q[:, :n], pool, made.pages, *place)
        jax.effects_barrier()
        return len(folded)

    return count


@pytest.mark.parametrize("ends", [[200, 10], [200, 10, 0, 0, 130], [250, 1, 129, 64, 65]])
def test_rows_beside_longer_ones_walk_over_twice_their_own_pages_at_most(folds, ends) -> None:
    """And over their own alone where nobody waits for another: see the next test."""
    own = sum(-(-end // 64) for end in ends)
    assert own <= folds(ends) <= 2 * own


@pytest.mark.parametrize("ends", [[200, 10, 0, 0, 0], [65, 128], [0, 0], [256]])
def test_a_long_row_goes_on_alone_and_idle_rows_walk_nowhere(folds, ends) -> None:
    """A lone long row of five: half of a group is idle, so nobody walks in step."""
    assert folds(ends) == sum(-(-end // 64) for end in ends)


def test_rows_with_many_queries_walk_over_their_own_pages_alone(folds) -> None:
    assert folds([200, 64, 0], n=64) == 4 + 1


GROUPED = [(2, 1, 64), (4, 4, 48), (4, 1, 48), (1, 16, 40), (1, 1, 48), (3, 1, 40)]


@pytest.mark.parametrize(("heads", "n", "width"), GROUPED)
def test_groups_of_rows_give_the_bits_of_a_row_alone(heads: int, n: int, width: int) -> None:
    """Seventy rows of which most are short: several groups, in step and alone."""
    rng, rows, table = np.random.default_rng(0), 70, 6
    q = rng.standard_normal((rows, n, heads, width)).astype(np.float32)
    pool = rng.standard_normal((1 + rows * table, LINES * 2, 128)).astype(np.float32)
    pool = jnp.asarray(pool.view(np.uint32))
    pages = 1 + rng.permutation(rows * table).reshape(rows, table).astype(np.int32)
    positions = (rng.uniform(size=rows) ** 3 * (table * 64 - n)).astype(np.int32)
    n_valid = np.where(np.arange(rows) % 7 == 3, 0, n)
    run = jax.jit(partial(mla.attend_pages, value_width=width // 2, scale=0.2))
    whole = np.asarray(run(q, pool, pages, positions, n_valid))
    for i in range(rows):
        own = (x[i : i + 1] for x in (pages, positions, n_valid))
        assert np.array_equal(run(q[i : i + 1], pool, *own)[0], whole[i])


def test_a_page_that_is_too_small_for_64_tokens_is_named() -> None:
    made, zeros = tokens(1), np.zeros(ROWS, int)
    with pytest.raises(ValueError, match="pool: a page of 5 lines cannot hold 64 tokens of width"):
        write_pages(garbage(0, lines=5), made.pages, zeros, zeros, made.latents)


# --- words of heads ------------------------------------------------------------------------------


@pytest.mark.parametrize(("after", "words"), [(0, 2048), (0, 130), (3, 700), (7, 1), (9, 800)])
def test_lines_are_read_and_written_where_they_are_said_to_be(after, words):
    pool, rng = garbage(5), np.random.default_rng(6)
    pages, lines = rng.permutation(np.arange(1, PAGES, dtype=np.int32))[:6].reshape(3, 2), [0, 8]
    want = pool.copy()
    values = rng.standard_normal((3, 2, words)).astype(np.float32)
    for row, head in np.ndindex(3, 2):
        page = want[pages[row, head]].reshape(-1)
        first = (lines[head] + after) * 128
        page[first : first + words] = values[row, head].view(np.uint32)
    place = jnp.asarray(pages), jnp.asarray(lines)
    after_writing = jax.jit(write_lines, static_argnums=4)(pool, *place, values, after)
    np.testing.assert_array_equal(after_writing, want)
    got = jax.jit(read_lines, static_argnums=(3, 4))(after_writing, *place, words, after)
    np.testing.assert_array_equal(got, values)
