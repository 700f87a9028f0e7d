"""Manifests and keep policies: golden digests, what changes them and what does not."""

import hashlib
import json
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rl_jax.snapshots.manifest import (
    build_manifest,
    describe,
    from_json,
    named_leaves,
    to_json,
    tree_digest,
)
from rl_jax.snapshots.policies import keep_all, keep_last


def test_leaf_digest_is_of_the_format_page() -> None:
    leaf = describe(np.array([[1, 2], [258, -1]], np.int32))
    written = b"int32 [2, 2]\n" + bytes.fromhex("01000000 02000000 02010000 ffffffff")
    assert leaf.digest == hashlib.sha256(written).hexdigest()
    assert leaf[:2] == ("int32", (2, 2))


def test_bfloat16_and_scalars_have_digests() -> None:
    assert describe(np.asarray(jnp.array(1.5, jnp.bfloat16))) == (
        "bfloat16",
        (),
        hashlib.sha256(b"bfloat16 []\n\xc0\x3f").hexdigest(),
    )


def test_tree_digest_is_of_the_format_page() -> None:
    tree = {"b": {"w": np.zeros(1, np.int8)}, "a": [np.ones(1, np.int8)]}
    zero, one = (hashlib.sha256(b"int8 [1]\n" + d).hexdigest() for d in (b"\x00", b"\x01"))
    want = hashlib.sha256(f"a/0 {one}\nb/w {zero}\n".encode()).hexdigest()
    assert build_manifest(tree, 0, 0, "").digest == want


def test_memory_order_and_sharding_do_not_matter() -> None:
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    spread = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data", "tensor")))
    assert describe(x) == describe(np.asfortranarray(x)) == describe(np.asarray(spread))
    assert describe(x) == describe(x.astype(">f4"))


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.at[3].add(1e-6),
        lambda x: x.astype(jnp.bfloat16),
        lambda x: x.reshape(2, 2),
        lambda x: -x,  # the sign of a zero
    ],
)
def test_dtype_shape_and_every_bit_matter(change: Callable) -> None:
    x = jnp.array([0.0, 0.0, 0.0, 1.0])
    assert describe(np.asarray(x)).digest != describe(np.asarray(change(x))).digest


def test_exchanged_names_change_the_tree() -> None:
    a, b = np.zeros(2), np.ones(2)
    digests = {build_manifest(t, 0, 0, "").digest for t in ({"a": a, "b": b}, {"a": b, "b": a})}
    assert len(digests) == 2


def test_two_leaves_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two leaves of the tree are called a/b"):
        named_leaves({"a": {"b": 1}, "a/b": 2})


@pytest.mark.parametrize(("version", "step"), [(-1, 0), (0, -1)])
def test_counts_start_at_zero(version: int, step: int) -> None:
    with pytest.raises(ValueError, match="count from 0"):
        build_manifest({}, version, step, "")


def test_json_round_trip() -> None:
    manifest = build_manifest({"w": np.ones((2, 3)), "b": np.int32(4)}, 5, 20, "abc")
    assert from_json(to_json(manifest)) == manifest
    assert json.loads(to_json(manifest))["leaves"]["w"]["shape"] == [2, 3]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"leaves": {}}', '{"leaves": {"w": {"dtype": "int8"}}}', "\x00"]
)
def test_other_text_is_no_manifest(text: str) -> None:
    with pytest.raises(ValueError, match="not a manifest"):
        from_json(text)


def test_a_manifest_that_contradicts_itself_is_refused() -> None:
    manifest = build_manifest({"w": np.ones(2)}, 0, 0, "")
    changed = manifest._replace(leaves={"v": manifest.leaves["w"]})
    with pytest.raises(ValueError, match="do not have its digest"):
        from_json(to_json(changed))
    assert from_json(to_json(changed._replace(digest=tree_digest(changed.leaves))))


def test_keep_policies() -> None:
    versions = (0, 3, 4, 9)
    assert keep_all(versions) == {0, 3, 4, 9}
    assert keep_last(2)(versions) == {4, 9}
    assert keep_last(9)(versions) == {0, 3, 4, 9}
    with pytest.raises(ValueError, match="at least 1"):
        keep_last(0)
