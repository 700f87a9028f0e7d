"""What a push costs, read off a run's record: the sampler's pause, the trainer's time.

    python -m tests.bench.push RUN [RUN ...]

The sampler's pause is from the end of its last step under old weights to the beginning of the first
under new ones; time without a request to serve is not counted. Beside it, what else a publication
costs the sampler: decode steps that ran during one against all others.
"""

import sys
from pathlib import Path
from statistics import median

from launch.summary import FOLDER
from rl_jax.metrics import names
from rl_jax.metrics.trace import PUSH, SWAP, read_spans
from rl_jax.metrics.writers import read


def row(run: Path) -> str:
    """One line of the table."""
    lines = read(run / "metrics.jsonl")
    steps = median(line[names.STEP_SECONDS] for line in lines)
    pushes = [line[names.PUSH_SECONDS] for line in lines if line[names.PUSH_SECONDS]]
    traces = {path.stem: read_spans(path) for path in (run / FOLDER).glob("*.json")}
    publications = [(s.start, s.end) for s in traces["trainer"] if s.name == PUSH]
    decodes, during, pauses = [], [], []
    for program, spans in traces.items():
        if not program.startswith("sampler"):
            continue
        pauses += [s.end - s.start for s in spans if s.name == SWAP]
        for span in (s for s in spans if s.name == "decode"):
            inside = any(a <= span.start < b for a, b in publications)
            (during if inside else decodes).append(span.end - span.start)
    decode, pause = median(decodes), median(pauses)
    cells = [
        run.name,
        f"{1e3 * decode:.2f}",
        f"{1e3 * pause:.2f}",
        f"{pause / decode:.2f}",
        f"{max(pauses) / decode:.2f}",
        f"{median(during) / decode:.2f}" if during else "-",
        f"{median(pushes) / steps:.1%}",
        f"{max(pushes) / steps:.1%}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    head = (
        "run",
        "decode step, ms",
        "sampler's pause, ms",
        "of a step",
        "largest",
        "step during a publication, of another",
        "trainer's push, of its step",
        "largest",
    )
    print(f"| {' | '.join(head)} |\n{'|---' * len(head)}|")
    for name in sys.argv[1:]:
        print(row(Path(name)))


if __name__ == "__main__":
    main()
