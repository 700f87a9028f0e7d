"""[H] TOML to configuration and back, with overrides."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_jax.config.base import UserError, toml_value
from rl_jax.config.load import load, resolved
from rl_jax.config.run import RunConfig

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('name = "small"\n[staleness]\ntau = 3\n')
    return path


def refused(path: Path, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(path, overrides)
    return str(caught.value)


def test_file_then_overrides_then_defaults(file):
    config = load(
        file,
        [
            "staleness.tau=2",
            "trainer.learning_rate = 3e-5",
            'model.layers=["mla", "kda"]',
            "staleness.when_stale=wait",
            "mesh.sampler.data=2",
            "seed=1",
            "seed=7",
        ],
    )
    assert (config.name, config.staleness.tau, config.seed) == ("small", 2, 7)
    assert config.trainer.learning_rate == 3e-5
    assert config.model.layers == ("mla", "kda")
    assert config.staleness.when_stale == "wait"
    assert config.mesh.sampler.size == 2
    assert config.trainer.groups == 16


def test_source_of_a_mistake_is_named(file):
    assert refused(file, "staleness.tau=0").startswith("--set: staleness.tau = 0: needs")
    assert refused(file, "sampler.prefill_tokens=[0]").startswith(
        "--set: sampler.prefill_tokens[0]"
    )
    assert refused(file, "rollout.in_flight=999").startswith(
        f"{file} with --set: rollout.in_flight"
    )
    file.write_text("seed = 1\n")
    assert refused(file) == (
        f"{file}: name is missing: needs a string, matching ^[A-Za-z0-9][A-Za-z0-9._-]*$"
    )


def test_files_that_are_none(tmp_path):
    path = tmp_path / "run.toml"
    assert refused(path) == f"{path}: no such file; give the path of a TOML configuration"
    path.write_text('name = "x"\nseed = \n')
    assert refused(path).startswith(f"{path}: not valid TOML: Invalid value (at line 2")
    path.write_bytes(b"name = '\xff'\n")
    assert refused(path) == f"{path}: not UTF-8 text at byte 8"
    assert refused(tmp_path) == f"{tmp_path}: cannot be read: Is a directory"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("tau", "--set tau: needs section.key=value, as in staleness.tau=2"),
        ("=3", "--set =3: needs section.key=value"),
        ("name.x=3", "--set name.x=3: name is a value and has no keys of its own"),
        ("seed=", "--set seed=: the value is not TOML"),
        ("seed=1\nname=2", "the value is not TOML"),
        ("seed=01", "--set seed=01: the value is not TOML"),
    ],
)
def test_overrides_that_are_none(file, override, said):
    assert said in refused(file, override)


@pytest.mark.parametrize("key", ["task.name", "loss.recipe", "advantage.name"])
def test_a_named_file_must_exist(file, tmp_path, key):
    assert refused(file, f"{key}={tmp_path}/mine.py:thing") == (
        f'{key} = "{tmp_path}/mine.py:thing": there is no file {tmp_path}/mine.py'
    )
    (tmp_path / "mine.py").touch()
    load(file, [f"{key}={tmp_path}/mine.py:thing"])


def test_keywords_go_with_the_recipe_they_belong_to(file):
    file.write_text('name = "x"\n[loss]\neps_low = 0.3\n[advantage]\nname = "gae"\nlam = 0.9\n')
    assert load(file).loss.keywords == {"eps_low": 0.3}
    kept = load(file, ["loss.recipe=dis", "advantage.name=gae", "loss.eps_high=2"])
    assert kept.loss.keywords == {"eps_low": 0.3, "eps_high": 2}
    assert kept.advantage.keywords == {"lam": 0.9}
    # Wherever it stands, the name comes before the keywords.
    other = load(file, ["loss.eps=0.2", "loss.recipe=ppo", "advantage.name=group_mean"])
    assert (other.loss.recipe, other.loss.keywords) == ("ppo", {"eps": 0.2})
    assert (other.advantage.name, other.advantage.keywords) == ("group_mean", {})


def test_resolved_reads_back_equal(tmp_path, file):
    changes = ["warm_start.patience=0.25", "mesh.trainer.tensor=2", "loss.eps_low=1e-5"]
    changes += ["loss.kind=tv", "loss.bounds=[0.5, 5]", "loss.on=true"]
    more = ["critic.frozen=['head.*']", "teachers.old=runs/a/snapshots/3"]
    llama = ["model.family=llama", "model.rope_scaling.kind=yarn", "model.rope_scaling.factor=4"]
    llama += ["model.rope_scaling.original_max_positions=64", "model.scan=true"]
    configs = load(file), load(file, changes), load(file, llama), load(file, more)
    for config in configs:
        again = tmp_path / "again.toml"
        again.write_text(resolved(config))
        assert load(again) == config
    assert "eps_low = 1e-05\n" in resolved(load(file, changes))
    assert "[mesh.trainer]\ndata = 1\ntensor = 2\n" in resolved(load(file, changes))
    assert '[teachers]\nold = "runs/a/snapshots/3"\n' in resolved(config)
    assert 'frozen = ["head.*"]\n' in resolved(config)
    assert "[critic]" not in resolved(load(file)), "no section: no critic"


@settings(deadline=None)
@given(st.text())
def test_any_string_survives_toml(text):
    import tomllib

    assert tomllib.loads(f"value = {toml_value(text)}")["value"] == text


def test_shipped_configurations_load_and_say_how_to_run_them():
    paths = sorted((REPOSITORY / "configs").glob("*.toml"))
    assert paths
    for path in paths:
        assert isinstance(load(path), RunConfig)
        first = path.read_text().split("\n", 1)[0]
        assert first.startswith("#") and f"rl-jax run configs/{path.name}" in first
