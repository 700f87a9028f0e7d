"""[H] A run's directory before anything ran: its configuration, its format and its code."""

import os
import shutil
from pathlib import Path

from launch.code import keep_code
from rl_jax.config.base import UserError
from rl_jax.config.run import RunConfig
from rl_jax.replay.log import write_format


def create_run(run_dir: Path, config: RunConfig, config_text: str) -> None:
    """UserError where it cannot be made."""
    try:
        run_dir.mkdir(parents=True)
        (run_dir / "config.toml").write_text(config_text, encoding="utf-8")
        write_format(run_dir)
        keep_code(config, run_dir)
    except OSError as error:
        raise UserError(
            f"{run_dir}: cannot be created ({error.strerror}): choose another with --out DIR"
        ) from None


def create_run_at_once(run_dir: Path, config: RunConfig, config_text: str) -> None:
    """The same where others wait for it: they see all of it or nothing."""
    making = run_dir.with_name(f".{run_dir.name}-{os.getpid()}")
    try:
        create_run(making, config, config_text)
        making.rename(run_dir)
    finally:
        shutil.rmtree(making, ignore_errors=True)
