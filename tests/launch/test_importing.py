"""[H] `rl-jax import` and `export`: bytes come back as they were, faults are one line, and what a
killed command left is gone on with."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from launch import cli, exporting, importing, staging
from models.checkpoint.load import open_checkpoint
from rl_jax.snapshots import leaves, store
from rl_jax.snapshots.manifest import build_manifest, named_leaves
from rl_jax.snapshots.store import SnapshotStore
from tests.fakes import checkpoints

ROOT = Path(__file__).parents[2]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(root: Path) -> dict[str, bytes | None]:
    return {
        p.relative_to(root).as_posix(): p.read_bytes() if p.is_file() else None
        for p in sorted(root.rglob("*"))
    }


def make(name="qwen2", dtype=ml_dtypes.bfloat16, count=1, path="in") -> Path:
    config = checkpoints.CONFIGS[name]
    made = checkpoints.write(Path(path), config, checkpoints.values(config, dtype), count)
    checkpoints.write_tokenizer(made, 60)
    return made


def run(*argv: str) -> None:
    assert cli.main([str(word) for word in argv]) == 0


@pytest.mark.parametrize(
    ("name", "count"),
    [("llama", 1), ("qwen2", 3), ("qwen3", 1), ("kimi_linear", 3), ("kimi_linear_bounded", 1),
     ("kimi_linear_full_rank", 2)],
)  # fmt: skip
def test_export_gives_back_every_byte(here, name, count):
    source = make(name, count=count)
    run("import", source, "--out", "kept")
    run("export", "kept/0", "--out", "out")
    assert files(Path("out")) == files(source)


@pytest.mark.parametrize(
    ("dtype", "given", "kept"),
    [
        (np.float32, "float32", "float32"),
        (np.float16, "as-is", "float16"),
        (ml_dtypes.bfloat16, "as-is", "bfloat16"),
        (ml_dtypes.bfloat16, "bfloat16", "bfloat16"),
    ],
)
def test_dtypes(here, dtype, given, kept):
    source = make(dtype=dtype)
    run("import", source, "--out", "kept", "--dtype", given)
    told = SnapshotStore(Path("kept")).manifest(0).leaves
    assert {leaf.dtype for leaf in told.values()} == {kept}
    run("export", "kept/0", "--out", "out")
    assert files(Path("out")) == files(source)


def test_a_rounded_import_says_so(here, capsys):
    source = make(dtype=np.float32)
    run("import", source, "--out", "kept", "--dtype", "bfloat16")
    assert "26 tensors are rounded to another dtype" in capsys.readouterr().err


def publish(change):
    """Version 7 of a run that began with the import in `kept`, its leaves changed."""
    store = SnapshotStore(Path("kept"))
    before = store.manifest(0)
    given = leaves.read_leaves(store, before, before.leaves)
    changed = {name: change(leaf) for name, leaf in given.items()}
    own = SnapshotStore(Path("runs/x/snapshots"))
    manifest = build_manifest(changed, 7, 7, before.digest)
    own.write(manifest, changed)
    own.commit(manifest)
    Path("runs/x/config.toml").write_text('name = "x"\n[warm_start]\nsnapshot = "kept/0"\n')


def test_a_version_of_a_sampler_with_fewer_digits_says_so(here, capsys):
    source = make(dtype=np.float32)
    run("import", source, "--out", "kept")
    publish(lambda leaf: leaf.astype(ml_dtypes.bfloat16) if leaf.ndim > 1 else leaf)
    run("export", "runs/x/snapshots/7", "--out", "out")
    given, got = (load_file(path / "model.safetensors") for path in (source, Path("out")))
    differ = sum(given[name].tobytes() != got[name].tobytes() for name in given)
    said = capsys.readouterr().err
    assert f"{differ} tensors of this version were rounded: they are not as imported" in said
    capsys.readouterr()
    run("export", "kept/0", "--out", "whole")
    assert "rounded" not in capsys.readouterr().err


def test_marks_that_were_cut_twice_are_read(here):
    """The line of what is done was cut, and so was the line of the process after that."""
    for name in "ab":
        own = staging.Staging(Path("out"), "exporting")
        with own.open("plan"):
            own.mark([name])
        with Path("out.exporting/done.jsonl").open("a") as file:
            file.write('"blocks/blo')
    last = staging.Staging(Path("out"), "exporting")
    with last.open("plan"):
        assert last.done == {"a", "b"}


def test_another_cut_into_files_has_the_same_tensors(here):
    source = make("kimi_linear")
    run("import", source, "--out", "kept")
    run("export", "kept/0", "--out", "out", "--max-shard-size", "20KB")
    index = json.loads(Path("out/model.safetensors.index.json").read_text())
    whole = load_file(source / "model.safetensors")
    assert set(index["weight_map"]) == set(whole)
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in whole.values())
    names = sorted(set(index["weight_map"].values()))
    assert names[0] == f"model-00001-of-{len(names):05}.safetensors" and len(names) > 2
    for file in names:
        part = load_file(Path("out") / file)
        assert sum(a.nbytes for a in part.values()) <= 20_000
        for name, array in part.items():
            assert index["weight_map"][name] == file
            assert array.tobytes() == whole.pop(name).tobytes()
    assert not whole


def test_trained_weights_go_out_rounded_to_the_dtypes_they_came_in(here):
    """Every parameter is moved by a third of its own, which bfloat16 cannot hold."""
    source = make()
    run("import", source, "--out", "kept")
    publish(lambda leaf: leaf * np.float32(4 / 3))
    run("export", "runs/x/snapshots/7", "--out", "out")
    given, got = (load_file(path / "model.safetensors") for path in (source, Path("out")))
    assert given.keys() == got.keys()
    for name, tensor in given.items():
        wide = (tensor.astype(np.float32) * np.float32(4 / 3)).view(np.uint32)
        # To the nearest, halves to even.
        bits = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype(np.uint16)
        assert np.array_equal(got[name].view(np.uint16), bits)
        assert not np.array_equal(got[name], tensor)


def mistake(capsys, root: Path, *argv: str) -> str:
    """The command fails by one line on stderr and leaves the disk as it was."""
    before = files(root)
    capsys.readouterr()
    assert cli.main(list(argv)) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert files(root) == before
    return said.err.strip()


def edit(path: str, **changes) -> None:
    file = Path(path)
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def rewrite(change) -> None:
    tensors = load_file("in/model.safetensors")
    change(tensors)
    save_file(tensors, "in/model.safetensors", {"format": "pt"})


FILE, NORM = "in/model.safetensors", "model.norm.weight"
FAULTS = {
    "missing": (
        lambda: rewrite(lambda t: t.pop(NORM)),
        f"{FILE}: {NORM} is missing",
    ),
    "unexpected": (
        lambda: rewrite(lambda t: t.update(extra=t[NORM].copy())),
        f"{FILE}: extra is unexpected, no parameter of in/config.json is made of it",
    ),
    "shape": (
        lambda: rewrite(lambda t: t.update({NORM: np.zeros(31, np.float32)})),
        f"{FILE}: {NORM} has shape [31], in/config.json gives [32]",
    ),
    "dtype": (
        lambda: rewrite(lambda t: t.update({NORM: np.zeros(32, np.int64)})),
        f"{FILE}: {NORM} is I64: needs F32, BF16, F16",
    ),
    "truncated": (
        lambda: os.truncate(FILE, os.path.getsize(FILE) - 10),
        f"{FILE}: truncated: {NORM} ends at byte SIZE, the file has LESS",
    ),
    "header": (
        lambda: os.truncate(FILE, 100),
        f"{FILE}: truncated or no safetensors file: 100 bytes, its header needs HEADER",
    ),
    "empty": (
        lambda: os.truncate(FILE, 0),
        f"{FILE}: truncated or no safetensors file: 0 bytes, its header needs 8",
    ),
    "no weights": (
        lambda: os.remove(FILE),
        "in: neither model.safetensors nor model.safetensors.index.json is there",
    ),
    "model_type": (
        lambda: edit("in/config.json", model_type="gpt2"),
        'in/config.json: model_type = "gpt2": there is llama, qwen2, qwen3, kimi_linear',
    ),
    "no heads": (
        lambda: edit("in/config.json", num_attention_heads=None),
        "in/config.json: num_attention_heads is missing: needs an integer, at least 1",
    ),
    "heads": (
        lambda: edit("in/config.json", num_key_value_heads=3),
        "in/config.json: num_key_value_heads = 3: needs a divisor of num_attention_heads = 4",
    ),
    "sizes": (
        lambda: edit("in/config.json", num_attention_heads=6),
        "in/config.json: num_attention_heads = 6: needs a divisor of hidden_size = 32",
    ),
    "unknown option": (
        lambda: edit("in/config.json", hidden_act="gelu"),
        'in/config.json: hidden_act = "gelu": needs "silu", nothing else is built here',
    ),
    "positions": (
        lambda: edit("in/config.json", rope_scaling={"rope_type": "longrope"}),
        "in/config.json: rope_type = 'longrope': there is default, linear, llama3, yarn",
    ),
    "not json": (
        lambda: Path("in/config.json").write_text("{"),
        "in/config.json: not JSON (Expecting property name enclosed in double quotes: line 1 "
        "column 2 (char 1))",
    ),
    "vocabulary": (
        lambda: checkpoints.write_tokenizer(Path("in"), 90),
        f"{FILE}: model.embed_tokens.weight has 80 rows, token 80 (\"<|80|>\") of tokenizer.json "
        "beside in/config.json needs 81",
    ),
    "no tokenizer": (
        lambda: Path("in/tokenizer.json").write_text("[]"),
        "tokenizer.json beside in/config.json: not a tokenizer (TypeError('list indices must be "
        "integers or slices, not str'))",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_a_fault_is_one_line_and_nothing_is_written(here, capsys, name):
    change, expected = FAULTS[name]
    make()
    whole = os.path.getsize(FILE)
    header = 8 + int.from_bytes(Path(FILE).read_bytes()[:8], "little")
    change()
    said = mistake(capsys, here, "import", "in", "--out", "kept")
    if name == "truncated":
        last = max(load_header(header), key=lambda item: item[1])[0]
        expected = expected.replace(NORM, last)
    expected = expected.replace("SIZE", str(whole)).replace("LESS", str(whole - 10))
    assert said == "rl-jax: " + expected.replace("HEADER", str(header))


def load_header(length: int) -> list[tuple[str, int]]:
    table = json.loads(Path(FILE).read_bytes()[8:length])
    return [(n, e["data_offsets"][1]) for n, e in table.items() if n != "__metadata__"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda: os.remove("in/model-00002-of-00003.safetensors"),
            "in/model.safetensors.index.json: it names model-00002-of-00003.safetensors, which is "
            "not there",
        ),
        (
            lambda: edit("in/model.safetensors.index.json", weight_map=["x"]),
            "in/model.safetensors.index.json: weight_map is missing or no map to file names",
        ),
        (
            lambda: shutil.copy(
                "in/model-00001-of-00003.safetensors", "in/model-00002-of-00003.safetensors"
            ),
            "in/model-00002-of-00003.safetensors: model.embed_tokens.weight is missing, "
            "model.safetensors.index.json has it there",
        ),
    ],
)
def test_a_wrong_index(here, capsys, change, expected):
    make("llama", count=3)
    change()
    assert mistake(capsys, here, "import", "in", "--out", "kept") == f"rl-jax: {expected}"


def test_places_that_are_taken(here, capsys):
    make()
    assert "none: no such file or directory" in mistake(
        capsys, here, "import", "none", "--out", "kept"
    )
    run("import", "in", "--out", "kept")
    said = mistake(capsys, here, "import", "in", "--out", "kept")
    assert said == "rl-jax: kept exists and is left as it is: choose another with --out"
    said = mistake(capsys, here, "export", "in", "--out", "out")
    assert said == "rl-jax: in: needs a version's directory, as DIR/0"
    said = mistake(capsys, here, "export", "kept/1", "--out", "out")
    assert said == "rl-jax: kept/1: no such snapshot; there are [0]"
    said = mistake(capsys, here, "export", "kept/0", "--out", "out", "--max-shard-size", "5")
    assert "argument --max-shard-size: '5': needs a number and KB, MB or GB, as 5GB" in said
    os.remove("kept/origin.json")
    said = mistake(capsys, here, "export", "kept/0", "--out", "out")
    assert "no origin.json is there, nor where its run began" in said


def test_a_version_of_another_model_is_not_exported(here, capsys):
    run("import", make(), "--out", "kept")
    edit("kept/config.json", intermediate_size=64)
    said = mistake(capsys, here, "export", "kept/0", "--out", "out")
    assert said == (
        "rl-jax: kept/0: blocks/block_0/ffn/gate has shape [32, 48], kept/config.json gives "
        "[32, 64]"
    )


def origin(change) -> None:
    table = json.loads(Path("kept/origin.json").read_text())
    change(table)
    Path("kept/origin.json").write_text(json.dumps(table))


def tensor(table, name: str) -> list:
    return next(one for one in table["files"][0]["tensors"] if one[0] == name)


ORIGINS = {
    "format": (
        lambda t: t.update(format=2),
        "format: Input should be 1",
    ),
    "nothing": (lambda t: t.clear(), "format: Field required"),
    "file": (
        lambda t: t["files"][0].update(name="../../pwn.safetensors"),
        "files.0.name: Value error, '../../pwn.safetensors' is no name of a file of tensors",
    ),
    "over another": (
        lambda t: t["files"][0].update(name="config.json"),
        "files.0.name: Value error, 'config.json' is no name of a file of tensors",
    ),
    "carried": (
        lambda t: t["carried"].append("../secret.txt"),
        "carried: '../secret.txt' is no file that is carried",
    ),
    "dtype": (
        lambda t: tensor(t, NORM).__setitem__(1, "F64"),
        "files.0.tensors.NUMBER.1: Value error, 'F64': there is F32, BF16, F16",
    ),
    "shape": (
        lambda t: tensor(t, NORM).__setitem__(2, [1, 2]),
        f"{NORM} has shape [1, 2], kept/config.json gives that it has shape [32]",
    ),
    "tensor": (
        lambda t: t["files"][0]["tensors"].remove(tensor(t, NORM)),
        f"{NORM} is no tensor, kept/config.json gives that it has shape [32]",
    ),
    "twice": (
        lambda t: t["files"].append(t["files"][0]),
        "a file or a tensor is listed twice",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ORIGINS)
def test_nothing_is_exported_by_a_wrong_origin(here, capsys, name):
    change, expected = ORIGINS[name]
    run("import", make(), "--out", "kept")
    Path("secret.txt").write_text("secret")
    table = json.loads(Path("kept/origin.json").read_text())
    number = [one[0] for one in table["files"][0]["tensors"]].index(NORM)
    origin(change)
    said = mistake(capsys, here, "export", "kept/0", "--out", "a/b/out")
    assert said == f"rl-jax: kept/origin.json: {expected}".replace("NUMBER", str(number))


def test_an_import_that_knew_of_no_constants_is_exported(here):
    source = make()
    run("import", source, "--out", "kept")
    origin(lambda table: table.pop("constants"))
    run("export", "kept/0", "--out", "out")
    assert files(Path("out")) == files(source)


def test_a_carried_file_that_is_gone(here, capsys):
    run("import", make(), "--out", "kept")
    os.remove("kept/tokenizer.json")
    said = mistake(capsys, here, "export", "kept/0", "--out", "out")
    assert said == "rl-jax: kept/tokenizer.json: no such file, origin.json beside it names it"


def test_what_is_not_ours_stays(here, capsys):
    make()
    Path("new.importing").mkdir()
    Path("new.importing/precious").write_text("x")
    said = mistake(capsys, here, "import", "in", "--out", "new")
    assert said == (
        "rl-jax: new.importing is in the way and none of ours: remove it, or choose another place "
        "with --out"
    )
    said = mistake(capsys, here, "import", "in", "--out", "in/config.json/x")
    assert said == (
        f"rl-jax: {here}/in/config.json is no directory: choose another place with --out"
    )
    Path("new.importing/precious").rename("new.importing/plan.sha256.tmp")
    run("import", "in", "--out", "new")
    assert not Path("new.importing").exists()
    assert {path.name for path in Path("new").iterdir()} == {
        "0", "latest", "origin.json", "model.toml", "config.json", "tokenizer.json",
        "tokenizer_config.json", "chat_template.jinja",
    }  # fmt: skip


def test_two_at_once(here, capsys, monkeypatch):
    """The second is told, and the first goes on."""
    source = make()
    own = importing._write_rest

    def meanwhile(*args):
        capsys.readouterr()
        assert cli.main(["import", "in", "--out", "kept"]) == 2
        assert capsys.readouterr().err == (
            "rl-jax: kept.importing: another process is at work there\n"
        )
        own(*args)

    monkeypatch.setattr(importing, "_write_rest", meanwhile)
    run("import", source, "--out", "kept")
    run("export", "kept/0", "--out", "out")
    assert files(Path("out")) == files(source)


def test_all_files_of_a_tokenizer_go_along(here, capsys):
    source = make("kimi_linear")
    edit("in/config.json", auto_map={"AutoConfig": "configuration_x.X", "AutoModel": "a/r--m.X"})
    edit("in/tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_x.X", None]})
    for name in ("tokenizer.model", "tiktoken.model", "configuration_x.py", "tokenization_x.py"):
        (source / name).write_bytes(name.encode() + b"\xff\0")
    os.remove("in/tokenizer.json")
    capsys.readouterr()
    run("import", source, "--out", "kept")
    assert capsys.readouterr().out == (
        "written to kept: no tokenizer.json: a run needs one in task.tokenizer; its section "
        '[model] is kept/model.toml,\nwarm_start.snapshot = "kept/0"\n'
    )
    run("export", "kept/0", "--out", "out")
    assert files(Path("out")) == files(source)


def test_a_carried_file_has_a_limit(here, capsys):
    make()
    with Path("in/tokenizer.model").open("wb") as file:
        file.truncate((64 << 20) + 1)
    said = mistake(capsys, here, "import", "in", "--out", "kept")
    assert said == (
        "rl-jax: in/tokenizer.model has 67108865 bytes, at most 67108864 are carried along"
    )


def test_a_run_that_began_with_a_run_that_began_with_an_import(here, capsys):
    source = make()
    run("import", source, "--out", "kept")
    for name, first in (("a", "kept/0"), ("b", "runs/a/snapshots/0"), ("c", "runs/c/snapshots/0")):
        shutil.copytree("kept/0", f"runs/{name}/snapshots/0")
        text = f'name = "{name}"\n[warm_start]\nsnapshot = "{first}"\n'
        Path(f"runs/{name}/config.toml").write_text(text)
    run("export", "runs/b/snapshots/0", "--out", "out")
    assert files(Path("out")) == files(source)
    said = mistake(capsys, here, "export", "runs/c/snapshots/0", "--out", "no")
    assert said.startswith("rl-jax: runs/c/snapshots: no origin.json is there, nor where its run")


def test_a_run_writes_down_where_its_snapshot_is(here):
    from launch.code import located
    from rl_jax.config.load import load

    Path("c.toml").write_text('name = "x"\n[warm_start]\nsnapshot = "kept/0"\n')
    assert located(load(Path("c.toml"))).warm_start.snapshot == f"{here}/kept/0"


KILLED = """
import os, signal, sys
from launch import cli, {module}
from rl_jax.snapshots import leaves
{module}.PART = 4000
left = [3]
own = leaves.{function}
def kill(*args, **kwargs):
    done = own(*args, **kwargs)
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return done
leaves.{function} = {module}.{function} = kill
sys.exit(cli.main(sys.argv[1:]))
"""
"""After the third time that a part's leaves are described, which is before they are written."""


def killed(module: str, function: str, *argv: str) -> None:
    code = KILLED.format(module=module, function=function)
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == -signal.SIGKILL


@pytest.fixture
def needed(monkeypatch) -> list[int]:
    """The room in bytes that imports and exports ask for."""
    asked = []
    monkeypatch.setattr(staging, "check_room", lambda path, size: asked.append(size))
    return asked


def test_a_killed_import_is_gone_on_with(here, monkeypatch, needed):
    """It needs no room for what is done."""
    source = make("kimi_linear")
    run("import", source, "--out", "whole")
    killed("importing", "sync_tree", "import", "in", "--out", "kept")
    assert not Path("kept").exists()
    read = []
    own = importing.shard_of
    monkeypatch.setattr(importing, "shard_of", lambda *a: read.append(a[1]) or own(*a))
    run("import", source, "--out", "kept")
    stores = [SnapshotStore(Path(name)) for name in ("kept", "whole")]
    kept, whole = (store.manifest(0) for store in stores)
    assert kept == whole and 0 < len(read) < len(whole.leaves)
    tensors = load_file("in/model.safetensors").values()
    assert 0 < needed[1] < needed[0] == 4 * sum(a.size for a in tensors)
    run("export", "kept/0", "--out", "out")
    assert files(Path("out")) == files(source)
    assert not list(here.glob("*.importing")) and not list(Path("kept").glob("*.growing"))


def test_a_killed_export_is_gone_on_with(here, monkeypatch, needed):
    """It needs no room for what is done."""
    source = make("kimi_linear")
    run("import", source, "--out", "kept")
    run("export", "kept/0", "--out", "whole")
    killed("exporting", "read_leaves", "export", "kept/0", "--out", "out")
    assert not Path("out").exists()
    read = []
    own = exporting.read_leaves
    monkeypatch.setattr(exporting, "read_leaves", lambda *a: read.extend(a[2]) or own(*a))
    run("export", "kept/0", "--out", "out")
    assert 0 < len(read) < len(SnapshotStore(Path("kept")).manifest(0).leaves)
    assert files(Path("out")) == files(source)
    tensors = load_file("in/model.safetensors").values()
    assert 0 < needed[2] < needed[1] == sum(a.nbytes for a in tensors)


def test_an_import_without_room_writes_nothing(here, capsys, monkeypatch):
    make("kimi_linear")
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: usage._replace(free=0))
    said = mistake(capsys, here, "import", "in", "--out", "kept")
    assert said == "rl-jax: [Errno 28] PLACE needs 0.2 MB of disk, 0.0 MB are free".replace(
        "PLACE", str(here)
    )


class Died(BaseException):
    """In the place of a kill."""


@pytest.mark.parametrize(
    ("owner", "function"),
    [
        (leaves.ocp.partial, "save"),
        (leaves.ocp.partial, "finalize"),
        (SnapshotStore, "seal"),
        (SnapshotStore, "commit"),
        (SnapshotStore, "point"),
        (importing, "_write_rest"),
    ],
)
@pytest.mark.parametrize("when", ["before", "after"])
def test_an_import_that_died_anywhere_is_gone_on_with(here, monkeypatch, owner, function, when):
    source = make()
    own = getattr(owner, function)

    def die(*args, **kwargs):
        if when == "after":
            own(*args, **kwargs)
        raise Died

    with monkeypatch.context() as patched, pytest.raises(Died):
        patched.setattr(owner, function, die)
        importing.import_checkpoint(source, Path("kept"), "float32", cli.reporter(sys.stderr))
    assert not Path("kept").exists()
    run("import", source, "--out", "kept")
    run("export", "kept/0", "--out", "out")
    assert files(Path("out")) == files(source)


def test_another_import_in_its_place_is_refused(here, capsys, monkeypatch):
    source = make()

    def die(*args):
        raise Died

    with monkeypatch.context() as patched, pytest.raises(Died):
        patched.setattr(importing, "_write_rest", die)
        importing.import_checkpoint(source, Path("kept"), "float32", cli.reporter(sys.stderr))
    said = mistake(capsys, here, "import", "in", "--out", "kept", "--dtype", "bfloat16")
    assert said == (
        "rl-jax: kept.importing is left from another source or other options: remove it, or choose "
        "another place with --out"
    )


@pytest.mark.parametrize("name", checkpoints.CONFIGS)
def test_a_run_starts_from_an_import(here, name):
    import jax

    from launch import build
    from launch.warm_start import first_params
    from rl_jax.config.load import load

    source = make(name)
    run("import", source, "--out", "kept")
    text = Path("kept/model.toml").read_text()
    settings = f'name = "x"\n{text}\n[warm_start]\nsnapshot = "kept/0"\n'
    Path("c.toml").write_text(settings)
    config = load(Path("c.toml"))
    model = build.build_policy(config, 60)
    mesh = build.build_meshes(config).trainer
    params = first_params(config, model, mesh)
    given = load_file(source / "model.safetensors")
    table = open_checkpoint(source).table
    assert {part.tensor for leaf in table.values() for part in leaf.parts} == given.keys()
    for name, leaf in named_leaves(params).items():
        assert leaf.dtype == np.float32
        for part in table[name].parts:
            tensor = given[part.tensor].astype(np.float32).reshape(part.split)[part.take]
            ours = np.asarray(leaf)[part.at]
            assert np.array_equal(ours, tensor.transpose(part.order).reshape(ours.shape))
    assert jax.tree.structure(params) == jax.tree.structure(
        jax.eval_shape(model.init, jax.random.key(0))
    )


def test_a_number_that_is_not_finite_leaves_nothing(here, capsys, monkeypatch):
    """The last tensor's: by then others are written. As on NFS, where a file that is open keeps
    its directory from being removed."""
    remove = shutil.rmtree

    def unless_open(path, **options):
        held = [os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir()]
        if any(Path(file).is_relative_to(Path(path).absolute()) for file in held):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))
        remove(path, **options)

    monkeypatch.setattr(staging.shutil, "rmtree", unless_open)
    config = checkpoints.CONFIGS["llama"]
    tensors = checkpoints.values(config)
    tensors["model.norm.weight"].view(np.uint16)[3] = 0x7FC0
    source = checkpoints.write(Path("in"), config, tensors)
    assert cli.main(["import", str(source), "--out", "kept"]) == 2
    said = "rl-jax: in/model.safetensors: model.norm.weight has numbers that are not finite\n"
    assert capsys.readouterr().err.endswith(said)
    assert [path.name for path in here.iterdir()] == ["in"]
