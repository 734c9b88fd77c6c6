"""What to say of tensors that contradict one another or the config."""

from gac.compression.repair.stored import Source
from gac.errors import CheckpointError


def contradiction(source: Source, given: str, expected: str) -> CheckpointError:
    """The error to raise."""
    return CheckpointError(f"{source.directory}: {given}", expected, "Save or copy the checkpoint again.")
