"""[P] How a diagonal block stays inside float32: numbers that every backend shares.

Imports nothing: Triton's kernels are interpreted where there is no jax.
"""

BLOCK = 16
"""Rows of a diagonal block; 15 steps of the strongest bounded decay must fit float32's exponent."""
STRONGEST_BOUND = 5.82
"""|lower bound| of a gate must be below: 15 steps of it are e^-87.3, float32's smallest normal."""
CENTRE = 54
"""2^54 is exp of half of 15 steps at the gate's bound of -5: it centres the factors of a diagonal
block, as a power of two so that nothing is rounded."""
