"""Whether a run's export is still what was saved."""

from __future__ import annotations

from eval_pipeline.models.checkpoint import Checkpoint
from verl_ext.checkpoint.manifest import MANIFEST, Manifest, damaged_files
from verl_ext.commands import program
from verl_ext.errors import UserError


def has_manifest(checkpoint: Checkpoint) -> bool:
    """Whether the files of a checkpoint are listed with their digests; verl itself writes no list."""
    return checkpoint.step is not None and (checkpoint.path / MANIFEST).exists()


def exported_files(checkpoint: Checkpoint) -> dict[str, dict]:
    """Name, size and digest of the export's files, from the manifest.

    Raises:
        ValueError: the manifest cannot be read.
    """
    prefix = f"{checkpoint.own_export.name}/"
    files = Manifest.read(checkpoint.path).files
    return {name: entry for name, entry in files.items() if name.startswith(prefix)}


def require_whole_export(checkpoint: Checkpoint) -> None:
    """Compare the digests of an export with the manifest, before any of it is loaded.

    Raises:
        UserError: a file is damaged, or the checkpoint has gone.
    """
    if not has_manifest(checkpoint):
        return  # nobody has written down what these files should be
    try:
        damage = damaged_files(checkpoint.path, exported_files(checkpoint))
    except ValueError as error:
        raise UserError(
            f"cannot evaluate {checkpoint.path} ({error}); restore it or name another checkpoint"
        ) from error
    for name, problem in damage.items():
        raise UserError(
            f"cannot evaluate {checkpoint.path}: its file {name} {problem}; "
            f"export it again with `{program('checkpoint')} export "
            f"{checkpoint.run_dir} --step {checkpoint.step}`"
        )
