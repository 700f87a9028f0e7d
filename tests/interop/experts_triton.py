"""Interprets the Triton kernels of grouped products on the CPU against products in float64.

    TRITON_INTERPRET=1 PYTHONPATH=. ORACLE/bin/python tests/interop/experts_triton.py

in an environment made from requirements-triton.txt. Prints one line per case and exits with 1 where
one is over its limit: relative L2 errors, those of `kda_triton.py`.
"""

import sys
from itertools import accumulate

import torch

from rl_jax.kernels.experts import triton as kernels
from tests.interop.kda_triton import LIMITS, error, mend_interpreter, said

CASES = {
    "whole tiles": ((32, 16), 0, 32, 16),
    "groups of none, some and many rows": ((0, 5, 40, 0, 1, 33, 0), 0, 32, 16),
    "rows past all groups": ((3, 20), 41, 32, 16),
    "widths that no block divides": ((7, 30, 9), 2, 24, 40),
}
"""Sizes of groups, rows past them, K, N."""
BM, BN, BK = 16, 16, 16
BEYOND = float("nan")
"""Of rows past all groups."""


def tiles(sizes: tuple[int, ...], spare: int = 2) -> list[torch.Tensor]:
    """Group, first row and end of each tile, then some of no rows."""
    ends = list(accumulate(sizes))
    made = [
        (group, first, end)
        for group, (size, end) in enumerate(zip(sizes, ends, strict=True))
        for first in range(end - size, end, BM)
    ]
    made += [(len(sizes) - 1, 7, 7)] * spare
    return [torch.tensor(column, dtype=torch.int32) for column in zip(*made, strict=True)]


def by_group(sizes: tuple[int, ...]) -> list[slice]:
    return [slice(end - n, end) for n, end in zip(sizes, accumulate(sizes), strict=True)]


def compare(name: str, dtype: torch.dtype) -> bool:
    sizes, past, width, columns = CASES[name]
    torch.manual_seed(0)
    count = sum(sizes)
    rows, slopes = (torch.randn(count + past, n).to(dtype) for n in (width, columns))
    rows[count:] = slopes[count:] = BEYOND
    matrices = torch.randn(len(sizes), width, columns).to(dtype)
    spans, (groups, first, end) = by_group(sizes), tiles(sizes)
    ends = torch.tensor(list(accumulate(sizes)), dtype=torch.int32)
    starts = ends - torch.tensor(sizes, dtype=torch.int32)
    blocks = {"BM": BM, "BN": BN, "BK": BK}

    def product(given, turned):
        k, n = (columns, width) if turned else (width, columns)
        out = torch.full((count + past, n), BEYOND, dtype=dtype)
        along = {"ALONG_K": 1, "ALONG_N": k} if turned else {"ALONG_K": n, "ALONG_N": 1}
        grid = (-(-n // BN), len(first))
        operands = given, matrices, groups, first, end, out
        kernels.rows_product[grid](*operands, K=k, N=n, **along, **blocks)
        return out[:count]

    made = torch.full_like(matrices, BEYOND)
    grid = (-(-columns // BN), -(-width // BK), len(sizes))
    kernels.groups_product[grid](rows, slopes, starts, ends, made, K=width, N=columns, **blocks)
    exact = matrices.double()
    wanted = [rows[s].double() @ exact[g] for g, s in enumerate(spans)]
    turned = [slopes[s].double() @ exact[g].T for g, s in enumerate(spans)]
    pulled = [rows[s].double().T @ slopes[s].double() for s in spans]
    errors = [
        error(product(rows, turned=False), torch.cat(wanted)),
        error(product(slopes, turned=True), torch.cat(turned)),
        error(made, torch.stack(pulled)),
    ]
    good = all(e <= LIMITS[dtype][0] for e in errors)
    shown = " ".join(f"{e:.1e}" for e in errors)
    return said(f"{name}, {str(dtype)[6:]}", good, f"out, its rows' and matrices' slopes {shown}")


def main() -> int:
    mend_interpreter()
    good = [compare(name, dtype) for name in CASES for dtype in LIMITS]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
