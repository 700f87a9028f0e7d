"""[N] Settings as a file that a shell reads with `.`."""

import shlex
from collections.abc import Mapping


def sourced(settings: Mapping[str, object]) -> str:
    """A line NAME=VALUE for each, quoted: nothing in a value is the shell's to interpret."""
    return "".join(f"{name}={shlex.quote(str(value))}\n" for name, value in settings.items())
