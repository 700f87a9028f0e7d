"""[N] Limits of the run's configuration: each at its border, on both sides."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from rl_jax.arrays import CHUNK
from rl_jax.config import run
from rl_jax.config.base import UserError, explain
from rl_jax.config.run import RunConfig, check_devices


def config(**sections) -> RunConfig:
    return RunConfig.model_validate({"name": "test", **sections})


def refused(**sections) -> str:
    with pytest.raises(ValidationError) as caught:
        config(**sections)
    return explain(caught.value, RunConfig)[1]


@pytest.mark.parametrize("package", ["rl_jax.config.run", "rl_jax.config.load"])
def test_imports_no_jax(package):
    code = f"import {package}, sys; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_chunk_is_the_one_of_arrays():
    assert run.CHUNK == CHUNK


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"staleness": {"tau": 0}}, "staleness.tau = 0: needs an integer, at least 1"),
        ({"trainer": {"push_every": 0}}, "trainer.push_every = 0: needs an integer, at least 1"),
        ({"trainer": {"group_size": 0}}, "trainer.group_size = 0: needs an integer, at least 1"),
        ({"critic": {"updates_per_step": 0}}, "critic.updates_per_step = 0: needs an integer, at"),
        ({"critic": {"frozen": [3]}}, "critic.frozen[0] = 3: needs a string"),
        ({"critic": {"lr": 1.0}}, "unknown key critic.lr; [critic] has learning_rate, updates"),
        ({"critic": True}, "critic = true: needs a table with the keys learning_rate, updates_per"),
        ({"teachers": {"one-two": "a/0"}}, "teachers = {...}: 'one-two': needs names of letters"),
        ({"teachers": {"one": 3}}, "teachers.one = 3: needs a string"),
        ({"trainer": {"learning_rate": -1e-9}}, "trainer.learning_rate = -1e-09: needs"),
        ({"trainer": {"row_length": 96}}, "trainer.row_length = 96: needs"),
        ({"loss": {"eps_high": float("inf")}}, "loss.eps_high = inf: needs a finite number"),
        ({"loss": {"eps_high": {"a": 1}}}, "loss.eps_high = {...}: needs a finite number"),
        ({"loss": {"recipe": "grop"}}, 'loss.recipe = "grop": no such recipe; there is ppo, grpo,'),
        ({"loss": {"recipe": "mine.py"}}, "and your own as path/to/file.py:name or package.module"),
        ({"advantage": {"name": "mine"}}, 'advantage.name = "mine": no such advantage; there is g'),
        ({"trainer": {"replay_choices": True}}, "needs sampler.record_choices = true, or there is"),
        ({"rollout": {"temperature": 0.0}}, "rollout.temperature = 0.0: needs a number, above 0"),
        ({"rollout": {"top_p": 0.99}}, "rollout.top_p = 0.99: must be 1.0: training requests"),
        ({"task": {"name": "lokup"}},
         'task.name = "lokup": no such task; there is lookup, arithmetic, and'),
        ({"task": {"name": "no.such file:x"}}, 'task.name = "no.such file:x": no such task'),
        ({"control": {"rewards": "random"}}, 'needs "true" or "shuffled"'),
        ({"sampler": {"prefill_tokens": [64, 16]}}, "must ascend"),
        ({"seed": 2**32}, "seed = 4294967296: needs an integer, at least 0, at most 4294967295"),
        ({"name": "../up"}, 'name = "../up": needs a string, matching'),
        ({"sampler": {"max_context": 320}},
         "sampler.max_context = 320: needs at most trainer.row_length = 256"),
        ({"rollout": {"in_flight": 7}},
         "trainer.group_size = 8: needs at most rollout.in_flight = 7"),
        ({"rollout": {"in_flight": 385}},
         "rollout.in_flight = 385: needs at most sampler.sessions = 384"),
        ({"staleness": {"tau": 1}, "rollout": {"ahead": 4.5}},
         "rollout.ahead = 4.5: needs at most staleness.tau x trainer.push_every = 4"),
        ({"staleness": {"when_stale": "keep"}},
         'staleness.when_stale = "keep": needs "drop" or "wait" or "mask" or "pace"'),
        ({"sampler": {"on_push": "wait"}},
         'sampler.on_push = "wait": needs "recompute" or "drain" or "keep"'),
        ({"rollout": {"ahead": 1.0, "over_sample": 0.5}},
         "rollout.over_sample = 0.5: needs rollout.ahead = 0, not 1.0"),
        ({"rollout": {"ahead": 0.0, "over_sample": -0.1}},
         "rollout.over_sample = -0.1: needs a number, at least 0"),
        ({"rollout": {"retry_pause_s": 0.0}}, "rollout.retry_pause_s = 0.0: needs a number, above"),
        ({"model": {"family": "mamba"}}, 'model.family = "mamba": needs "kimi_linear" or "llama"'),
        ({"model": {"family": "llama", "kv_latent": 3}}, "unknown key model.kv_latent; [model] "),
        ({"model": {"kv_heads": 2}}, "unknown key model.kv_heads; did you mean model.heads?"),
        ({"model": {"family": "llama", "layers": ["kda"]}},
         'model.layers = ["kda"]: needs an integer, at least 1'),
        ({"model": {"layers": ["kdb"]}}, 'model.layers[0] = "kdb": needs "kda" or "mla"'),
        ({"model": {"family": "llama", "kv_heads": 3}}, "kv_heads 3 needs to divide heads 4"),
        ({"model": {"family": "llama", "head_dim": 7}}, "model.head_dim = 7: needs an integer"),
        ({"model": {"family": "llama", "rope_scaling": {"kind": "yarn", "factor": 2}}},
         "kind 'yarn' needs original_max_positions"),
        ({"model": {"family": "llama", "rope_scaling": {"kind": "linear", "factor": 0.5}}},
         "model.rope_scaling.factor = 0.5: needs a number, at least 1"),
        ({"model": {"family": "llama", "rope_scaling": {"kind": "linear", "factro": 2}}},
         "unknown key model.rope_scaling.factro; did you mean model.rope_scaling.factor?"),
        ({"model": {"family": "llama"}, "mesh": {"sampler": {"tensor": 4}}},
         "mesh.sampler.tensor = 4: needs a divisor of model.kv_heads = 2"),
        ({"model": {"remat": "all"}}, 'model.remat = "all": needs "none" or "block" or "dots"'),
        ({"mesh": {"trainer": {"tensor": 3}}},
         "mesh.trainer.tensor = 3: needs a divisor of model.heads = 4"),
        ({"mesh": {"trainer": {"fsdp": 2, "expert": 3}}},
         "mesh.trainer.data x fsdp x expert = 6: needs a divisor of trainer.rows_per_microbatch"),
        ({"mesh": {"trainer": {"context": 8}}},
         "mesh.trainer.context x 64 = 512: needs a divisor of trainer.row_length = 256"),
        ({"mesh": {"sampler": {"expert": 2}}}, "mesh.sampler.expert"),
        ({"mesh": {"sampler": {"data": 3}}},
         "mesh.sampler.data = 3: needs a divisor of sampler.slots = 64"),
    ],
)  # fmt: skip
def test_refused(sections, said):
    assert said in refused(**sections)


@pytest.mark.parametrize(
    "sections",
    [
        {"trainer": {"learning_rate": 0.0}},  # the control
        {"trainer": {"learning_rate": 1}},  # an integer is a number
        {"staleness": {"tau": 1}, "rollout": {"ahead": 4.0}},
        {"staleness": {"when_stale": "mask"}, "sampler": {"on_push": "keep"}},
        {"staleness": {"when_stale": "pace"}},
        {"rollout": {"ahead": 0.0, "over_sample": 0.5}},
        {"loss": {"eps_low": 0.999}},
        {"loss": {"recipe": "my/loss.py:soft", "bounds": [0.5, 5], "kind": "tv", "on": True}},
        {"advantage": {"name": "pkg.advantages:mine", "gamma": 1}},
        {"model": {"family": "llama", "kv_heads": 1}, "mesh": {"sampler": {"tensor": 4}}},
        {"model": {"family": "llama", "rope_scaling": {"kind": "linear", "factor": 2}}},
        {"task": {"name": "my/tasks.py:geography"}},
        {"task": {"name": "pkg.tasks:geography"}},
        {"warm_start": {"steps": 0, "patience": 1.0}},
        {"mesh": {"trainer": {"data": 2, "tensor": 2}, "sampler": {"data": 2, "tensor": 2}}},
    ],
)
def test_accepted(sections):
    config(**sections)


def test_is_frozen_and_hashable():
    value = config()
    with pytest.raises(ValidationError):
        value.trainer.groups = 3  # pyright: ignore[reportAttributeAccessIssue] that is the test
    assert hash(value) == hash(config())


def test_keywords_are_the_keys_beside_the_name():
    own = config(loss={"recipe": "ppo", "eps": 0.2, "bounds": [1, [2]]}).loss
    assert own.keywords == {"eps": 0.2, "bounds": (1, (2,))}
    assert config().loss.keywords == {}


def test_other_imports_keep_the_keywords():
    own = config(loss={"recipe": "a.py:f", "eps": 0.2}, task={"name": "b.py:g"})
    assert own.imports == {"task": "b.py:g", "loss": "a.py:f", "advantage": "standardised"}
    other = own.with_imports({"loss": "code/a.py:f"})
    assert other.imports == own.imports | {"loss": "code/a.py:f"}
    assert other.loss.keywords == {"eps": 0.2}
    assert other.task == own.task


@pytest.mark.parametrize(
    ("name", "file"),
    [("a/b.py:f", Path("a/b.py")), ("a.b:f", None), ("grpo", None), ("py:f", None)],
)
def test_file_of(name, file):
    assert run.file_of(name) == file


def test_devices():
    meshes = {"trainer": {"data": 2}, "sampler": {"data": 2, "tensor": 2}}
    value = config(mesh=meshes)
    assert value.devices_needed == 6
    check_devices(value, 6)
    with pytest.raises(UserError) as caught:
        check_devices(value, 5)
    assert str(caught.value) == (
        "mesh.sampler needs 4 devices (data 2 x tensor 2) besides the 2 of mesh.trainer, "
        "5 available: make the product of mesh.sampler at most 3"
    )
    with pytest.raises(UserError, match=r"^mesh\.trainer needs 4 devices"):
        check_devices(config(mesh={"trainer": {"data": 4}}), 2)


def test_every_section_says_what_it_is():
    tree = ast.parse(Path(run.__file__).read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert len(classes) > 10
    assert [c.name for c in classes if not ast.get_docstring(c)] == []
