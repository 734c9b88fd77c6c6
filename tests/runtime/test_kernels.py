"""Triton kernels: GEMMs with few rows and of 8 bits, tensor cores, norms, gates, rotations, and quantised rows."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from gac.runtime.kernels import few_rows
from gac.runtime.kernels import int8_fp8 as eight_bits_gemm
from gac.runtime.kernels.elementwise.engine import add_norm, gate
from gac.runtime.kernels.elementwise.rows import (
    ACTIVATIONS,
    NORMS,
    AddNorm,
    gated,
    normed,
    plainly_rotated,
    rotated,
    rotated_heads,
    write_to_cache,
)
from gac.runtime.kernels.gated import gated_gemm
from gac.runtime.kernels.ptx import product
from gac.runtime.kernels.quantise_rows import QuantisedRows, norm_quantised, normed_rows, quantise_rows
from gac.runtime.kernels.split_k import Tile
from gac.runtime.plain.modeling_gac import in_parts
from gac.runtime.storage.eight_bits import READERS, Floats8, Floats8Blocks, Integers8
from gac.runtime.storage.modules import StoredLinear
from gac.schemes import scheme_named
from tests.runtime.interpreted import COMPILER, DEVICE, Hopper, operators, shapes, small_gpu

SHAPES = [(1, 70, 1096), (1, 5, 2048), (7, 130, 2056), (16, 64, 512), (24, 100, 2048), (64, 70, 8192), (64, 5000, 512)]


@pytest.fixture(autouse=True)
def _on_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run wherever tensors are: on a CPU as on a Hopper GPU."""
    if DEVICE == "cpu":  # a GPU has its own properties, which compilers read too
        monkeypatch.setattr(few_rows, "runs_early", lambda x: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Hopper)
        small_gpu(monkeypatch)


def operands(rows: int, n: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, columns + 8, generator=draw).to(DEVICE, torch.float16)[:, 8:]
    weight = torch.randn(n, columns, generator=draw).to(DEVICE, torch.float16) / columns**0.5
    return x, weight, torch.randn(n, generator=draw).to(DEVICE, torch.float16)


def error(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("rows", "n", "columns"), shapes(SHAPES, [0, 2, 4, 6]))
def test_products_are_those_of_a_gemm(rows: int, n: int, columns: int, with_bias: bool) -> None:
    x, weight, bias = operands(rows, n, columns)
    buffer = torch.full((rows, n + 8), torch.nan, device=DEVICE, dtype=torch.float16)
    for _ in range(2):  # counters of the first launch are zeros again
        few_rows.multiply(x, weight, buffer[:, 8:], bias if with_bias else None)
    assert error(buffer[:, 8:], x.double() @ weight.double().t() + with_bias * bias.double()) < 4e-3
    assert buffer[:, :8].isnan().all()


@pytest.mark.parametrize(("n", "columns"), [(77, 1096), (4, 2048)])
def test_gate_and_up_are_activated_in_one_launch(n: int, columns: int) -> None:
    x, weight, _ = operands(1, 2 * n, columns)
    out = torch.full((1, n), torch.nan, device=DEVICE, dtype=torch.float16)
    few_rows.gated_row(x, weight, out)
    gate, up = (x.double() @ weight.double().t()).chunk(2, 1)
    assert error(out, torch.nn.functional.silu(gate) * up) < 6e-3


@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize("sizes", [(200, 70), (200, 70, 5)])
def test_pairs_that_share_their_input_take_one_launch(
    rows: int, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, columns, starts = (136, 24, 8), (16, 152, 176), (8, 216, 288)
    offsets = [0, *accumulate(rank * size for rank, size in zip(ranks, sizes, strict=False))]
    pairs = [few_rows.SecondFactor(*each) for each in zip(ranks, sizes, columns, starts, offsets, strict=False)]
    products, factors, _ = operands(rows, 1, 200)[0], *operands(1, 1, offsets[-1])[1:]
    out = torch.full((rows, 300), torch.nan, device=DEVICE, dtype=torch.float16)
    monkeypatch.setattr(few_rows, "multiply", None)
    few_rows.multiply_factors(products, pairs, factors.view(-1), out)
    for pair in pairs:
        x, y = products[:, pair.column :][:, : pair.rank], out[:, pair.start :][:, : pair.size]
        assert error(y, x.double() @ pair.weight(factors).double().t()) < 4e-3
    assert out.isnan().sum() == rows * (300 - sum(sizes))


def test_weights_are_loaded_by_instructions_of_16_bytes() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.runtime.ptx"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    loads = json.loads(done.stdout)
    assert loads["factors"] == {"16": 40}
    assert loads["rows"] == {"16": 48}
    assert loads["words, few rows"] == {"16": 9, "4": 20, "2": 4}, "words of 3 bits and zero points are read one by one"
    assert loads["words, tiles"]["16"] == 40


@pytest.mark.parametrize(("rows", "n", "columns"), [(300, 136, 136), (5, 8, 72)])
def test_many_rows_are_multiplied_and_activated_in_one_launch(rows: int, n: int, columns: int) -> None:
    x, weight, _ = operands(rows, 2 * n, columns)
    out = torch.full((rows, n), torch.nan, device=DEVICE, dtype=torch.float16)
    gated_gemm(x.contiguous(), weight, out)
    gate, up = (x.double() @ weight.double().t()).chunk(2, 1)
    assert error(out, torch.nn.functional.silu(gate) * up) < 6e-3


def test_cublas_multiplies_what_it_is_faster_at() -> None:
    assert [few_rows.tile_of(*shape) is None for shape in ((2, 4224, 64), (64, 4096, 4096), (16, 6144, 64))] == [
        False,
        False,
        True,
    ]


def test_nothing_past_the_ends_of_rows_is_read() -> None:
    apart = torch.full((64, 180), torch.nan, dtype=torch.bfloat16)
    apart[:, :80] = torch.randn(64, 80)
    weight, out = torch.randn(32, 80, dtype=torch.bfloat16), torch.empty(64, 32, dtype=torch.bfloat16)
    few_rows.multiply(apart[:, :80], weight, out)
    assert error(out, apart[:, :80].double() @ weight.double().t()) < 4e-3


ROWS = [(1, 64), (7, 576), (40, 1536)]
NUMBERS = [torch.int8, torch.float8_e4m3fn]
AMPERE = SimpleNamespace(name="an older GPU", major=8, minor=6)


@pytest.fixture
def running(kernels_anywhere: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    small_gpu(monkeypatch)
    with operators(eight_bits_gemm.eight_bits_linear, eight_bits_gemm.eight_bits_linear_of):
        yield


def tokens(rows: int, columns: int) -> Tensor:
    """Random ones, the first with an outlier, the last all zeros."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    x[0, 0] = 30
    if rows > 1:
        x[-1] = 0
    return x.half().to(DEVICE)


@pytest.mark.parametrize(
    ("number", "divisor", "largest"),
    [(torch.int8, 128, 1), (torch.float8_e4m3fn, 512, 0 if DEVICE == "cuda" else None)],
)
@pytest.mark.parametrize(("rows", "columns"), shapes(ROWS, [1]))
def test_numbers_and_scales_are_those_of_plain_pytorch(
    rows: int, columns: int, number: torch.dtype, divisor: int, largest: int | None
) -> None:
    """Triton's interpreter divides less exactly, and loses a carry where it rounds to 8-bit floating point."""
    x = tokens(rows, columns)
    numbers, scale, _ = quantise_rows(x, number)
    expected, expected_scale = READERS[str(number).removeprefix("torch.").partition("_")[0]](x.cpu().float())
    assert numbers.dtype == number
    assert torch.equal(scale.cpu(), expected_scale / divisor)
    if largest is not None:
        off = (numbers.cpu().float() - expected.float() * divisor).abs()
        assert float(off.max()) <= largest
        assert float(off.mean()) < 1e-4


@pytest.mark.parametrize(("rows", "columns"), shapes([(1, 64), (7, 576), (40, 1536)], [1]))
def test_groups_of_columns_are_quantised_as_rows_of_their_own(rows: int, columns: int) -> None:
    x, group = tokens(rows, columns), 128
    numbers, scale, counters = quantise_rows(x, torch.float8_e4m3fn, group)
    expected = quantise_rows(in_parts(x, group).flatten(0, 1).contiguous(), torch.float8_e4m3fn)
    assert torch.equal(scale, expected.scale.view(rows, -1))
    assert torch.equal(numbers.float(), expected.numbers.float().view(rows, -1)[:, :columns])
    assert not counters.any()


@pytest.mark.parametrize(("number", "group"), [(torch.int8, None), (torch.float8_e4m3fn, None), (NUMBERS[1], 32)])
def test_a_gated_activation_is_quantised_as_what_another_kernel_makes_of_it(
    number: torch.dtype, group: int | None
) -> None:
    x, out = tokens(3, 2 * 80), torch.empty(3, 80, dtype=torch.float16, device=DEVICE)
    gate(x, out)
    found = quantise_rows(x, number, group, gated=True)
    for one, expected in zip(found, quantise_rows(out, number, group), strict=True):
        assert torch.equal(one, expected)


@pytest.mark.parametrize("number", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("rows", "columns"), shapes(ROWS, [1]))
@pytest.mark.parametrize("how", [None, Tile(16, 32, 128, 4, 2, programs_per_sm=8)])
def test_products_are_those_of_the_rounded_inputs(
    monkeypatch: pytest.MonkeyPatch, number: torch.dtype, rows: int, columns: int, how: Tile | None
) -> None:
    """Tiles are shared by as many programs as have two steps each, or fewer."""
    small_gpu(monkeypatch)
    generator = torch.Generator().manual_seed(rows)
    weight = (40 * torch.randn(80, columns, generator=generator)).clamp(-127, 127).to(number).to(DEVICE)
    scale = torch.rand(80, 1, generator=generator).half().to(DEVICE)
    x = tokens(rows, columns)
    given = quantise_rows(x, number)
    expected = (given.numbers.double() * given.scale) @ (weight.double() * scale).T / 64
    found = eight_bits_gemm.gemm(given, weight, scale / 64, x.dtype, how)
    assert found.dtype == x.dtype
    assert error(found, expected) < 1e-3
    assert not given.counters.any()  # so that another weight can have them


@pytest.mark.parametrize(("rows", "columns"), shapes([(1, 64), (7, 576), (200, 640)], [1, 2]))
@pytest.mark.parametrize("how", [None, Tile(16, 32, 128, 4, 2, programs_per_sm=8)])
def test_products_of_blocks_are_those_of_the_rounded_inputs(
    monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, how: Tile | None
) -> None:
    """Of scales that differ a lot, of blocks that are not full, in tiles that are shared too."""
    small_gpu(monkeypatch)
    generator = torch.Generator().manual_seed(rows)
    storage, outputs, x = Floats8Blocks(), 304, tokens(rows, columns)
    weight = torch.randn(outputs, columns, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(3, -(-columns // 128), generator=generator) * torch.logspace(0, -3, 3)[:, None]
    held = {"weight": weight.to(DEVICE), "weight_scale": scale.to(DEVICE)}
    numbers, scales, counters = rounded = quantise_rows(x, torch.float8_e4m3fn, 128)
    inputs = numbers.double() * scales.repeat_interleave(128, 1)[:, :columns]
    expected = inputs @ storage.values(held, outputs, columns, torch.float32).double().T
    found = eight_bits_gemm.gemm(rounded, held["weight"], held["weight_scale"], torch.float32, how, block=128)
    assert error(found, expected) < 1e-6
    assert not counters.any()


def test_a_gpu_with_less_shared_memory_has_fewer_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the memory that the GPU says it has
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Hopper)
    cuda, tile = torch.device("cuda"), Tile(16, 64, 128, 4, 4)
    assert [tile.fitted(step, cuda).stages for step in (2**14, 2**15, 2**20)] == [4, 3, 2]


@pytest.mark.usefixtures("running")
def test_a_stored_weight_of_whole_numbers_runs_in_8_bits() -> None:
    scheme = scheme_named("w8a8")
    matrix = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).half()
    held = {name: one.to(DEVICE) for name, one in scheme.stored(matrix).items()}
    stored = StoredLinear(Integers8(), nn.Linear(64, 48).half().to(DEVICE).requires_grad_(False))
    stored.fill(held)
    x = tokens(6, 64).view(2, 3, 64)
    plain = stored.storage.linear(x, stored.storage.values(held, 48, 64, x.dtype), stored.bias)
    with torch.no_grad():
        found = stored(x)
        compiled = torch.compile(stored, backend=COMPILER, fullgraph=True)(x)
    assert found.shape == (2, 3, 48)
    assert torch.equal(found, compiled)
    assert error(found, plain) < 2e-3


@pytest.mark.usefixtures("running")
def test_a_stored_weight_in_blocks_runs_in_8_bits() -> None:
    scheme, storage = scheme_named("fp8_block"), Floats8Blocks()
    matrix = torch.randn(144, 272, generator=torch.Generator().manual_seed(0)).half()
    held = {name: one.to(DEVICE) for name, one in scheme.stored(matrix).items()}
    x = tokens(6, 272).view(2, 3, 272)
    plain = storage.linear(x, storage.values(held, 144, 272, x.dtype), None)
    found = storage.multiply(x, held, 144, 272, None)
    handed = storage.kernel_of_prepared(quantise_rows(x.view(6, 272), storage.number, storage.block), held, x.dtype)
    assert error(found, plain) < (2e-3 if DEVICE == "cuda" else 5e-2)  # the interpreter rounds to fewer numbers
    assert torch.equal(found.view(6, 144), handed)
    both = torch.cat((x, x), -1).view(6, 544)
    activated = torch.empty_like(both[:, :272])
    gate(both, activated)
    rows, residual, gain = x.view(6, 272).clone(), tokens(7, 272)[1:], tokens(1, 272)[0]
    stream, normed = residual.clone(), rows.clone()
    prepared = storage.normed_inputs(rows, AddNorm(residual, gain, 1e-5, (rows, residual), True), held, 272)
    add_norm(normed, stream, gain, 1e-5)
    assert torch.equal(residual, stream)
    assert torch.equal(rows, normed)
    assert torch.equal(storage.kernel_of_prepared(prepared, held, x.dtype), storage.kernel(normed, held, 272))
    product = storage.gated_kernel(both, held, 272)
    assert product is not None
    assert torch.equal(product, storage.kernel(activated, held, 272))


def test_a_gpu_without_such_a_gemm_and_shapes_that_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: AMPERE)
    assert "no GEMM multiplies float8_e4m3fn" in str(Floats8().kernel_unsupported_reason(cuda, 64, 64))
    assert Integers8().kernel_unsupported_reason(cuda, 64, 64) is None
    assert Integers8().kernel_unsupported_reason(cuda, 40, 64) == "a weight has 40 rows, no multiple of 16"
    assert Integers8().kernel_unsupported_reason(cuda, 64, 65552) == "a weight has 65552 columns, not 1 to 65536"


pytest.importorskip("triton")


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(a, b, sums, out, like, COMPILED: tl.constexpr):  # type: ignore[no-untyped-def]
    """One product of each of two warps; registers lie behind each other."""
    thread = tl.arange(0, 64)
    left = (tl.load(a + thread), tl.load(a + 64 + thread), tl.load(a + 128 + thread), tl.load(a + 192 + thread))
    given = (
        tl.load(sums + thread), tl.load(sums + 64 + thread), tl.load(sums + 128 + thread), tl.load(sums + 192 + thread),
    )  # fmt: skip
    found = product(left, (tl.load(b + thread), tl.load(b + 64 + thread)), given, like.dtype.element_ty, COMPILED)
    for at in tl.static_range(4):
        tl.store(out + at * 64 + thread, found[at])


def held(matrices: Tensor, *corners: tuple[int, int]) -> Tensor:
    """Of each register what threads ``4 i + j`` hold: columns 2j and 2j + 1 of row i, from its corner on."""
    some = [matrices[:, row : row + 8, column : column + 8].reshape(-1, 2) for row, column in corners]
    return torch.stack(some).contiguous()


def multiplied(a: Tensor, b: Tensor, sums: Tensor) -> Tensor:
    """What threads hold of ``sums + a @ b.mT``, for two warps: ``(2, 64, 2)``."""
    left, right = held(a, (0, 0), (8, 0), (0, 8), (8, 8)).to(DEVICE), held(b, (0, 0), (0, 8)).to(DEVICE)
    given = held(sums, (0, 0), (8, 0)).mT.contiguous().to(DEVICE)
    out = torch.empty(2, 2, 64, device=DEVICE)
    _multiply[(1,)](left.view(torch.int32), right.view(torch.int32), given, out, left, DEVICE == "cuda", num_warps=2)
    return out.mT.cpu()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_product_is_that_of_the_matrices_that_threads_hold(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 16, 16), (2, 8, 16), (2, 16, 8)
    a, b, sums = (torch.randint(-9, 10, shape, generator=generator).float() for shape in shapes)
    found = multiplied(a.to(dtype), b.to(dtype), sums)
    assert torch.equal(found, held(sums + a @ b.mT, (0, 0), (8, 0)))


def test_whole_numbers_in_the_lowest_bits_of_float16_are_multiplied_exactly() -> None:
    """They are so many times 2^-24: less than the least normal number."""
    numbers = torch.arange(512).reshape(2, 16, 16)
    ones = torch.ones(2, 8, 16, dtype=torch.float16)
    found = multiplied(numbers.short().view(torch.float16), ones, torch.zeros(2, 16, 8))
    assert torch.equal(found * 2**24, held(numbers.sum(2, keepdim=True).expand(-1, -1, 8).float(), (0, 0), (8, 0)))


EPS = 1e-5
OF_ROWS = [(1, 1, 64), (2, 2500)]


@pytest.fixture(autouse=True)
def _running() -> Iterator[None]:
    with operators(normed, gated, rotated_heads, write_to_cache, normed_rows):
        yield


def random(*shape: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half().to(DEVICE)


def whole_numbers(*shape: int) -> Tensor:
    """Of whose squares every order of summing finds the same sum."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(0)).half().to(DEVICE)


def is_normed(out: Tensor, x: Tensor, weight: Tensor, kind: str) -> bool:
    """Whether numbers are those of PyTorch, but for sums that are taken in another order."""
    expected = NORMS[kind](x, weight, EPS)
    off = (out - expected).abs()
    return float((off > 0).float().mean()) < 5e-3 and bool(torch.all(off <= 2**-10 * expected.abs()))


def equal(found: QuantisedRows, expected: QuantisedRows) -> bool:
    return all(torch.equal(one.float(), other.float()) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("shape", OF_ROWS)
def test_a_norm(shape: tuple[int, ...], kind: str) -> None:
    x, weight = random(*shape), random(shape[-1], seed=1)
    assert is_normed(normed(x, weight, EPS, kind), x, weight, kind)


@pytest.mark.parametrize("kind", NORMS)
def test_where_sums_are_exact_a_norm_is_that_of_pytorch_to_the_last_bit(kind: str) -> None:
    x = whole_numbers(3, 4, 48)
    weight = random(48, seed=1)
    apart = torch.cat((x, x), dim=-1)[..., :48]  # rows that lie apart
    assert torch.equal(normed(apart, weight, EPS, kind), NORMS[kind](x, weight, EPS))


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("shape", OF_ROWS)
def test_a_product(shape: tuple[int, ...], kind: str) -> None:
    """Gate and up are parts of one output, as of a shared GEMM."""
    gate, up = random(*shape[:-1], 2 * shape[-1]).chunk(2, dim=-1)
    out = gated(gate, up, kind)
    expected = ACTIVATIONS[kind](gate) * up
    assert out.is_contiguous()
    assert float((out != expected).float().mean()) < 3e-2  # exponentials differ in the last bit
    assert torch.all((out - expected).abs() <= 2**-9 * expected.abs() + 2**-20)  # PyTorch subtracts near zero


def test_gates_far_from_zero_are_finite() -> None:
    gate = torch.tensor([[-6e4, -90.0, -20.0, 0.0, 20.0, 90.0, 6e4, 1.0] * 2]).half().to(DEVICE)
    for kind, activation in ACTIVATIONS.items():
        assert torch.allclose(gated(gate, torch.ones_like(gate), kind), activation(gate), atol=2**-20), kind


@pytest.mark.parametrize(("heads", "size", "angles"), [((4, 4), 8, 1), ((9, 3), 80, 2), ((5, 1), 128, 1)])
def test_heads_are_rotated_as_by_pytorch_to_the_last_bit(heads: tuple[int, int], size: int, angles: int) -> None:
    """Queries and keys are parts of one output."""
    both = random(2, 3, sum(heads) * size)
    q, k = (one.view(2, 3, -1, size).transpose(1, 2) for one in both.split([size * one for one in heads], dim=-1))
    cos, sin = random(angles, 3, size, seed=1) / 8, random(angles, 3, size, seed=2) / 8
    for one, other in zip(rotated(q, k, cos, sin), plainly_rotated(q, k, cos, sin), strict=True):
        assert torch.equal(one, other)
        assert one.transpose(1, 2).is_contiguous()  # as the cache takes them


def test_float32_angles_round_once_and_gradients_are_those_of_pytorch() -> None:
    q, k = (random(2, heads, 3, 8, seed=heads).requires_grad_() for heads in (4, 2))
    cos, sin = (random(1, 3, 8, seed=seed).float() / 8 for seed in (3, 4))
    found = rotated(q, k, cos, sin)
    by = [random(*one.shape, seed=5) for one in found]
    gradients = torch.autograd.grad(found, (q, k), by)
    wide = [one.detach().float().requires_grad_() for one in (q, k)]
    expected = plainly_rotated(*wide, cos, sin)
    due = torch.autograd.grad(expected, wide, [one.float() for one in by])
    for one, other in zip((*found, *gradients), (*expected, *due), strict=True):
        assert one.dtype == torch.float16
        torch.testing.assert_close(one.float(), other, rtol=2**-11, atol=1e-6)


@pytest.mark.parametrize("tokens", [1, 3])
def test_new_tokens_go_behind_those_that_there_are(tokens: int) -> None:
    """Values are shorter than keys, and both are parts of one output."""
    both = random(2, tokens, 4 * (16 + 10))
    k, v = (one.view(2, tokens, 4, -1).transpose(1, 2) for one in both.split([64, 40], dim=-1))
    keys, values = random(2, 4, 9, 16, seed=1), random(2, 4, 9, 10, seed=2)
    expected = [one.clone() for one in (keys, values)]
    for cached, new in zip(expected, (k, v), strict=True):
        cached[:, :, 5 : 5 + tokens] = new
    length = torch.tensor([3, 5], device=DEVICE)[1]
    write_to_cache(k, v, keys, values, length)
    assert all(map(torch.equal, (keys, values), expected))
    assert int(length) == 5


def test_a_token_without_room_is_seen() -> None:
    keys, values = random(1, 2, 4, 8), random(1, 2, 4, 8, seed=1)
    write_to_cache(random(1, 2, 1, 8), random(1, 2, 1, 8), keys, values, torch.tensor(4, device=DEVICE))
    assert keys[:, :, 0].isnan().all()
    assert values[:, :, 0].isnan().all()
    assert keys[:, :, 1:].isfinite().all()


@pytest.mark.parametrize(("number", "group"), [*((number, None) for number in NUMBERS), (NUMBERS[1], 128)])
@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_rounds_what_it_writes(kind: str, number: torch.dtype, group: int | None) -> None:
    x, weight = random(2, 3, 576), random(576, seed=1)
    x.view(-1)[1] = 40  # an outlier
    out, found = norm_quantised(x, weight, EPS, kind, number, True, group)
    assert is_normed(out, x, weight, kind)
    assert equal(found, quantise_rows(out.flatten(0, -2), number, group))


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("kind", NORMS)
def test_a_quantising_norm_whose_sums_are_exact_is_that_of_pytorch(kind: str, number: torch.dtype) -> None:
    x, weight = whole_numbers(2, 3, 576), random(576, seed=1)
    out, found = norm_quantised(x, weight, EPS, kind, number, False)
    expected = NORMS[kind](x, weight, EPS)
    assert out.shape == x.shape
    assert out.isnan().all()  # nobody reads it
    assert equal(found, quantise_rows(expected.flatten(0, -2), number))
