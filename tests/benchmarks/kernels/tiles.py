"""Sizes that GAC's kernels could have: a candidate for each ``Tile``, ``Vector`` and ``Rows``."""

from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor

from gac.runtime.kernels import int8_fp8 as eight_bits_gemm
from gac.runtime.kernels.low_bit.few_rows import Rows, skinny_gemm
from gac.runtime.kernels.low_bit.one_row import Vector, gemv
from gac.runtime.kernels.low_bit.tiles import gemm
from gac.runtime.kernels.quantise_rows import quantise_rows
from gac.runtime.kernels.split_k import Tile
from tests.benchmarks.kernels.candidates import (
    EIGHT_BITS,
    FEW_BITS,
    Candidate,
    Inputs,
    Made,
    Weight,
    packed_of,
    takes_few,
    tensors_of,
    with_tensors,
)

VECTORS = (
    Vector(8, 8, 4, 80), Vector(8, 8, 4), Vector(8, 8, 2), Vector(16, 16, 2, 64), Vector(16, 16, 4, 64),
    Vector(4, 4, 4), Vector(8, 4, 4, 80),
)  # fmt: skip
ROWS = (
    Rows(8, 2, 4), Rows(8, 1, 6), Rows(16, 2, 4), Rows(16, 2, 3), Rows(16, 1, 6), Rows(32, 2, 2), Rows(32, 2, 3),
)  # fmt: skip
OF_FEW_BITS = {
    16: (
        Tile(16, 128, 128, 4, 4), Tile(16, 64, 256, 4, 4, 3), Tile(16, 64, 256, 4, 4, 4), Tile(16, 128, 128, 4, 4, 3),
        Tile(16, 128, 256, 4, 3), Tile(16, 64, 512, 4, 3, 3),
    ),
    32: (Tile(32, 128, 128, 4, 4), Tile(32, 64, 128, 4, 4, 4), Tile(32, 64, 256, 4, 3, 3), Tile(32, 128, 256, 4, 3)),
    64: (
        Tile(64, 64, 128, 4, 4), Tile(64, 128, 128, 4, 3), Tile(64, 128, 128, 8, 4), Tile(64, 64, 256, 4, 3),
        Tile(64, 128, 256, 8, 3, 1), Tile(64, 256, 128, 8, 3, 1),
    ),
    256: (
        Tile(64, 128, 128, 4, 3), Tile(128, 128, 128, 8, 3), Tile(128, 128, 128, 8, 2), Tile(64, 128, 128, 8, 3),
    ),
}  # fmt: skip
"""By the most rows that are multiplied so."""
OF_8_BITS = {
    16: (
        Tile(16, 64, 256, 4, 4), Tile(16, 64, 128, 4, 6, 3), Tile(16, 128, 128, 4, 4), Tile(16, 64, 256, 4, 4, 4),
        Tile(16, 64, 256, 4, 3, 3),
    ),
    32: (Tile(32, 64, 256, 4, 3), Tile(32, 128, 128, 4, 4)),
    64: (
        Tile(64, 64, 256, 4, 3), Tile(64, 64, 128, 4, 4, 3), Tile(64, 128, 128, 4, 4), Tile(64, 128, 128, 8, 4),
        Tile(64, 128, 128, 4, 3),
    ),
    4096: (
        Tile(128, 128, 128, 4, 3), Tile(128, 128, 128, 8, 4), Tile(256, 128, 128, 8, 3), Tile(256, 128, 128, 8, 4),
        Tile(128, 256, 128, 8, 3), Tile(128, 256, 128, 8, 4), Tile(256, 128, 64, 8, 4),
    ),
}  # fmt: skip


def vector(weight: Weight, rows: int, how: Vector) -> Made:
    """One row and a weight of few bits."""
    packed = packed_of(weight)
    return Made(tensors_of(packed), lambda inputs, own: gemv(inputs[0], with_tensors(packed, own), how))


def few_rows(weight: Weight, rows: int, how: Rows) -> Made:
    packed = packed_of(weight)
    return Made(tensors_of(packed), lambda inputs, own: skinny_gemm(inputs[0], with_tensors(packed, own), how))


def few(weight: Weight, rows: int, how: Tile) -> Made:
    """More rows; where tiles are few, several programs share each."""
    packed = packed_of(weight)
    return Made(tensors_of(packed), lambda inputs, own: gemm(inputs[0], with_tensors(packed, own), how))


def eight(weight: Weight, rows: int, how: Tile) -> Made:
    """Inputs that are rounded, and a weight of 8 bits."""

    def run(inputs: Inputs, own: Sequence[Tensor]) -> Tensor:
        x = inputs[0]
        return eight_bits_gemm.gemm(quantise_rows(x, own[0].dtype), *own, x.dtype, how)

    return Made((weight.held["weight"], weight.held["weight_scale"]), run)


def _named(kind: str, how: Tile | Vector | Rows) -> str:
    return f"{kind} {'-'.join(map(str, vars(how).values()))}"


def _heights(tiles: Mapping[int, Sequence[Tile]]) -> dict[Tile, list[range]]:
    """The numbers of rows that each is tried for."""
    found: dict[Tile, list[range]] = {}
    least = 1
    for most, some in tiles.items():
        for one in some:
            found.setdefault(one, []).append(range(least, most + 1))
        least = most + 1
    return found


def _takes(heights: Sequence[range], m: int, k: int, n: int, group: int) -> bool:
    return any(m in rows for rows in heights)


def _takes_packed(heights: Sequence[range], m: int, k: int, n: int, group: int) -> bool:
    return takes_few(k, group) and _takes(heights, m, k, n, group)


def _candidates() -> list[Candidate]:
    found = [
        Candidate(
            _named("vector", how), "gac", FEW_BITS, partial(vector, how=how), partial(_takes_packed, [range(1, 2)])
        )
        for how in VECTORS
    ]
    found += [
        Candidate(
            _named("rows", how),
            "gac",
            ("w3a16",),
            partial(few_rows, how=how),
            partial(_takes_packed, [range(2, how.rows + 1)]),
        )
        for how in ROWS
    ]
    for kind, schemes, make, takes, tiles in (
        ("tile", FEW_BITS, few, _takes_packed, OF_FEW_BITS),
        ("8-bit tile", tuple(EIGHT_BITS), eight, _takes, OF_8_BITS),
    ):
        for how, heights in _heights(tiles).items():
            made = partial(make, how=how)
            found.append(Candidate(_named(kind, how), "gac", schemes, made, partial(takes, heights)))
    return found


TILES: dict[str, Candidate] = {one.name: one for one in _candidates()}
"""By name: kind, and the fields of its sizes."""
