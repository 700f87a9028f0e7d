"""Checks and times every GPU kernel on this machine's GPU: `make test-device`.

    PYTHONPATH=. .venv/bin/python -m tests.device.run [SEED]

Each script in a process of its own, for a fault on the device ends all that its process could still
do. Prints their tables and writes them into runs/device.md. Exit status 1 if one fails; 2, and no
file, where there is no GPU.
"""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

SCRIPTS = ("kda", "mla")
TABLES = Path("runs/device.md")
NO_GPU = 2
LIMIT = 280
"""Seconds a script may take; it stops starting measurements long before."""


def lines(name: str, seed: list[str], status: list[int]) -> Iterator[str]:
    """Of one script, as they come; its exit status goes into `status`."""
    command = ["timeout", str(LIMIT), sys.executable, "-m", f"tests.device.{name}", *seed]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield from process.stdout or ()
    status.append(process.returncode)


def main(seed: list[str]) -> int:
    status: list[int] = []
    written = ""
    for name in SCRIPTS:
        for said in lines(name, seed, status):
            written += said
            print(said, end="", flush=True)
        if status[-1] == NO_GPU:
            return NO_GPU
        ended = (
            "" if status[-1] in (0, 1) else f"\ntests/device/{name}.py ended with {status[-1]}\n"
        )
        print(ended)
        written += f"{ended}\n"
        TABLES.parent.mkdir(exist_ok=True)
        TABLES.write_text(written)
    print(f"written to {TABLES}")
    return int(any(status))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
