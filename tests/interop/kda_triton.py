"""Interprets the Triton kernels of Kimi delta attention on the CPU against a float64 recurrence.

    TRITON_INTERPRET=1 PYTHONPATH=. ORACLE/bin/python tests/interop/kda_triton.py

in an environment made from requirements-triton.txt. Prints one line per case and exits with 1 where
one is over its limit. Relative L2 errors of float32: outputs and states 1e-5, gradients 1e-4. With
bfloat16 operands: 5e-3 and 8e-3. Products are rounded as the device's tensor cores do, their parts
too; the interpreter's own of bfloat16 are wrong. It has its own cases, not those of
tests/kernels/kda_cases.py: value widths are multiples of 16 here, and torch's oracle needs no jax.
"""

import math
import sys
from dataclasses import dataclass, replace

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from rl_jax.kernels.kda import anchor, block_sizes
from rl_jax.kernels.kda import triton as kernels

CHUNK = 64
LIMITS = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (5e-3, 8e-3)}
NAMES = ("q", "k", "v", "g", "beta", "state")


@dataclass(frozen=True)
class Case:
    """Inputs of one comparison: lengths of a row's segments, widths, gate, beta, keys, operands."""

    name: str
    lengths: tuple[int, ...] = (150,)
    rows: int = 1
    heads: int = 2
    K: int = 32
    V: int = 32
    gate: str = "mixed"
    beta: float | None = None
    correlated: bool = False
    dtype: torch.dtype = torch.float32
    limits: tuple[float, float] | None = None


def mend_interpreter() -> None:
    """Makes it round to bfloat16 and multiply in parts as the device does, in half the time."""

    seen = set()

    def call(self, *args, **kwargs):
        """Patches the language once for each module whose functions kernels call, not each time."""
        if self.fn.__module__ not in seen:
            seen.add(self.fn.__module__)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
    options = replace(
        interpreter.interpreter_builder.options,
        allowed_dot_input_precisions=("tf32", "tf32x3", "ieee", "bf16x3"),
    )
    interpreter.interpreter_builder.options = options
    convert = interpreter._convert_float

    def rounded(data, source, target, mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        return (to_bfloat16(data).view(np.uint32) >> 16).astype(np.uint16)

    def to_bfloat16(x):
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)

    def to_tf32(x):
        return (np.ascontiguousarray(x, np.float32).view(np.uint32) & 0xFFFFE000).view(np.float32)

    def widened(handle):
        data = handle.data
        if handle.dtype.scalar == tl.bfloat16:
            data = (data.astype(np.uint32) << 16).view(np.float32)
        return data.astype(np.float32)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        rounding = to_tf32 if input_precision.name == "TF32x3" else to_bfloat16
        high = [rounding(widened(x)) for x in (a, b)]
        low = [rounding(widened(x) - y) for x, y in zip((a, b), high, strict=True)]
        product = high[0] @ low[1] + low[0] @ high[1] + high[0] @ high[1]
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter._convert_float = rounded


# --- inputs


def log_decays(gate: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Natural log-decays of one kind."""
    x = torch.randn(shape)
    if gate == "unbounded":
        return -16.0 * torch.nn.functional.softplus(x)
    shift, scale = {"saturated": (20.0, 0.0), "open": (-12.0, 1.0), "mixed": (0.0, 4.0)}[gate]
    return -5.0 * torch.sigmoid(shift + scale * x)


def padded(lengths: tuple[int, ...]) -> int:
    return max(1, sum(math.ceil(n / CHUNK) for n in lengths)) * CHUNK


def make_inputs(case: Case) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Operands as the kernels take them, reset per chunk, and which tokens are real."""
    length = padded(case.lengths)
    shape = (case.rows, length, case.heads)
    q, k = torch.randn(*shape, case.K), torch.randn(*shape, case.K)
    if case.correlated:
        k = torch.ones(case.K) + 0.33 * k
    q, k = q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True)
    v, g = torch.randn(*shape, case.V), log_decays(case.gate, (*shape, case.K))
    beta = 2 * torch.rand(shape) if case.beta is None else torch.full(shape, case.beta)
    real = torch.zeros(length, dtype=torch.bool)
    reset = torch.zeros(case.rows, length // CHUNK, dtype=torch.int32)
    start = 0
    for number, n in enumerate(case.lengths):
        real[start : start + n] = True
        if number and start < length:
            reset[:, start // CHUNK] = 1
        start += math.ceil(n / CHUNK) * CHUNK
    for x in (k, v, g, beta):
        x[:, ~real] = 0.0
    state = torch.randn(case.rows, case.heads, case.K, case.V)
    q, k, v = (x.to(case.dtype) for x in (q, k, v))
    return [q, k, v, g, beta, state], reset, real


# --- the oracle


def recurrence(inputs: list[torch.Tensor], reset: torch.Tensor):
    """Outputs, final state and states after each chunk."""
    out, state, after = recurrence_of(inputs[:5], inputs[5], reset)
    return out, state, torch.stack(after)


def recurrence_of(operands, state: torch.Tensor, reset: torch.Tensor | None = None):
    """The same, token by token; of any number of tokens where nothing is reset."""
    q, k, v, g, beta = operands
    out, after = [], []
    for t in range(q.shape[1]):
        if reset is not None and t % CHUNK == 0:
            state = torch.where(reset[:, t // CHUNK, None, None, None] != 0, 0.0, state)
        state = state * torch.exp(g[:, t])[..., None]
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("rhkv,rhk->rhv", state, k[:, t]))
        state = state + k[:, t, ..., None] * u[:, :, None]
        out.append(torch.einsum("rhkv,rhk->rhv", state, q[:, t]) * q.shape[-1] ** -0.5)
        if t % CHUNK == CHUNK - 1:
            after.append(state)
    return torch.stack(out, 1), state, after


# --- the kernels, launched as triton_launch does


def centre(gate: str) -> int:
    """As `triton_launch.centre`."""
    return 0 if gate == "unbounded" else anchor.CENTRE


def run_prepare(inputs, gate, adjoint):
    q, k, _, g, beta, _ = inputs
    rows, length, heads, K = q.shape
    tiles = rows * length // CHUNK * heads
    parts = 1 if q.dtype == torch.float32 else 2
    nan = float("nan")
    read_q = torch.empty(tiles, CHUNK, K, dtype=q.dtype)
    wide = [torch.empty(tiles, parts, CHUNK, K, dtype=q.dtype) for _ in range(2)]
    # What is never written must never be read.
    square = [
        torch.full((tiles, parts, CHUNK, CHUNK), nan, dtype=q.dtype) for _ in range(2 + adjoint)
    ]
    outputs = [read_q, *wide, torch.empty(tiles, K), *square, *([] if adjoint else [None])]
    sizes = {"K": K, "BK": block_sizes.prepare(K).block, "SCALE": K**-0.5, "CENTRE": centre(gate)}
    kernels.prepare[(tiles,)](q, k, g, beta, heads, *outputs, **sizes)
    return outputs


def scan_block(v) -> int:
    """Value columns of a serial scan where there are enough heads to fill the device."""
    bf16 = v.dtype == torch.bfloat16
    return block_sizes.scan(block_sizes.PROGRAMS, v.shape[-1], bf16).block


def run_forward(prepared, inputs, reset):
    q, _, v, _, beta, state = inputs
    rows, length, heads, K = q.shape
    V, chunks = v.shape[-1], length // CHUNK
    read_q, read_k, write_k, total, causal, inverse, _ = prepared
    BV = scan_block(v)
    out, final = torch.empty_like(v), torch.empty_like(state)
    after = torch.empty(chunks, rows, heads, K, V)
    kernels.scan[(V // BV, heads, rows)](
        read_q, read_k, write_k, v, beta, total, causal, inverse, state, reset, heads, chunks,
        out, final, after, K=K, V=V, BV=BV,
    )  # fmt: skip
    return out, final, after


def run_backward(prepared, inputs, reset, gate, cotangents):
    q, k, v, g, beta, state = inputs
    rows, length, heads, K = q.shape
    V, chunks = v.shape[-1], length // CHUNK
    do, dfinal, dafter = cotangents
    BV = scan_block(v)
    tiles, grid = rows * chunks * heads, (V // BV, heads, rows)
    read_q, read_k, write_k, total, causal, inverse, adjoint = prepared
    entering, dstates = (torch.empty(tiles, K, V, dtype=q.dtype) for _ in range(2))
    delta, du = (torch.empty(tiles, CHUNK, V, dtype=q.dtype) for _ in range(2))
    kernels.replay[grid](
        read_k, write_k, v, beta, total, inverse, state, reset, heads, chunks, entering, delta,
        K=K, V=V, BV=BV,
    )  # fmt: skip
    dstate = torch.empty_like(state)
    kernels.scan_back[grid](
        do, read_q, read_k, write_k, beta, total, causal, adjoint, dfinal, dafter, reset, heads,
        chunks, dstates, du, dstate, K=K, V=V, BV=BV, EXPORTED=True,
    )  # fmt: skip
    dq, dk, dv, dg, dbeta = (torch.empty_like(x) for x in (q, k, v, g, beta))
    dcausal, dlower = (torch.empty(tiles, CHUNK, CHUNK) for _ in range(2))
    BK, BV = block_sizes.chunk_gradients(K).block, block_sizes.score_cotangents(V).block
    kernels.score_cotangents[(tiles,)](
        beta, do, delta, du, heads, dcausal, dlower, dv, dbeta, V=V, BV=BV
    )  # fmt: skip
    kernels.chunk_gradients[(tiles, K // BK)](
        q, k, g, beta, do, entering, delta, dstates, du, dcausal, dlower, heads, dq, dk, dg,
        SCALE=K**-0.5, K=K, V=V, BK=BK, BV=BV, CENTRE=centre(gate),
    )  # fmt: skip
    return dq, dk, dv, dg, dbeta, dstate


# --- comparisons


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative L2; absolute where the oracle has all but decayed away."""
    norm = want.norm().item()
    return (got.double() - want).norm().item() / (norm if norm > 1e-30 else 1.0)


def compare(case: Case) -> bool:
    torch.manual_seed(0)
    inputs, reset, real = make_inputs(case)
    exact = [x.double().requires_grad_() for x in inputs]
    wants = recurrence(exact, reset)
    cotangents = [torch.randn(x.shape) for x in wants]
    cotangents[0] = cotangents[0].to(case.dtype) * real[None, :, None, None]
    sum((x * d.double()).sum() for x, d in zip(wants, cotangents, strict=True)).backward()
    prepared = run_prepare(inputs, case.gate, True)
    gets = run_forward(prepared, inputs, reset)
    gradients = run_backward(prepared, inputs, reset, case.gate, cotangents)
    forward = [error(got, want.detach()) for got, want in zip(gets, wants, strict=True)]
    backward = {
        name: error(
            got[:, real] if name != "state" else got, x.grad[:, real] if name != "state" else x.grad
        )
        for name, got, x in zip(NAMES, gradients, exact, strict=True)
    }
    limits = case.limits or LIMITS[case.dtype]
    # False where one is not a number; `max` passes over those that do not come first.
    good = all(e <= limits[0] for e in forward) and all(e <= limits[1] for e in backward.values())
    shown = " ".join(f"d{name} {e:.1e}" for name, e in backward.items())
    mark = "ok  " if good else "FAIL"
    print(f"{mark} {case.name:34s} o {forward[0]:.1e} final {forward[1]:.1e} "
          f"borders {forward[2]:.1e} | {shown}", flush=True)  # fmt: skip
    return good


def said(name: str, good: bool, text: str) -> bool:
    print(f"{'ok  ' if good else 'FAIL'} {name:34s} {text}", flush=True)
    return good


def check_causality() -> bool:
    """Bit for bit: outputs before a changed token, a row cut at a multiple of 64, and outputs
    beside which a backward pass has its own matrices prepared.
    """
    torch.manual_seed(1)
    case = Case("", (192,), dtype=torch.bfloat16)
    inputs, reset, _ = make_inputs(case)

    def forward(inputs, reset, adjoint=False):
        return run_forward(run_prepare(inputs, case.gate, adjoint), inputs, reset)

    out, final, _ = forward(inputs, reset)
    changed = [x.clone() for x in inputs]
    for x in changed[:5]:
        x[:, 86] = x[:, 86] * -0.5
    other, _, _ = forward(changed, reset)
    causal = torch.equal(out[:, :86], other[:, :86]) and not torch.equal(out, other)
    halves, state = [], inputs[-1]
    for cut in (slice(0, 128), slice(128, 192)):
        part = [x[:, cut].contiguous() for x in inputs[:5]]
        half, state, _ = forward([*part, state], reset[:, : part[0].shape[1] // CHUNK])
        halves.append(half)
    split = torch.equal(torch.cat(halves, 1), out) and torch.equal(state, final)
    both = torch.equal(forward(inputs, reset, adjoint=True)[0], out)
    said_all = f"{causal} {split} {both}"
    return said("causal, split, both ways, to the bit", causal and split and both, said_all)


def check_decode() -> bool:
    """Tokens on pages in place: two heads a page, an idle row, a row with one token of two.

    The last row is fresh and its pages hold NaN.
    """
    torch.manual_seed(2)
    rows, tokens, heads, K, V, per_page = 4, 2, 4, 32, 48, 2
    inputs, _, _ = make_inputs(Case("", (64,), rows=rows, heads=heads, K=K, V=V))
    q, k, v, g, beta = (x[:, :tokens].contiguous() for x in inputs[:5])
    state, head_words = inputs[-1], 16 * 128
    words = per_page * head_words + 8 * 128
    state[3] = float("nan")
    pages = 1 + torch.randperm(rows * heads // per_page).reshape(rows, -1).to(torch.int32)
    pool = torch.randint(-(2**31), 2**31, (10, words)).to(torch.int32)
    places = {}
    for r in range(rows):
        for h in range(heads):
            at = slice(h % per_page * head_words, h % per_page * head_words + K * V)
            places[r, h] = int(pages[r, h // per_page]), at
            pool[places[r, h]] = state[r, h].reshape(-1).view(torch.int32)
    before, out = pool.clone(), torch.zeros(rows, tokens, heads, V)
    n_valid, fresh = (torch.tensor(x, dtype=torch.int32) for x in ([2, 0, 1, 2], [0, 0, 0, 1]))
    bits = pool.view(torch.uint32)
    kernels.decode[(V // 16, heads, rows)](
        q, k, v, g, beta, pages, n_valid, fresh, bits, heads, tokens, words, pages.shape[1], out,
        bits, SCALE=K**-0.5, K=K, V=V, BV=16, HEADS_PER_PAGE=per_page, HEAD_WORDS=head_words,
    )  # fmt: skip
    errors, rest = [], pool.clone()
    state[3] = 0.0
    for r, n in ((0, 2), (2, 1), (3, 2)):
        exact = [x[r : r + 1, :n].double() for x in (q, k, v, g, beta)]
        want, final, _ = recurrence_of(exact, state[r : r + 1].double())
        errors.append(error(out[r, :n], want[0]))
        for h in range(heads):
            got = pool[places[r, h]].view(torch.float32).reshape(K, V)
            errors.append(error(got, final[0, h]))
            rest[places[r, h]] = before[places[r, h]]
    kept = torch.equal(rest, before)
    good = all(e <= 1e-5 for e in errors) and kept
    return said("decode on pages", good, f"{max(errors):.1e}, rest of the pool untouched {kept}")


def cases() -> list[Case]:
    found = [Case(f"T {n}", (n,), heads=1) for n in (1, 15, 16, 17, 63, 64)]
    found += [Case("T 65, K 128, V 64", (65,), heads=1, K=128, V=64)]
    found += [Case(f"gate {gate}", gate=gate) for gate in ("saturated", "open", "unbounded")]
    found += [Case(f"beta {beta}", beta=float(beta)) for beta in (0, 1, 2)]
    ragged = (70, 0, 64, 1, 0, 130)
    found += [
        Case("ragged, empty segments", ragged, rows=2, heads=1),
        Case("K 64, V 16", K=64, V=16),
    ]
    found += [Case("K 16, V 48", K=16, V=48), Case("unbounded, ragged", ragged, gate="unbounded")]
    long = {"lengths": (1000,), "heads": 1}
    found += [Case("T 1000", **long), Case("T 1000 unbounded", **long, gate="unbounded")]
    found += [Case("T 1000 open", **long, gate="open")]
    bf16 = {"dtype": torch.bfloat16}
    found += [Case(f"bf16 {g}", **bf16, gate=g) for g in ("saturated", "mixed", "unbounded")]
    same = {"correlated": True, "gate": "open", "K": 128}
    found += [
        Case("T 1000 correlated, beta 2", **long, **same, beta=2.0, limits=(5e-3, 5e-3)),
        Case("bf16 correlated, beta 2", **long, **same, **bf16, beta=2.0, limits=(3e-2, 3e-2)),
    ]
    found += [Case("bf16 open, K 128", K=128, heads=1, gate="open", **bf16)]
    found += [Case("bf16 open, K 128, beta 1", K=128, heads=1, gate="open", beta=1.0, **bf16)]
    found += [
        Case("bf16 T 1000", **long, **bf16),
        Case("bf16 K, V 128", K=128, V=128, heads=1, **bf16),
    ]
    hard = {**long, **bf16, "gate": "open", "beta": 2.0}
    found += [Case(f"bf16 open, beta 2, K {K}", K=K, V=16, **hard) for K in (16, 32, 64, 128)]
    return found


def main() -> int:
    mend_interpreter()
    results = [check_causality(), check_decode(), *(compare(case) for case in cases())]
    print(f"{sum(results)} passed, {len(results) - sum(results)} failed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
