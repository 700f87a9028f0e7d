"""The fullest moment of small programs, counted by hand. All numbers are float32."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from launch.plan.liveness import fullest

N = 16
MATRIX = 4 * N * N


def bytes_of(run, *shapes: tuple[int, ...]) -> int:
    given = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    return fullest(
        jax.make_jaxpr(run)(*given).jaxpr, lambda value, own: value.size * value.dtype.itemsize
    )


def test_a_product_of_products_holds_its_operand() -> None:
    """The last result lies where an input was."""
    assert bytes_of(lambda a, b: (a @ b) @ b, (N, N), (N, N)) == MATRIX


def test_what_is_read_no_more_is_gone() -> None:
    """Two at a time, however long the chain."""
    assert bytes_of(lambda a, b: (((a @ b) @ b) @ b) @ b, (N, N), (N, N)) == 2 * MATRIX


def test_arithmetic_that_one_reads_takes_nothing() -> None:
    assert bytes_of(lambda a: jnp.sin(jnp.exp(a) + 1.0), (N, N)) == 0


def test_arithmetic_that_two_read_is_kept() -> None:
    def run(a, b):
        both = jnp.exp(a)
        return both @ b, both * 2.0

    assert bytes_of(run, (N, N), (N, N)) == MATRIX


def test_the_same_twice_is_there_once() -> None:
    def run(a, b):
        return jnp.exp(a) @ b + jnp.exp(a) @ (b + 1.0)

    # exp(a), b + 1 and both products; the sum is the result.
    assert bytes_of(run, (N, N), (N, N)) == 4 * MATRIX


@pytest.mark.parametrize(("policy", "arrays"), [("none", 5), ("block", 4)])
def test_recomputation_keeps_less(policy: str, arrays: int) -> None:
    """Four products with sines between, whose slopes need the products.

    Without recomputation: three products, the sine of the third, and the fourth product made of it.
    With it: the cotangent between the pairs, a product, its sine, and the second product.
    """

    def pair(x, w):
        return jnp.sin(jnp.sin(x @ w) @ w)

    block = jax.checkpoint(pair) if policy == "block" else pair

    def slope(x, w):
        return jax.grad(lambda x: block(block(x, w), w).sum())(x)

    assert bytes_of(slope, (N, N), (N, N)) == arrays * MATRIX


def test_a_loop_has_its_carry_in_place() -> None:
    """Carry, the product that becomes the next one, and the number of the turn."""

    def run(a, b):
        return jax.lax.fori_loop(0, 3, lambda _, c: c @ b, a) @ b

    assert bytes_of(run, (N, N), (N, N)) == 2 * MATRIX + 4


def test_what_a_loop_writes_is_there_from_the_start() -> None:
    """[5, N, N] of zeros, made before the products that the loop waits for; in the loop its carry,
    the next one, and what goes into the rows."""

    def run(a, b):
        begun = ((a @ b) @ b) @ b
        carry, rows = jax.lax.scan(lambda c, _: (c @ b, jnp.sin(c)), begun, length=5)
        return carry, rows @ b

    assert bytes_of(run, (N, N), (N, N)) == (5 + 3) * MATRIX


def test_a_device_holds_its_part_and_what_it_gathers() -> None:
    """Halves of two products, and between them the first one whole."""
    mesh = AbstractMesh((2,), ("x",), (AxisType.Auto,))
    rows = PartitionSpec("x")

    def own(a: jax.Array, b: jax.Array) -> jax.Array:
        made = a @ b
        return (made @ jax.lax.all_gather(made, "x", tiled=True)) @ b

    def bytes_with(run: Callable[..., jax.Array]) -> int:
        given = (jax.ShapeDtypeStruct((N, N), jnp.float32),) * 2
        with jax.sharding.use_abstract_mesh(mesh):
            traced = jax.make_jaxpr(run)(*given)
        return fullest(traced.jaxpr, lambda value, own: 4 * value.size // (1 if own else 2))

    def three(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (own(c, b), None), a, length=3)[0]

    assert bytes_with(lambda a, b: (a @ b) @ b) == MATRIX // 2
    for run in own, three:
        each = jax.shard_map(run, in_specs=(rows, None), out_specs=rows)
        assert bytes_with(each) == MATRIX // 2 + MATRIX + MATRIX // 2
