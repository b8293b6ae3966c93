"""What the run's own configuration says about keeping checkpoints."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from verl_ext.checkpoint.retention import Retention
from verl_ext.errors import UserError


def read_retention(run_dir: Path) -> Retention:
    """Retention by `config.yaml` of a run; keys that it lacks have the defaults, without a file all is kept.

    Raises:
        UserError: the file cannot be read, or a value in it cannot work.
    """
    path = run_dir / "config.yaml"
    keep_all = Retention(max_to_keep=None)
    if not path.is_file():
        return keep_all
    from omegaconf import OmegaConf  # here, so that --help need not wait for it
    from omegaconf.errors import OmegaConfBaseException

    from verl_ext.config.run_config import read_config_file

    defaults = {"trainer": {"max_ckpt_to_keep": None, "checkpoint": asdict(keep_all)}}
    written = read_config_file(path)
    try:
        return Retention.of(OmegaConf.merge(defaults, written).trainer)
    except (ValueError, AttributeError, OmegaConfBaseException) as error:
        raise UserError(f"{path} cannot be used ({error}); correct it, or move it away to keep all") from error
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
