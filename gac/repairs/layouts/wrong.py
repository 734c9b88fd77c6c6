"""What to say of tensors that contradict one another or the config."""

from gac.errors import CheckpointError
from gac.repairs.stored import Source


def contradiction(source: Source, given: str, expected: str) -> CheckpointError:
    """The error to raise."""
    return CheckpointError(f"{source.directory}: {given}", expected, "Save or copy the checkpoint again.")


def matrix(source: Source, name: str) -> tuple[int, int]:
    """The shape of a tensor that is to be a matrix.

    Raises:
        CheckpointError: it is none.
    """
    shape = source.tensors[name].shape
    if len(shape) != 2:
        raise contradiction(source, f"{name} of shape {shape}", "a matrix")
    return shape[0], shape[1]
