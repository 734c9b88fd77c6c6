"""Check a compressed checkpoint against the digests that were written when it was saved."""

from dataclasses import dataclass
from pathlib import Path

from gac.checkpoint.digests import (
    Digests,
    check_bytes,
    check_config,
    check_files,
    check_tensors,
    read_digests,
    unlisted,
)
from gac.checkpoint.files import read_config, read_plan
from gac.checkpoint.header import contradiction
from gac.checkpoint.replaced import read_unreplaced
from gac.checkpoint.weights import open_tensors, weight_files
from gac.core.arguments import checked
from gac.core.errors import CheckpointError
from gac.core.untrusted import check_inside, check_model_files, file_digest
from gac.runtime.contract import DIGESTS

_CODE_OR_WEIGHTS = (".py", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".so", ".gguf")


@dataclass(frozen=True)
class Verified:
    """A checkpoint that is as it was saved.

    Attributes:
        digest: the SHA-256 of its file of digests. It stands for all that was checked: to know that the checkpoint is
            somebody's, compare it with the one that they published.
        tensors, bytes: how many there are, and what they hold.
        keys: of the config, that were checked.
        files: that were checked, besides config and weights.
        not_checked: what lies beside them and was not there when it was saved.
    """

    digest: str
    tensors: int
    bytes: int
    keys: int
    files: int
    not_checked: tuple[str, ...]


@checked
def verify(directory: str | Path) -> Verified:
    """Check everything that a checkpoint was when it was saved, each tensor by its SHA-256.

    Nothing is run, and no model is built.

    Raises:
        CheckpointError: something differs, which is named; there are no digests; or code or weights lie beside it that
            were not there.
    """
    source = Path(directory)
    return read_unreplaced(source, lambda: _verified(source))


def _verified(source: Path) -> Verified:
    check_inside(source, CheckpointError)
    check_model_files(source, CheckpointError)
    document = read_config(source)
    digests = read_digests(source)
    if digests is None:
        raise CheckpointError(
            f"{source} has no {DIGESTS}",
            "the digests that gac.save writes beside the weights",
            "Get the checkpoint anew with its digests, or save it again from files that you trust.",
        )
    read_plan(source)
    check_config(document, digests, source)
    files, index = weight_files(source)
    tensors = open_tensors(source, files)
    check_tensors(tensors, digests, source)
    check_files([*digests.files, *([index] if index else [])], digests, source)
    others = _not_checked(digests, files, source)
    check_bytes(tensors, digests, source)
    return Verified(
        digest=file_digest(source / DIGESTS),
        tensors=len(tensors),
        bytes=sum(values.nbytes for values in tensors.values()),
        keys=len(digests.config),
        files=len(digests.files),
        not_checked=others,
    )


def _not_checked(digests: Digests, weights: tuple[str, ...], source: Path) -> tuple[str, ...]:
    others = unlisted(digests, weights, source)
    if result := next((name for name in others if name.endswith(_CODE_OR_WEIGHTS)), None):
        raise contradiction(source, f"{result} was not there when it was saved", "no other code and no other weights")
    return others
