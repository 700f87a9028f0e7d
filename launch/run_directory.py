"""[H] A run's directory before anything ran: its configuration, its format and its code."""

import secrets
import shutil
from pathlib import Path

from launch.code import keep_code
from rl_jax.config.base import UserError
from rl_jax.config.run import RunConfig
from rl_jax.replay.log import write_format


def create_run(run_dir: Path, config: RunConfig, config_text: str) -> None:
    """All of it or nothing, for who waits for it and for who starts it again after a kill.
    UserError where it cannot be made."""
    making = run_dir.with_name(f".{run_dir.name}-{secrets.token_hex(4)}")
    try:
        making.mkdir(parents=True)
        (making / "config.toml").write_text(config_text, encoding="utf-8")
        write_format(making)
        keep_code(config, making)
        making.rename(run_dir)
    except OSError as error:
        raise UserError(
            f"{run_dir}: cannot be created ({error.strerror}): choose another with --out DIR"
        ) from None
    finally:
        shutil.rmtree(making, ignore_errors=True)
