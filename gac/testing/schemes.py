"""The contract of a scheme."""

from itertools import combinations

import torch

from gac.core.operations import Operation, linear
from gac.profiling.operators.base import ITEM_BYTES
from gac.runtime.plain import modeling_gac
from gac.runtime.storage.eight_bits import READERS
from gac.runtime.storage.modules import STORAGES
from gac.schemes import SCHEMES, Scheme
from gac.schemes.base import storage_of
from gac.schemes.feedback.order import Inputs

_SHAPES = ((16, 256), (48, 128), (8, 200))
ROUNDED = 2**-7  # largest relative change of a 16-bit number that is rounded to 16 bits again
AS_MODELLED = 0.1  # largest relative difference between the error of inputs and ``Scheme.noise``


def check_scheme(scheme: Scheme) -> None:
    """Refuse a scheme whose bytes or rounding are not what it says.

    More numbers take more bytes, no fewer than their bits. Rounding leaves its input, its shape and its dtype alone,
    rounds nothing twice, keeps zeros, and where inputs are known it makes the product no worse. What its storage holds
    takes the bytes that it counts, gives the rounded matrix again bit for bit, and is multiplied like it but for what
    inputs are rounded to, with GAC and by the plain class of the storage; without a storage a number takes 16 bits.
    What runs is the same for all rows. Inputs are read alike when they are read again, and their error is that of its
    ``noise``.

    Raises:
        AssertionError: says what does not hold.
        GacError: the registry refuses the scheme.
    """
    SCHEMES.check(scheme)
    counts = [(1, 1), (1, 128), (32, 128), (4096, 4096)]
    sizes = [scheme.bytes(*shape) for shape in counts]
    valid = all(type(size) is int for size in sizes) and sizes == sorted(set(sizes))
    assert valid, f"{scheme.name}: matrices of {counts} take {sizes} bytes"
    least = [rows * columns * scheme.bits // 8 for rows, columns in counts]
    enough = all(size >= bits for size, bits in zip(sizes, least, strict=True))
    assert enough, f"{scheme.name}: {sizes} bytes are less than its {scheme.bits} bits a number"
    nothing = [scheme.bytes(*shape) for shape in ((0, 64), (64, 0))]
    assert nothing == [0, 0], f"{scheme.name}: matrices without numbers take {nothing} bytes"
    runs = scheme.operation(linear(8, 256, 16))
    assert isinstance(runs, Operation), f"{scheme.name}: runs {runs!r}, which is no Operation"
    named = scheme.storage is None or scheme.dtype not in ITEM_BYTES
    assert named, f"{scheme.name}: has a storage, and tables call it {scheme.dtype!r}, as they do numbers"
    if scheme.storage is not None:
        stored_in, known = scheme.storage.storage, ", ".join(STORAGES)
        expected = f"one of {known}; one of GAC itself also has a plain class in modeling_gac.py"
        assert stored_in in STORAGES, f"{scheme.name}: its storage {stored_in} is unknown; expected {expected}"
    _check_needs(scheme)
    if scheme.input_quantiser is not None:
        _check_reading(scheme)
    for shape in _SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
            _check_rounding(scheme, matrix, f"{scheme.name} of a {dtype} matrix {shape[0]} x {shape[1]}")


def _check_rounding(scheme: Scheme, matrix: torch.Tensor, of: str) -> None:
    before = matrix.clone()
    rounded = scheme.quantised(matrix)
    assert torch.equal(matrix, before), f"{of}: the matrix itself was changed"
    assert rounded.shape == matrix.shape, f"{of}: rounded to shape {tuple(rounded.shape)}"
    assert rounded.dtype == matrix.dtype, f"{of}: rounded to {rounded.dtype}"
    again = scheme.quantised(rounded)
    alike = 0.0 if matrix.dtype == torch.float32 else ROUNDED  # a product of 16 bits is no longer on the grid
    moved = float((again - rounded).norm())
    assert moved <= alike * float(rounded.norm()), f"{of}: rounding again changes what is rounded"
    zeros = torch.zeros_like(matrix)
    assert torch.equal(scheme.quantised(zeros), zeros), f"{of}: zeros are not kept"
    lost = float((matrix.double() - rounded.double()).norm() / matrix.double().norm())
    assert lost < 1, f"{of}: the error is {lost:.2g} times as long as the matrix"
    assert scheme.lossy == (lost > 0), f"{of}: lossy is {scheme.lossy}, the relative error is {lost:.2g}"
    _check_with_inputs(scheme, matrix, rounded, of)
    _check_storage(scheme, matrix, rounded, of)


def _check_storage(scheme: Scheme, matrix: torch.Tensor, rounded: torch.Tensor, of: str) -> None:
    rows, columns = matrix.shape
    counted, storage = scheme.bytes(rows, columns), storage_of(scheme)
    if storage is None:
        plain = 2 * matrix.numel()
        assert counted == plain, f"{of}: {counted} bytes are counted, {plain} stored, for there is no storage"
        return
    tensors = scheme.stored(matrix)
    due = storage.tensors(rows, columns)
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    assert shapes == due, f"{of}: stored as {shapes}, its storage has {due}"
    taken = sum(tensor.nbytes for name, tensor in tensors.items() if name not in storage.metadata)
    assert taken == counted, f"{of}: {counted} bytes are counted, {taken} stored"
    flaw = storage.flaw(tensors, rows, columns)
    assert flaw is None, f"{of}: what it stores is refused, {flaw}"
    values = storage.values(tensors, rows, columns, matrix.dtype)
    assert torch.equal(values, rounded), f"{of}: what is stored is not what it is rounded to"
    exact = storage.values(tensors, rows, columns, torch.float32)
    if (grid := scheme.grid(tensors, rows, columns)) is not None:
        assert torch.equal(grid.values(), exact), f"{of}: its numbers times their scales are not what is stored"
        same = all(torch.equal(tensor, tensors[name]) for name, tensor in scheme.on_grid(grid).items())
        assert same, f"{of}: its grid is not stored as it was"
    x = torch.ones(3, columns, dtype=matrix.dtype)
    product = storage.multiply(x, tensors, rows, columns, None)
    same = torch.allclose(product, x @ rounded.T, rtol=ROUNDED, atol=ROUNDED)
    assert same, f"{of}: multiplied otherwise than what it stands for"
    if scheme.storage is not None and (kind := modeling_gac.STORAGES.get(scheme.storage.storage)) is not None:
        module = modeling_gac.Matrix((rows, columns), kind(**scheme.storage.options), device=matrix.device)
        for name, tensor in tensors.items():
            module.register_buffer(name, tensor)
        assert torch.equal(module.values(matrix.dtype), rounded), f"{of}: opened otherwise without GAC"
        same = torch.allclose(module(x), product, rtol=ROUNDED, atol=ROUNDED)
        assert same, f"{of}: multiplied otherwise without GAC"


def _check_with_inputs(scheme: Scheme, matrix: torch.Tensor, rounded: torch.Tensor, of: str) -> None:
    columns = matrix.shape[1]
    inputs = torch.eye(columns, dtype=torch.float64) + 10 * torch.ones(columns, columns, dtype=torch.float64)
    informed = scheme.quantised(matrix, Inputs(inputs))
    tensors = scheme.stored(matrix, Inputs(inputs)) if scheme.storage else {}
    scattered = [name for name, result in tensors.items() if not result.is_contiguous()]
    assert not scattered, f"{of}: kernels cannot read {', '.join(scattered)}, which are not contiguous"
    assert (informed.shape, informed.dtype) == (matrix.shape, matrix.dtype), f"{of}: other with inputs than without"
    errors = [(result - matrix).double() for result in (informed, rounded)]
    worse, before = (float(((error @ inputs) * error).sum()) for error in errors)
    assert worse <= before, f"{of}: with known inputs the product's error is {worse:.3g}, {before:.3g} without"


def _check_needs(scheme: Scheme) -> None:
    sizes = (*range(1, 18), 4096)
    shapes = [(k, n) for k in sizes for n in sizes]
    runs = {shape: scheme.supports(linear(1, *shape)) for shape in shapes}
    assert runs[4096, 4096], f"{scheme.name}: runs no weight of 4096 x 4096"
    assert all(runs.values()) == (scheme.shape_requirement is None), (
        f"{scheme.name}: needs {scheme.shape_requirement!r}, runs say otherwise"
    )
    same = all(runs[shape] == scheme.supports(linear(1024, *shape)) for shape in shapes)
    assert same, f"{scheme.name}: what runs depends on the rows"


def _check_reading(scheme: Scheme) -> None:
    assert scheme.input_quantiser in READERS, (
        f"{scheme.name}: reads {scheme.input_quantiser!r}, which is none of {', '.join(READERS)}"
    )
    spread = torch.logspace(0, -2, 128)
    x = torch.randn(4096, 128, generator=torch.Generator().manual_seed(0)) * spread
    x[0] = 0
    numbers, scale = READERS[scheme.input_quantiser](x)
    read = numbers * scale
    assert (numbers.shape, scale.shape) == (x.shape, (len(x), 1)), f"{scheme.name}: tokens are not read one by one"
    assert not read[0].any(), f"{scheme.name}: zeros are not kept where inputs are read"
    again, other = READERS[scheme.input_quantiser](read)
    assert torch.allclose(again * other, read, rtol=1e-6), f"{scheme.name}: reading again changes what was read"
    largest = x.abs() == x.abs().amax(1, keepdim=True)
    others = x.where(~largest, torch.zeros_like(x)).square().mean(0)
    modelled = float(scheme.noise(others, x.square().amax(1).mean()).sum())
    error = float((read - x).square().mean(0).sum())
    message = f"{scheme.name}: inputs are off by {error:.3g}, its noise says {modelled:.3g}"
    assert abs(error - modelled) <= AS_MODELLED * modelled, message


def check_bits(*schemes: Scheme) -> None:
    """Refuse schemes of which one with more bits loses more of a matrix, or of its product with known inputs.

    Those of one storage are compared, and each with those without a storage: a format in groups can lose less than one
    with more bits and a scale a row.

    Raises:
        AssertionError: names both schemes and their squared errors.
    """
    by_bits = sorted(schemes, key=lambda scheme: scheme.bits)
    for shape in _SHAPES:
        matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        alike = torch.eye(shape[1], dtype=torch.float64)
        for inputs in (alike, alike + 1):
            errors = [(scheme, (scheme.quantised(matrix, Inputs(inputs)) - matrix).double()) for scheme in by_bits]
            lost = [(scheme, float(((error @ inputs) * error).sum())) for scheme, error in errors]
            for (fewer, fewer_lost), (more, more_lost) in combinations(lost, 2):
                alike_stored = more.storage is None or _storage_name(more) == _storage_name(fewer)
                worse = alike_stored and more.bits > fewer.bits and more_lost > fewer_lost
                errors_said = f"squared error {more_lost:.3g} of a matrix, {fewer.name} {fewer_lost:.3g}"
                assert not worse, f"{more.name} loses more than a scheme of fewer bits: {errors_said}"


def _storage_name(scheme: Scheme) -> str | None:
    return scheme.storage.storage if scheme.storage else None
