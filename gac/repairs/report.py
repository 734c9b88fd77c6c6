"""The result of a repair: the dims that moved, what that costs, and what it wins."""

from dataclasses import dataclass

from gac.repairs.contract import ShapeContract
from gac.repairs.times import Times


@dataclass(frozen=True)
class Moved:
    """One dim that was padded; ``added_bytes`` is what its tensors grew by."""

    name: str
    dim: int
    becomes: int
    added_bytes: int


@dataclass(frozen=True)
class Repaired:
    """A repaired checkpoint.

    Attributes:
        layouts: in which the dims were found.
        dims: how many there are.
        moved: those that were padded, in the order of the tensors.
        kept: names of those that stayed unaligned because of a limit.
        bytes_before, bytes_after: of all tensors of the checkpoint.
        times: of the GEMMs that the dims are of, for every workload.
        profile: the GPU of the latency table used for predictions and for the strategy ``profile``, and why that one.
        left_out: files that were not copied: pickles.
    """

    source: str
    output: str
    layouts: tuple[str, ...]
    contract: ShapeContract
    dims: int
    moved: tuple[Moved, ...]
    kept: tuple[str, ...]
    bytes_before: int
    bytes_after: int
    times: tuple[Times, ...]
    profile: str
    left_out: tuple[str, ...]

    @property
    def added_bytes(self) -> int:
        return self.bytes_after - self.bytes_before

    @property
    def overhead(self) -> float:
        """The bytes added, as a fraction of the checkpoint's."""
        return self.added_bytes / self.bytes_before
