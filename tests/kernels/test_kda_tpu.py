"""The TPU kernels of KDA, interpreted on a CPU: float64 oracles, and bits that must not change."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from rl_jax.kernels.kda import api, pallas_tpu, pallas_tpu_chunk, pallas_tpu_decode, reference
from tests.fakes.compiling import QUICK
from tests.kernels import kda_cases
from tests.kernels.kda_cases import (
    CORRELATED,
    NEAR,
    ROUNDED,
    Case,
    assert_within,
    case,
    cotangents,
    distance,
    errors,
    values_and_gradients,
)

LENGTH = 17 * 64
"""Two groups of the backward pass and a chunk."""
SHORT = 9 * 64
"""A group and a chunk."""
short = partial(case, ((500,), (65, 0, 1, 200)), length=SHORT)


@pytest.fixture(scope="module", autouse=True)
def interpreted():
    """Kernels run in Pallas's own interpreter, which knows a TPU's copies but not its limits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pl, "pallas_call", partial(pl.pallas_call, interpret=True))
        patch.setattr(pallas_tpu_chunk, "_dot", rounding_dot)
        yield


def rounding_dot(a, b, over_a, over_b, precision):
    """A product as a TPU makes it of bfloat16 parts, where the interpreter's is of float32.

    `reduce_precision`, because XLA leaves out a conversion to bfloat16 and back.
    """
    exact = partial(lax.dot_general, dimension_numbers=(((over_a,), (over_b,)), ((), ())))
    if precision == lax.Precision.HIGHEST:
        return exact(a, b)
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    high_a, high_b = (lax.reduce_precision(x, 8, 7) for x in (a, b))
    if precision is None:
        return exact(high_a, high_b)
    low_a, low_b = (lax.reduce_precision(x, 8, 7) for x in (a - high_a, b - high_b))
    return exact(high_a, low_b) + exact(low_a, high_b) + exact(high_a, high_b)


@partial(jax.jit, compiler_options=QUICK)
def forward(operands, reset):
    return pallas_tpu.chunked(*operands, reset, bounded=True, export=False)


@partial(jax.jit, static_argnames="bounded", compiler_options=QUICK)
def chunks(operands, reset, weights, bounded=True):
    def run(*operands):
        return pallas_tpu.chunked(*operands, reset, bounded=bounded, export=False)[:2]

    return values_and_gradients(run, operands, weights)


unbounded = partial(chunks, bounded=False)


@pytest.mark.parametrize("beta", [None, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("gate", kda_cases.BOUNDED)
def test_bounded_gates(gate, beta):
    assert_within(errors(chunks, short(gate=gate, beta=beta)), NEAR)


def test_three_groups_of_the_backward_pass():
    assert_within(errors(chunks, case()), NEAR)


@pytest.mark.slow
@pytest.mark.parametrize("beta", [None, 2.0])
@pytest.mark.parametrize("gate", [kda_cases.UNBOUNDED, "blocks"])
def test_gates_without_a_bound(gate, beta):
    assert_within(errors(unbounded, case(gate=gate, beta=beta)), NEAR)


@pytest.mark.parametrize("beta", [None, 0.0, 2.0])
@pytest.mark.parametrize("gate", ["mixed", "saturated", "open"])
def test_rounded_operands(gate, beta):
    found = errors(chunks, short(gate=gate, beta=beta), dtype=jnp.bfloat16)
    print(f"{gate} gates, beta {beta}: {found}")
    assert_within(found, ROUNDED)


@pytest.mark.slow
def test_rounded_operands_with_gates_without_a_bound():
    of = case(gate=kda_cases.UNBOUNDED, beta=2.0)
    assert_within(errors(unbounded, of, dtype=jnp.bfloat16), ROUNDED)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 63, 64, 65])
def test_lengths_and_packs(length):
    packs = (length,), (length, 0, 200, length)
    assert_within(errors(chunks, case(packs, seed=length, length=SHORT)), NEAR)


@pytest.mark.slow
@pytest.mark.parametrize("cosine", [0.9, 0.999])
def test_correlated_keys(cosine):
    of = case(gate="open", beta=2.0, cosine=cosine)
    assert_within(errors(chunks, of), dict.fromkeys(NEAR, 5e-3))
    assert_within(errors(chunks, of, dtype=jnp.bfloat16), CORRELATED)


@pytest.mark.slow
def test_values_of_two_parts_and_a_head_alone(monkeypatch):
    """Values wider than a register go through in parts; an odd head gets one of zeros beside it."""
    monkeypatch.setattr(kda_cases, "H", 1)
    monkeypatch.setattr(kda_cases, "V", 136)
    assert_within(errors(chunks, case(((65,),), length=128)), NEAR)


@pytest.mark.slow
def test_twelve_heads(monkeypatch):
    """Two blocks of eight heads, the last four of zeros; the state goes from chunk to chunk."""
    for name, size in (("H", 12), ("K", 8), ("V", 8)):
        monkeypatch.setattr(kda_cases, name, size)
    assert_within(errors(chunks, case(((100,),), length=128)), NEAR)


@pytest.mark.slow
def test_exported_states_and_their_gradients():
    """As the XLA backend has them, which is tested against cut rows."""
    of = case()
    weights = tuple(
        jnp.asarray(np.random.default_rng(i).standard_normal(shape), jnp.float32)
        for i, shape in enumerate([(2, LENGTH, 2, 24), (2, 2, 16, 24), (17, 2, 2, 16, 24)])
    )

    def pulled(run):
        *given, reset = map(jnp.asarray, (*of.operands, of.reset))
        made, pull = jax.vjp(lambda *x: run(*x, reset), *given)
        return *made, *pull(weights)

    runs = (
        partial(pallas_tpu.chunked, bounded=True, export=True),
        partial(api.chunked, backend="xla", export=True),
    )
    got, want = (jax.jit(lambda run=run: pulled(run), compiler_options=QUICK)() for run in runs)
    for one, other in zip(got, want, strict=True):
        assert distance(one, np.asarray(other, np.float64)) <= 2e-6


KINDS = [(run, dtype) for run in (chunks, unbounded) for dtype in (jnp.float32, jnp.bfloat16)]


def values(of: Case, dtype, run=chunks) -> tuple[np.ndarray, np.ndarray]:
    of = of.rounded(dtype)
    made = run(of.operands, of.reset, cotangents(of))
    return np.asarray(made[0]), np.asarray(made[1])


@pytest.mark.slow
@pytest.mark.parametrize(("run", "dtype"), KINDS)
@pytest.mark.parametrize("token", [0, 17, 56, 64, 300])
def test_no_output_sees_a_later_token(token, run, dtype):
    rng = np.random.default_rng(3)
    before = case(((LENGTH,), (LENGTH,)))
    *tokens, state = (np.array(x) for x in before.operands)
    for x in tokens[:3]:
        x[:, token:] = rng.standard_normal(x[:, token:].shape) * 0.3
    tokens[3][:, token:] = -rng.uniform(0, 5, tokens[3][:, token:].shape)
    tokens[4][:, token:] = 0.9
    after = Case((*tokens, state), before.reset)
    one, two = (values(of, dtype, run)[0] for of in (before, after))
    assert np.array_equal(one[:, :token], two[:, :token])
    assert not np.array_equal(one[:, token:], two[:, token:])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_cuts_between_chunks_change_no_bit(dtype):
    """Each part with padding behind it, which leaves the state as it is."""
    of, cut = case(((LENGTH,), (LENGTH,))), 5 * 64
    *tokens, state = (np.asarray(x) for x in of.operands)
    whole, final = values(of, dtype)

    def padded(first, last):
        return [np.concatenate([x[:, first:last], 0 * x[:, last - first :]], 1) for x in tokens]

    first, middle = values(Case((*padded(0, cut), state), of.reset), dtype)
    second, last = values(Case((*padded(cut, LENGTH), middle), of.reset), dtype)
    assert np.array_equal(whole, np.concatenate([first[:, :cut], second[:, : LENGTH - cut]], 1))
    assert np.array_equal(final, last)


@pytest.mark.slow
def test_garbage_before_a_reset_is_gone_and_forward_alone_is_the_same():
    of = case(((65, 0, 1, 300, 128),) * 2)
    *tokens, state = of.operands
    clean, final = values(of, jnp.float32)
    out, last, _ = forward((*tokens, np.full_like(state, np.nan)), of.reset)
    assert np.array_equal(clean, out)
    assert np.array_equal(final, last)


# --- decode --------------------------------------------------------------------------------------

K, ROWS, TOKENS, NAN = 8, 4, 5, 0x7FC00123
N_VALID, FRESH = np.array([5, 0, 3, 1]), np.array([False, False, True, False])


class Pages:
    """Four rows of four heads, two heads a page: whole, idle, fresh on pages of NaN, one token."""

    def __init__(self, value_width: int) -> None:
        rng = np.random.default_rng(value_width)
        self.lines = K * value_width // 128
        self.head_lines = self.lines + 8
        shape = ROWS, TOKENS, 4
        q, k = kda_cases.unit(rng.standard_normal((2, *shape, K)))
        v, g = rng.standard_normal((*shape, value_width)), -5 * rng.random((*shape, K)) ** 4
        self.operands = [x.astype(np.float32) for x in (q, k, v, g, 2 * rng.random(shape))]
        words = rng.integers(0, 2**32, (20, 2 * self.head_lines + 8, 128), np.uint32)
        self.pool = np.where(words % 2, np.uint32(NAN), words)
        self.pages = rng.permutation(np.arange(1, 20, dtype=np.int32))[:8].reshape(ROWS, 2)
        self.states = rng.standard_normal((ROWS, 4, K, value_width)).astype(np.float32)
        for row, head in np.ndindex(ROWS, 4):
            if not FRESH[row]:
                self.pool[self.place(row, head)] = (
                    self.states[row, head].view(np.uint32).reshape(-1, 128)
                )
            self.states[row, head] *= not FRESH[row]
            for x in self.operands:
                x[row, N_VALID[row] :] = np.nan

    def place(self, row: int, head: int) -> tuple[int, slice]:
        start = head % 2 * self.head_lines
        return self.pages[row, head // 2], slice(start, start + self.lines)

    def decoded(self, n_valid=N_VALID, fresh=FRESH) -> tuple[np.ndarray, np.ndarray]:
        run = jax.jit(partial(pallas_tpu_decode.decode, head_lines=self.head_lines))
        out, pool = run(*self.operands, self.pool, self.pages, n_valid, fresh)
        return np.asarray(out), np.asarray(pool)


@pytest.fixture
def copies(monkeypatch):
    """Copies take effect when they are waited for, and memory nobody wrote to is NaN."""
    plain = pl.pallas_call.func
    parameters = pltpu.InterpretParams(detect_races=True)
    monkeypatch.setattr(pl, "pallas_call", partial(plain, interpret=parameters))


recurrence = jax.jit(jax.vmap(reference.recurrent), compiler_options=QUICK)


@pytest.mark.parametrize("value_width", [128, 256])
def test_decode_equals_the_recurrence_in_float64(value_width, copies, capfd):
    made = Pages(value_width)
    out, pool = made.decoded()
    wanted_pool = made.pool.copy()
    with jax.enable_x64(True):
        # What lies behind the last token is NaN; zeros leave the state as it is.
        exact = (np.float64(np.nan_to_num(x)) for x in made.operands)
        want, final = map(np.asarray, recurrence(*exact, np.float64(made.states)))
    for row, n in enumerate(N_VALID):
        np.testing.assert_allclose(out[row, :n], want[row, :n], atol=1e-6)
        for head in range(4) if n else ():
            at = made.place(row, head)
            state = pool[at].view(np.float32).reshape(K, value_width)
            np.testing.assert_allclose(state, final[row, head], atol=1e-6)
            wanted_pool[at] = pool[at]
    assert np.array_equal(pool, wanted_pool), "a page changed outside its states"
    assert "RACE" not in capfd.readouterr().out.upper()


@pytest.mark.slow
def test_decode_of_one_token_at_a_time_changes_no_bit():
    made = Pages(128)
    out, pool = made.decoded()
    operands, fresh = made.operands, FRESH
    for t in range(TOKENS):
        made.operands = [x[:, t : t + 1] for x in operands]
        step, made.pool = made.decoded((t < N_VALID).astype(int), fresh)
        fresh = fresh & (t >= N_VALID)
        for row in np.flatnonzero(t < N_VALID):
            assert np.array_equal(step[row, 0], out[row, t])
    assert np.array_equal(made.pool, pool)


@pytest.mark.parametrize(
    ("key_width", "value_width", "dtype", "said"),
    [
        (136, 128, jnp.float32, "key width 136 is not a multiple of 8 up to 128"),
        (12, 128, jnp.float32, "key width 12 is not a multiple of 8 up to 128"),
        (128, 64, jnp.float32, "value width 64 is not a multiple of 128"),
        (128, 128, jnp.float64, "float64 is not float32 or bfloat16"),
        (128, 256, jnp.bfloat16, ""),
    ],
)
def test_what_no_kernel_takes_is_named(key_width, value_width, dtype, said):
    assert pallas_tpu.unsupported(key_width, value_width, dtype) == said


def test_no_tpu_is_an_obstacle():
    assert api.backends(128, 128, jnp.bfloat16)["pallas_tpu"].endswith("is cpu, not tpu")
