"""What no bit of KDA's chunks may depend on: later tokens, cuts between chunks, neighbours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.kernels.kda import api, chunk
from tests.kernels.kda_cases import Case, case

LENGTH = 256
KINDS = [(-5.0, jnp.float32), (-5.0, jnp.bfloat16), (None, jnp.float32)]
chunked = jax.jit(api.chunked, static_argnames="lower_bound")


def later_changed(of: Case, token: int) -> Case:
    """Other inputs from `token` on."""
    rng = np.random.default_rng(3)
    *tokens, state = (np.array(x) for x in of.operands)
    for x in tokens[:3]:
        x[:, token:] = rng.standard_normal(x[:, token:].shape) * 0.3
    tokens[3][:, token:] = -rng.uniform(0, 5, tokens[3][:, token:].shape)
    tokens[4][:, token:] = 0.9
    return Case((*tokens, state), of.reset)


@pytest.mark.parametrize(("lower_bound", "dtype"), [*KINDS, (None, jnp.bfloat16)])
@pytest.mark.parametrize("gate", ["mixed", "saturated"])
@pytest.mark.parametrize("token", [0, 17, 31, 56, 63, 64, 100])
def test_no_output_sees_a_later_token(gate, token, lower_bound, dtype):
    before = case(((LENGTH,), (LENGTH,)), gate=gate, length=LENGTH)
    after = later_changed(before, token)
    one, two = (
        chunked(*of.rounded(dtype).operands, lower_bound=lower_bound)[0] for of in (before, after)
    )
    assert np.array_equal(one[:, :token], two[:, :token])
    assert not np.array_equal(one[:, token:], two[:, token:])


@pytest.mark.parametrize(("lower_bound", "dtype"), KINDS)
@pytest.mark.parametrize("cut", [64, 192])
def test_cuts_between_chunks_change_no_bit(cut, lower_bound, dtype):
    *tokens, state = case(((LENGTH,), (LENGTH,)), length=LENGTH).rounded(dtype).operands
    whole, final = chunked(*tokens, state, lower_bound=lower_bound)
    first, middle = chunked(*(x[:, :cut] for x in tokens), state, lower_bound=lower_bound)
    second, last = chunked(*(x[:, cut:] for x in tokens), middle, lower_bound=lower_bound)
    assert np.array_equal(whole, np.concatenate([first, second], 1))
    assert np.array_equal(final, last)


def test_groups_change_no_bit():
    """17 chunks in groups of 9 with one added, or each row alone in groups of another size."""
    of = case()
    *tokens, state = of.operands
    together = chunked(*tokens, state, of.reset)
    for row in (0, 1):
        here = slice(row, row + 1)
        alone = chunked(*(x[here] for x in tokens), state[here], of.reset[here])
        assert all(np.array_equal(a[here], b) for a, b in zip(together, alone, strict=True))


def test_packed_sequences_equal_each_alone():
    """And the garbage that a row begins with is gone where a sequence begins."""
    lengths = (65, 0, 1, 300, 128)
    of = case((lengths,))
    *tokens, state = of.operands
    out, _ = chunked(*tokens, np.full_like(state, np.nan), of.reset)
    start = 0
    for n in lengths:
        size = 64 * max(1, -(-n // 64))
        alone, _ = chunked(*(x[:, start : start + size] for x in tokens))
        assert np.array_equal(out[:, start : start + n], alone[:, :n])
        start += size


def test_decays_know_the_gates_they_say_and_no_others():
    """Of each sum of log-decays, the gates it adds up: once each, and none after its row."""

    def logs(g):
        return {name: x.log for name, x in chunk.decays(g, True)._asdict().items()}

    slopes = jax.jit(jax.jacobian(logs))(jnp.zeros((4, 16, 1)))
    reads = {name: np.asarray(s).reshape(*s.shape[:-4], 64) for name, s in slopes.items()}
    token = np.arange(64)
    row = token[:, None]
    first = row // 16 * 16
    for name, wanted in (
        ("within", (token > first) & (token <= row)),
        ("to_row", (token >= first) & (token <= row)),
        ("rest", (token > row) & (token < first + 16)),
    ):
        assert np.array_equal(reads[name].reshape(64, 64), wanted), name
    block, of = np.arange(4)[:, None], token // 16
    for name, wanted in (
        ("before", of < block),
        ("after", of > block),
        ("to_middle", ((block == 0) & (of == 1)) | ((block == 3) & (of == 2))),
        ("whole", token[None] >= 0),
    ):
        assert np.array_equal(reads[name], wanted), name
