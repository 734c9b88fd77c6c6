"""The contract of a scheme."""

import torch

from gac.operations import Operation, linear
from gac.schemes import SCHEMES, Scheme

_SHAPES = ((16, 256), (48, 128))


def check_scheme(scheme: Scheme) -> None:
    """Refuse a scheme whose bytes or rounding are not what it says.

    More numbers take more bytes, no fewer than their bits. Rounding leaves its input, its shape and its dtype alone,
    rounds nothing twice, keeps zeros, loses less than the matrix is long, and changes it where the scheme is lossy.

    Raises:
        AssertionError: says what does not hold.
        GacError: the registry refuses the scheme.
    """
    SCHEMES.check(scheme)
    sizes = [scheme.bytes(count) for count in (1, 128, 4096, 4096 * 4096)]
    whole = all(type(size) is int for size in sizes) and sizes == sorted(set(sizes))
    assert whole, f"{scheme.name}: 1, 128, 4096 and 4096^2 numbers take {sizes} bytes"
    least = [count * scheme.bits // 8 for count in (1, 128, 4096, 4096 * 4096)]
    enough = all(size >= bits for size, bits in zip(sizes, least, strict=True))
    assert enough, f"{scheme.name}: {sizes} bytes are less than its {scheme.bits} bits a number"
    runs = scheme.operation(linear(8, 256, 16))
    assert isinstance(runs, Operation), f"{scheme.name}: runs {runs!r}, which is no Operation"
    for shape in _SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
            _check_rounding(scheme, matrix, f"{scheme.name} of a {dtype} matrix {shape[0]} x {shape[1]}")


def _check_rounding(scheme: Scheme, matrix: torch.Tensor, of: str) -> None:
    before = matrix.clone()
    rounded = scheme.rounded(matrix)
    assert torch.equal(matrix, before), f"{of}: the matrix itself was changed"
    assert rounded.shape == matrix.shape, f"{of}: rounded to shape {tuple(rounded.shape)}"
    assert rounded.dtype == matrix.dtype, f"{of}: rounded to {rounded.dtype}"
    assert torch.equal(scheme.rounded(rounded), rounded), f"{of}: rounding again changes what is rounded"
    zeros = torch.zeros_like(matrix)
    assert torch.equal(scheme.rounded(zeros), zeros), f"{of}: zeros are not kept"
    lost = float((matrix.double() - rounded.double()).norm() / matrix.double().norm())
    assert lost < 1, f"{of}: the error is {lost:.2g} times as long as the matrix"
    assert scheme.lossy == (lost > 0), f"{of}: lossy is {scheme.lossy}, the relative error is {lost:.2g}"
