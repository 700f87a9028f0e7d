"""What no bit of KDA's chunks may depend on: later tokens, cuts between chunks, neighbours."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl_jax.kernels.kda import api, chunk, xla
from tests.kernels.kda_cases import Case, H, case

LENGTH = 320
KINDS = [(-5.0, jnp.float32), (-5.0, jnp.bfloat16), (None, jnp.float32)]
run = jax.jit(api.chunked, static_argnames="lower_bound")


def chunked(*operands, lower_bound):
    return jax.device_get(run(*operands, lower_bound=lower_bound))


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
        chunked(*of.rounded(dtype).operands, of.reset, lower_bound=lower_bound)[0]
        for of in (before, after)
    )
    assert np.array_equal(one[:, :token], two[:, :token])
    assert not np.array_equal(one[:, token:], two[:, token:])


@pytest.mark.parametrize(("lower_bound", "dtype"), KINDS)
def test_cuts_between_chunks_change_no_bit(lower_bound, dtype):
    of = case(((LENGTH,), (LENGTH,)), length=LENGTH).rounded(dtype)
    *tokens, state = of.operands
    whole, final = chunked(*of.operands, of.reset, lower_bound=lower_bound)
    outs = []
    for number in range(LENGTH // 64):
        here = slice(64 * number, 64 * number + 64)
        reset = of.reset[:, number : number + 1]
        out, state = chunked(*(x[:, here] for x in tokens), state, reset, lower_bound=lower_bound)
        outs.append(out)
    assert np.array_equal(whole, np.concatenate(outs, 1))
    assert np.array_equal(final, state)


def test_groups_change_no_bit():
    """Five chunks in groups of two with one added, or each row alone in groups of three."""
    of = case(((300,), (65, 0, 1, 64)), length=LENGTH)
    *tokens, state = of.operands
    assert [xla.group_size(5, rows * H, bounded=False) for rows in (2, 1)] == [2, 3]
    together = chunked(*tokens, state, of.reset, lower_bound=None)
    for row in (0, 1):
        here = slice(row, row + 1)
        alone = chunked(*(x[here] for x in tokens), state[here], of.reset[here], lower_bound=None)
        assert all(np.array_equal(a[here], b) for a, b in zip(together, alone, strict=True))


def test_packed_sequences_equal_each_alone():
    """And the garbage that a row begins with is gone where a sequence begins."""
    packs = (1, 65, 30), (64, 128, 0)
    of = case(packs, length=LENGTH)
    *tokens, state = of.operands
    out, _ = chunked(*tokens, np.full_like(state, np.nan), of.reset, lower_bound=-5.0)
    start = 0
    for lengths, size in zip(zip(*packs, strict=True), (64, 128, 64), strict=True):
        here = slice(start, start + size)
        no_reset = np.zeros((2, size // 64), bool)
        own = [x[:, here] for x in tokens]
        alone, _ = chunked(*own, np.zeros_like(state), no_reset, lower_bound=-5.0)
        for row, n in enumerate(lengths):
            assert np.array_equal(out[row, here][:n], alone[row, :n])
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
