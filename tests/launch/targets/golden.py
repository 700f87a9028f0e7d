"""Rendered launches of configs/pods, kept in tests/golden/launch.

`python -m tests.launch.targets.golden` writes them anew; look at the difference before keeping it.
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from launch.cli import main
from tests.structure.source import ROOT

PODS = ROOT / "configs" / "pods"
GOLDEN = ROOT / "tests" / "golden" / "launch"
KEPT = {
    "slurm": ("job.sh", "job.env", "environment.md"),
    "gke": ("trainer.yaml", "samplers.yaml", "kueue.yaml", "launch.env"),
    "tpu-vm": ("launch.env", "environment.md"),
    "lws": ("trainer.yaml", "samplers.yaml", "kueue.yaml"),
    "rayjob": ("rayjob.yaml", "kueue.yaml", "launch.env"),
    "pathways": ("pathways.yaml", "kueue.yaml", "launch.env"),
}
"""What of a target follows from the plan; scripts that do not are the same everywhere."""
FORMS = {
    "lws": ("kimi_linear_48b_v5p_128", "qwen3_32b_h200_64"),
    "rayjob": ("qwen3_8b_v6e_64", "qwen3_32b_h200_64"),
    "pathways": ("kimi_linear_48b_v5p_128",),
}
"""Of GKE, besides JobSets: what `--as` names, for a few."""
PATHWAYS = [
    "--server", "pathways-server:1", "--proxy", "pathways-proxy:1", "--scratch", "gs://bucket/dir",
    "--set", "mesh.sampler.data=8",
]  # fmt: skip
SCRIPT = (ROOT / "launch" / "slurm" / "job.sh").read_text()


def cases() -> Iterator[tuple[str, str]]:
    """(configuration, target or form of one) of all that fit."""
    for path in sorted(PODS.glob("*.toml")):
        own = ("slurm", "gke") if "h200" in path.stem else ("gke", "tpu-vm")
        yield from ((path.stem, target) for target in own)
        yield from ((path.stem, form) for form, names in FORMS.items() if path.stem in names)


def render(name: str, target: str, out: Path) -> None:
    where = ["--target", "gke", "--as", target] if target in FORMS else ["--target", target]
    more = PATHWAYS if target == "pathways" else []
    argv = ["render", f"configs/pods/{name}.toml", *where, "--out", str(out), *more]
    assert main(argv) == 0


def own_part(file: str, text: str) -> str:
    """What of a file follows from the plan: of job.sh its header, the script after it does not."""
    return text.removesuffix(SCRIPT) if file == "job.sh" else text


def write() -> None:
    """All golden files anew."""
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for name, target in cases():
        with tempfile.TemporaryDirectory() as folder:
            render(name, target, out := Path(folder) / "rendered")
            kept = GOLDEN / name / target
            kept.mkdir(parents=True)
            for file in KEPT[target]:
                (kept / file).write_text(own_part(file, (out / file).read_text()))


if __name__ == "__main__":
    write()
