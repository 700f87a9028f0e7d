"""Plans against arrays that really lie on eight devices, and against XLA's own analysis."""

import json
from typing import Any

import jax
import pytest

from launch import build, cli
from launch.plan import trainer
from launch.plan.base import Program, bytes_of
from launch.plan.sampler import plan_sampler
from launch.plan.trainer import compared, plan_trainer
from rl_jax.arrays import Tree
from rl_jax.config.run import RunConfig
from rl_jax.sampler.layout import make_layout, make_pool
from rl_jax.trainer.state import POLICY

KIMI = {
    "width": 32, "layers": ["kda", "mla"], "heads": 4, "head_dim": 8, "ffn": 48, "kv_latent": 16,
    "kv_shared_key": 8,
}  # fmt: skip
LLAMA = {
    "family": "llama", "width": 32, "layers": 2, "heads": 8, "kv_heads": 4, "head_dim": 8, "ffn": 64
}  # fmt: skip
BLOCK = {"remat": "block"}
VOCAB = 128


def config(model: dict[str, Any], trainer: dict[str, int], sampler: dict[str, int]) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "planned",
            "model": model,
            "mesh": {"trainer": trainer, "sampler": sampler},
            "trainer": {"rows_per_microbatch": 8, "row_length": 256, "groups": 2},
            "sampler": {"slots": 8, "prefill_rows": 4, "sessions": 8, "max_context": 128},
            "rollout": {"in_flight": 8},
        }
    )


def on_device(tree: Tree) -> int:
    """Bytes of the shards that lie on device 0."""
    shards = (s for x in jax.tree.leaves(tree) for s in x.addressable_shards)
    return sum(s.data.nbytes for s in shards if s.device == jax.devices()[0])


def part(program: Program, name: str) -> int:
    return next(p.bytes for p in program.held if p.name == name)


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """For plans of which nothing is asked that tracing a step tells, and most of the time."""
    monkeypatch.setattr(trainer, "temporaries", lambda config, vocab_size: 0)


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("model", [KIMI, LLAMA], ids=["kimi_linear", "llama"])
@pytest.mark.parametrize(
    "mesh",
    [{}, {"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 4, "context": 2}, {"tensor": 4, "data": 2}],
    ids=str,
)
def test_parameters_and_optimizer_to_the_byte(model: dict, mesh: dict) -> None:
    own = config(model, mesh, {})
    policy = build.build_policy(own, VOCAB)
    state = build.abstract_state(
        policy,
        build.build_loss(own),
        build.build_optimizer(own),
        build.build_meshes(own).trainer if not mesh else _trainer_mesh(own),
    )
    placed = jax.tree.map(
        lambda x: jax.device_put(jax.numpy.zeros(x.shape, x.dtype), x.sharding), state
    )
    planned = plan_trainer(own, policy)
    assert part(planned, "parameters") == on_device(placed.params[POLICY])
    assert part(planned, "optimizer") == on_device(placed.optimizer)
    assert bytes_of(state) == on_device(placed)


def _trainer_mesh(own: RunConfig) -> Any:
    from rl_jax.sharding import make_trainer_mesh

    return make_trainer_mesh(jax.devices(), **own.mesh.trainer.model_dump())


@pytest.mark.parametrize("model", [KIMI, LLAMA], ids=["kimi_linear", "llama"])
@pytest.mark.parametrize("mesh", [{}, {"data": 2, "tensor": 4}], ids=str)
def test_caches_to_the_byte(model: dict, mesh: dict) -> None:
    own = config(model, {}, mesh)
    policy = build.build_policy(own, VOCAB)
    place = build.make_mesh(jax.devices(), mesh.get("data", 1), mesh.get("tensor", 1))
    layout = make_layout(
        policy.cache_spec,
        data=mesh.get("data", 1),
        tensor=mesh.get("tensor", 1),
        sequences=own.sampler.sessions,
        max_context=own.sampler.max_context,
    )
    planned = plan_sampler(own, policy)
    assert part(planned, "caches") == on_device(make_pool(layout, place))


@pytest.mark.usefixtures("untraced")
def test_masters_and_a_bfloat16_copy() -> None:
    own = config(LLAMA, {}, {})
    half = own.model_copy(
        update={"trainer": own.trainer.model_copy(update={"param_dtype": "bfloat16"})}
    )
    policy = build.build_policy(own, VOCAB)
    plain, rounded = (plan_trainer(c, policy) for c in (own, half))
    assert part(rounded, "masters") == part(plain, "parameters")
    copies = {p.name: p.bytes for p in rounded.moments["update"]}
    matrices = sum(x.size for x in jax.tree.leaves(_shapes(policy)) if x.ndim > 1)
    vectors = sum(x.size for x in jax.tree.leaves(_shapes(policy)) if x.ndim < 2)
    assert copies["rounded copy of the masters"] == 2 * matrices + 4 * vectors


def _shapes(policy: Any) -> Tree:
    return jax.eval_shape(policy.init, jax.random.key(0))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        pytest.param(LLAMA, {}, id="llama", marks=pytest.mark.slow),
        pytest.param(LLAMA | BLOCK, {}, id="llama_remat"),
        pytest.param(KIMI, {}, id="kimi_linear", marks=pytest.mark.slow),
        pytest.param(KIMI | BLOCK, {}, id="kimi_linear_remat", marks=pytest.mark.slow),
        pytest.param(
            LLAMA, {"fsdp": 2, "tensor": 2, "context": 2}, id="on_8", marks=pytest.mark.slow
        ),
        pytest.param(KIMI | BLOCK, {"fsdp": 2, "context": 4}, id="context", marks=pytest.mark.slow),
    ],
)
def test_a_step_within_a_fifth_of_what_xla_says(model: dict, mesh: dict) -> None:
    own = config(model, mesh, {})
    policy = build.build_policy(own, VOCAB)
    place = _trainer_mesh(own)
    loss, optimizer = build.build_loss(own), build.build_optimizer(own)
    options = build.step_options(own, policy)
    step: Any = build.compile_step(
        policy, loss, optimizer, place, build.rl_shape(own), options=options
    ).step
    said = step.memory_analysis()
    planned = compared(plan_trainer(own, policy))
    assert planned["arguments"] == pytest.approx(said.argument_size_in_bytes, rel=0.01)
    found = said.argument_size_in_bytes + said.temp_size_in_bytes
    assert sum(planned.values()) == pytest.approx(found, rel=0.2)


@pytest.mark.usefixtures("unchecked")
def test_a_large_mesh_needs_no_devices(capsys: pytest.CaptureFixture) -> None:
    mesh = "--mesh", "data=8,fsdp=64", "--sampler", "tensor=8", "--rows", "512"
    assert cli.main(["plan", "--model", "qwen3_0_6b", *mesh, "--chip", "v5p", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["trainer"]["devices"] == 512 and told["trainer"]["fits"] is True
    held = {p["name"]: p["bytes"] for p in told["trainer"]["held"]}
    # 596,049,920 parameters of Qwen3-0.6B, of which fsdp cuts all but the heads' norms.
    norms = 28 * 2 * 128
    assert held["parameters"] == 4 * ((596_049_920 - norms) // 64 + norms)


@pytest.mark.usefixtures("untraced")
def test_axes_that_are_not_named_are_1(capsys: pytest.CaptureFixture) -> None:
    """The file's meshes are fsdp 8 and tensor 8."""
    meshes = "--mesh", "tensor=8", "--sampler", "data=1"
    assert cli.main(["plan", "--model", "qwen3_0_6b", *meshes]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "trainer: 8 devices (tensor 8), bytes of one"
    assert "sampler: 1 device (not cut), bytes of one" in told


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            ["--model", "gpt"],
            "--model gpt: no such model; there is kimi_linear_48b, kimi_linear_48b_1m, kimi_lin",
        ),
        (["--model", "quickstart", "--mesh", "data"], "--mesh data: needs AXIS=SIZE"),
        (["--model", "quickstart", "--mesh", "tensor=3"], "needs a divisor of model.heads = 4"),
        (["--model", "qwen3_0_6b", "--mesh", "fsdp=3"], "needs a divisor of model.width = 1024"),
        (["--model", "quickstart", "--chip", "abacus"], "--chip abacus: there is v5p, v6e, h200"),
        (
            ["--model", "quickstart", "--remat", "some"],
            '--remat some: model.remat = "some": needs "none" or "block" or "dots"\n',
        ),
        (
            ["--model", "quickstart", "--mesh", "data=2,foo=2"],
            "--mesh foo=2: unknown axis; there is data, tensor, fsdp, expert, context\n",
        ),
        (
            ["--model", "quickstart", "--sampler", "fsdp=2"],
            "--sampler fsdp=2: unknown axis; there is data, tensor\n",
        ),
        (
            ["--model", "quickstart", "--mesh", "context=4"],
            "quickstart.toml with --mesh context=4: mesh.trainer.context x 64 = 256: needs a "
            "divisor of trainer.row_length = 128\n",
        ),
        (
            ["--model", "quickstart", "--mesh", "tensor=0"],
            "--mesh tensor=0: mesh.trainer.tensor = 0: needs an integer, at least 1\n",
        ),
        (
            ["--model", "quickstart", "--param-dtype", "int8"],
            '--param-dtype int8: trainer.param_dtype = "int8": needs "float32" or "bfloat16"\n',
        ),
        (
            ["--model", "quickstart", "--rows", "-"],
            '--rows -: the value is not TOML; write 3, 0.5, true, "text" or [1, 2]\n',
        ),
    ],
)
def test_mistakes(options: list[str], said: str, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["plan", *options]) == 2
    told = capsys.readouterr().err
    assert told.startswith("rl-jax: ") and told.count("\n") == 1 and said in told
