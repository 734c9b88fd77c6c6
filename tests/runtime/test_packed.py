"""Weights of few bits: modules with numbers packed into words, products in Triton, where these run, and heads."""

import copy
import logging
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gac.compression.apply import empty_module
from gac.compression.rounding import store
from gac.core.errors import PlanError
from gac.forms.decomposition import with_rotated_latents
from gac.models.sites import Weight
from gac.plan.plan import WeightChoice
from gac.runtime import limits as kernel_limits
from gac.runtime.kernels import gpu
from gac.runtime.kernels import low_bit as few_bits
from gac.runtime.kernels.elementwise.engine import add_norm, gate
from gac.runtime.kernels.elementwise.rows import AddNorm
from gac.runtime.kernels.low_bit.few_rows import Rows, skinny_gemm
from gac.runtime.kernels.low_bit.one_row import Vector
from gac.runtime.kernels.low_bit.packed import Packed
from gac.runtime.kernels.low_bit.tiles import MOST_ROWS, gemm
from gac.runtime.kernels.split_k import Tile
from gac.runtime.modules import BlockLinear, LatentLinear, LowRankLinear, ValueLinear, empty_linear
from gac.runtime.plain.modeling_gac import unpack
from gac.runtime.storage import embeddings as ends
from gac.runtime.storage import packed
from gac.runtime.storage.embeddings import StoredEmbedding, StoredHead, TiedHead
from gac.runtime.storage.modules import StoredLinear, plain_state, stored_modules, without_kernels
from gac.runtime.storage.packed import PackedIntegers, words_of
from gac.schemes import scheme_named
from gac.schemes.base import storage_of
from gac.schemes.integers.levels import pack
from tests.runtime.interpreted import COMPILER, DEVICE, OnGpu, features, operators, shapes, small_gpu

SCHEMES = ["w8a16", "w4a16", "w4a16:64", "w3a16", "w3a16:64", "w2a16:256"]
SHAPES = [(48, 256), (40, 320), (33, 96), (64, 1024)]
GIVEN = [1, 2, 17, 64, 65, 129]
PRODUCTS = [(scheme, *shape, given) for scheme, shape, given in product(SCHEMES, SHAPES, GIVEN)]
# Of each scheme a ragged tile; of some one row, and a tile that programs share.
INTERPRETED = [24 * scheme + 14 for scheme in range(len(SCHEMES))] + [0, 21, 48, 69, 96]


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    small_gpu(monkeypatch)


@pytest.fixture
def running(kernels_anywhere: None) -> Iterator[None]:
    with operators(few_bits.few_bits_linear, few_bits.few_bits_written):
        yield


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weight(name: str, rows: int, columns: int) -> tuple[PackedIntegers, dict[str, Tensor]]:
    """A random one as the scheme stores it, on the device."""
    storage, matrix = storage_of(scheme_named(name)), torch.randn(rows, columns, generator=seeded(rows)).half()
    assert isinstance(storage, PackedIntegers)
    return storage, {tensor: one.to(DEVICE) for tensor, one in scheme_named(name).stored(matrix).items()}


def inputs(given: int, columns: int) -> Tensor:
    return torch.randn(given, columns, generator=seeded(given)).half().to(DEVICE)


def read(storage: PackedIntegers, held: dict[str, Tensor], columns: int) -> Packed:
    assert kernel_limits.few_bits(16, columns, storage.bits, storage.group, storage.zero) is None
    return Packed.of(held, storage.bits, storage.group, columns)


def error(product: Tensor, x: Tensor, storage: PackedIntegers, held: dict[str, Tensor]) -> float:
    """Of the product with the unpacked weight, relative to its size."""
    expected = x.double() @ storage.values(held, product.shape[-1], x.shape[-1], torch.float32).double().T
    return float((product - expected).norm() / expected.norm())


@pytest.mark.parametrize(("rows", "columns"), shapes(SHAPES, [2]))
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float16) for name in SCHEMES), ("w8a16", torch.bfloat16), ("w3a16:64", torch.bfloat16)],
)
def test_a_weight_is_written_to_the_last_bit_as_pytorch_unpacks_it(
    name: str, dtype: torch.dtype, rows: int, columns: int
) -> None:
    """In bfloat16 on a GPU alone: Triton's interpreter leaves out what does not fit, in place of rounding."""
    storage, held = weight(name, rows, columns)
    found = few_bits.dequantised(read(storage, held, columns), dtype).cpu()
    expected = storage.values({tensor: one.cpu() for tensor, one in held.items()}, rows, columns, dtype)
    exact = DEVICE == "cuda" or dtype == torch.float16
    assert torch.allclose(found, expected, atol=0, rtol=0 if exact else 2**-7)


@pytest.mark.parametrize(("name", "rows", "columns", "given"), shapes(PRODUCTS, INTERPRETED))
def test_products_are_those_of_the_unpacked_weight(name: str, rows: int, columns: int, given: int) -> None:
    storage, held = weight(name, rows, columns)
    x = inputs(given, columns)
    found = few_bits.few_bits_linear.__wrapped__(x, *read(storage, held, columns).operands)
    assert found.dtype == torch.float16
    assert error(found, x, storage, held) < 2e-3


@pytest.mark.parametrize("how", [Rows(16, 1, 2, warps=2), Rows(32, 2, 8), Rows(8, 1, 2)])
@pytest.mark.parametrize("name", ["w3a16", "w3a16:64"])
def test_few_rows_may_be_multiplied_in_other_sizes(name: str, how: Rows) -> None:
    """What lies far from zero is no worse: numbers have more than their value before they are multiplied."""
    (storage, held), x = weight(name, 40, 320), 5 + inputs(33, 320)
    assert error(skinny_gemm(x, read(storage, held, 320), how), x, storage, held) < 1e-3


@pytest.mark.parametrize("name", shapes(SCHEMES, [1, 4]))
def test_tiles_may_have_other_sizes(name: str) -> None:
    """What lies far from zero is no worse: numbers have more than their value while they are multiplied."""
    (storage, held), x = weight(name, 40, 320), 5 + inputs(33, 320)
    for how in (Tile(16, 32, 64, 4, 2), Tile(32, 64, 256, 4, 2, programs_per_sm=8)):
        assert error(gemm(x, read(storage, held, 320), how), x, storage, held) < 1e-3


@pytest.mark.parametrize(("rows", "is_tiled"), [(1, False), (2, True), (130, False)])
def test_tiles_take_a_norm_as_another_kernel_makes_it(rows: int, is_tiled: bool) -> None:
    (storage, tensors), x, residual = weight("w4a16:64", 40, 192), inputs(rows, 192), inputs(rows + 1, 192)[1:]
    gain, normed, stream = inputs(3, 192)[2], x.clone(), residual.clone()
    add_norm(normed, stream, gain, 1e-5)
    prepared = storage.normed_inputs(x, AddNorm(residual, gain, 1e-5, (x, residual), False), tensors, 192)
    assert (prepared is not None) is is_tiled
    if prepared is not None:
        assert torch.equal(residual, stream)
        assert x[0, 0].isnan()
        product = storage.kernel_of_prepared(prepared, tensors, x.dtype)
        torch.testing.assert_close(product, gemm(normed, read(storage, tensors, 192)), rtol=2**-8, atol=2**-5)


@pytest.mark.parametrize(("rows", "is_tiled"), [(1, False), (2, True), (128, True), (129, False)])
def test_tiles_take_a_gated_activation_as_another_kernel_makes_it(rows: int, is_tiled: bool) -> None:
    (storage, held), x = weight("w4a16:64", 40, 128), inputs(rows, 2 * 128)
    packed_weight, out = read(storage, held, 128), torch.empty(rows, 128, dtype=torch.float16, device=DEVICE)
    gate(x, out)
    found = few_bits.few_bits_gated(x, packed_weight)
    assert (found is not None) is is_tiled
    assert found is None or torch.equal(found, gemm(out, packed_weight))
    assert few_bits.few_bits_gated(inputs(32, 2 * 128), read(*weight("w3a16", 40, 128), 128)) is None


@pytest.mark.parametrize(
    ("dtype", "how", "columns"),
    [(torch.float16, Vector(2, 1, 2), 96), (torch.bfloat16, Vector(4, 2, 4, registers=64), 1088)],
)
@pytest.mark.parametrize("name", shapes([*SCHEMES, "w2a16", "w2a16:64"], [2, 3, 7]))
def test_one_row_may_be_multiplied_in_other_sizes(name: str, dtype: torch.dtype, how: Vector, columns: int) -> None:
    """What lies far from zero is no worse: numbers have more than their value while they are multiplied."""
    storage, held = weight(name, 12, columns)
    for mean in (0, 5):
        x = (mean + inputs(1, columns)).to(dtype)
        found = few_bits.gemv(x, read(storage, held, columns), how)
        assert found.dtype == dtype
        assert error(found, x, storage, held) < (1e-3 if dtype == torch.float16 else 8e-3)


@pytest.mark.usefixtures("running")
def test_a_stored_weight_runs_in_the_kernels_where_there_are_no_gradients() -> None:
    storage, held = weight("w4a16:64", 48, 256)
    stored = StoredLinear(storage, nn.Linear(256, 48).half().to(DEVICE).requires_grad_(False))
    stored.fill(held)
    x = torch.randn(2, 3, 256, device=DEVICE).half()
    plain = storage.linear(x, storage.values(held, 48, 256, x.dtype), stored.bias)
    found = stored(x)
    with torch.no_grad():
        compiled = torch.compile(stored, backend=COMPILER, fullgraph=True)(x)
    assert found.shape == (2, 3, 48)
    assert torch.equal(found, few_bits.few_bits_linear.__wrapped__(x, *read(storage, held, 256).operands) + stored.bias)
    assert torch.equal(found, compiled)
    assert float((found - plain).norm() / plain.norm()) < 2e-3
    x.requires_grad_()
    stored(x).sum().backward()
    assert x.grad is not None
    assert stored(x[:, :0]).shape == (2, 0, 48)


@pytest.mark.parametrize(
    ("limit", "sizes", "said"),
    [
        (kernel_limits.few_bits, (16, 64, 5, None, False), "numbers have 5 bits, not 2, 3, 4, 8"),
        (kernel_limits.few_bits, (16, 100, 4, 128, True), "a weight has 100 columns, no multiple of 32"),
        (kernel_limits.few_bits, (16, 192, 4, 96, True), "groups have 96 columns, no power of two from 64 on"),
        (kernel_limits.few_bits, (16, 64, 4, None, True), "zero points of whole rows"),
        (kernel_limits.latents, (64, 20, 16), "latents have rank 20, no multiple of 8"),
        (kernel_limits.latents, (100, 16, 16), "heads have 100 numbers, no multiple of 8 up to 256"),
        (kernel_limits.latents, (64, 0, 64), None),
    ],
)
def test_what_the_kernels_cannot_read_has_a_reason(limit: Any, sizes: tuple[Any, ...], said: str | None) -> None:
    assert limit(*sizes) == said


def test_matrices_that_run_in_plain_pytorch_are_counted_by_reason(request: pytest.FixtureRequest) -> None:
    weights = (StoredLinear(PackedIntegers(4, group, zero=True), nn.Linear(256, 48)) for group in (64, 32))
    model: Any = nn.Sequential(*weights)
    model.device, model.dtype = torch.device("cpu"), torch.float16
    assert without_kernels(model) == {"the model is on the cpu": 2}
    request.getfixturevalue("kernels_anywhere")
    assert without_kernels(model) == {"groups have 32 columns, no power of two from 64 on": 1}


def test_a_gpu_without_a_kernel_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(gpu, "_said", set())
    with caplog.at_level(logging.WARNING, logger="gac"):
        for _ in range(2):
            gpu.warn_slow_path_once(OnGpu(), "groups have 32 columns")  # type: ignore[arg-type]
        gpu.warn_slow_path_once(torch.zeros(1), "the model is on the cpu")
    assert caplog.messages == ["weights are unpacked in plain PyTorch, which is slow: groups have 32 columns"]


ROWS, COLUMNS = 96, 64


@pytest.fixture
def products(kernels_anywhere: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of the weight of every product in a kernel; pieces of heads have 32 rows."""
    small_gpu(monkeypatch)
    found: list[int] = []

    def linear(x: torch.Tensor, *operands: Any) -> torch.Tensor:
        found.append(len(operands[0]))
        return few_bits.few_bits_linear.__wrapped__(x, *operands)

    monkeypatch.setattr(packed, "few_bits_linear", linear)
    monkeypatch.setattr(ends, "HEAD_ROWS", 32)
    return found


@pytest.mark.parametrize(
    ("given", "pieces", "tied"),
    [(1, [ROWS], False), (MOST_ROWS, [ROWS], True), *((MOST_ROWS + 1, [32] * 3, tied) for tied in (False, True))],
)
def test_few_inputs_are_multiplied_in_one_kernel(
    products: list[int], given: int, pieces: list[int], tied: bool
) -> None:
    scheme = scheme_named("w8a16")
    generator = torch.Generator().manual_seed(0)
    numbers = scheme.stored(torch.randn(ROWS, COLUMNS, generator=generator).half())
    storage = storage_of(scheme)
    assert storage is not None
    plain = nn.Linear(COLUMNS, ROWS, dtype=torch.float16)
    head: Any = StoredHead(storage, plain)
    holder = head
    if tied:
        holder = StoredEmbedding(storage, nn.Embedding(ROWS, COLUMNS, dtype=torch.float16))
        head = TiedHead(holder, plain)
    holder.fill(numbers)
    holder, head = holder.to(DEVICE), head.to(DEVICE)
    x = torch.randn(1, given, COLUMNS, generator=generator).half().to(DEVICE)
    with operators(few_bits.few_bits_linear, few_bits.few_bits_written), torch.no_grad():
        found = head(x)
        expected = x.float() @ holder.values(torch.float16).float().T + plain.bias.float().to(DEVICE)
    assert products == pieces
    assert torch.linalg.norm(found.float() - expected) < 2e-3 * torch.linalg.norm(expected)


def as_text(rows: Tensor) -> list[list[str]]:
    """Words in hexadecimal."""
    return [[f"{word & 0xFFFFFFFF:08x}" for word in row] for row in rows.tolist()]


def test_the_first_number_lies_in_the_lowest_bits() -> None:
    numbers = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9]], dtype=torch.uint8)
    assert as_text(pack(numbers, 4)) == [["87654321", "00000009"]]
    assert as_text(pack(numbers, 8)) == [["04030201", "08070605", "00000009"]]
    high = torch.full((1, 8), 15, dtype=torch.uint8)
    assert pack(high, 4).tolist() == [[-1]]


def test_three_bits_are_three_bits() -> None:
    numbers = torch.tensor([[int(one) for one in "76543210" * 4]], dtype=torch.uint8)
    string = sum(int(one) << 3 * at for at, one in enumerate("76543210" * 4))
    expected = [[f"{string >> 32 * at & 0xFFFFFFFF:08x}" for at in range(3)]]
    assert as_text(pack(numbers, 3)) == expected
    assert [words_of(count, 3) for count in (0, 1, 10, 11, 21, 22, 32, 33)] == [0, 1, 1, 2, 2, 3, 3, 4]


@pytest.mark.parametrize("columns", [0, 1, 7, 8, 31, 32, 33, 65, 200])
@pytest.mark.parametrize("bits", range(1, 9))
def test_what_is_packed_is_unpacked(bits: int, columns: int) -> None:
    numbers = torch.randint(0, 2**bits, (5, columns), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    words = pack(numbers, bits)
    assert (words.dtype, words.shape) == (torch.int32, (5, words_of(columns, bits)))
    assert unpack(words, bits, columns).tolist() == numbers.tolist()


def made(kind: str, dtype: torch.dtype) -> nn.Module:
    sizes: dict[str, Any] = {"bias": True, "dtype": dtype}
    module = {
        "Linear": lambda: empty_linear(70, 33, **sizes),
        "ValueLinear": lambda: ValueLinear(70, 3, 11, **sizes),
        "BlockLinear": lambda: BlockLinear(2, 35, 17, **sizes),
        "LowRankLinear": lambda: LowRankLinear(70, 10, 33, **sizes),
        "LatentLinear": lambda: LatentLinear(70, 2, 5, 34, **sizes),
        "within": lambda: nn.Sequential(nn.Identity(), empty_linear(70, 33, **sizes)),
    }[kind]()
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, generator=generator)
    return module.requires_grad_(False)


@pytest.mark.parametrize(("name", "dtype"), [("w4a16:24", torch.bfloat16), ("w3a16:32", torch.float32)])
@pytest.mark.parametrize("kind", ["Linear", "ValueLinear", "BlockLinear", "LowRankLinear", "LatentLinear", "within"])
def test_outputs_are_those_of_the_rounded_weight(kind: str, name: str, dtype: torch.dtype) -> None:
    plain, scheme = made(kind, dtype), scheme_named(name)
    held = store(scheme, copy.deepcopy(plain))
    matrices = [parameter for parameter in plain.parameters() if parameter.dim() > 1]
    values = [matrix.flatten(0, -2) for matrix in matrices]
    if type(plain) is LowRankLinear:
        values = [*reversed(with_rotated_latents(values[1], values[0]))]
    for matrix, value in zip(matrices, values, strict=True):
        matrix.copy_(scheme.quantised(value).view_as(matrix))
    x = torch.randn(2, 3, 70, dtype=dtype)
    assert torch.equal(features(held(x)), features(plain(x)))
    assert type(held(x)) is type(plain(x))
    state = plain_state(held, dtype)
    assert state.keys() == plain.state_dict().keys()
    assert all(torch.equal(state[own], value) for own, value in plain.state_dict().items())
    assert not any(parameter.dim() > 1 for parameter in held.parameters())


def test_casts_and_copies_keep_the_numbers() -> None:
    held = store(scheme_named("w4a16"), made("LowRankLinear", torch.bfloat16))
    before = {name: value.clone() for name, value in held.named_buffers()}
    for other in (copy.deepcopy(held).float(), copy.deepcopy(held).half(), copy.deepcopy(held).to("meta")):
        after = dict(other.named_buffers())
        assert {name: value.dtype for name, value in after.items()} == {name: one.dtype for name, one in before.items()}
        assert all(value.is_meta or torch.equal(value, before[name]) for name, value in after.items())
    assert copy.deepcopy(held).float().get_parameter("second.bias").dtype == torch.float32
    assert [*stored_modules(held)] == ["first", "second"]


@pytest.mark.usefixtures("nothing_compiled")
def test_it_compiles_to_one_graph() -> None:
    held = store(scheme_named("w4a16:24"), made("LatentLinear", torch.bfloat16))
    x = torch.randn(4, 70, dtype=torch.bfloat16)
    assert torch.equal(torch.compile(held, backend="eager", fullgraph=True)(x), held(x))


def test_it_says_what_it_is_and_other_matrices_are_refused() -> None:
    held = store(scheme_named("w4a16:24"), made("Linear", torch.float32))
    assert repr(held) == "StoredLinear(in_features=70, out_features=33, PackedIntegers(bits=4, group=24, zero=True))"
    assert isinstance(held, StoredLinear)
    assert not isinstance(held, nn.Linear)
    assert torch.equal(held.values(torch.float32, slice(3, 5)), held.values(torch.float32)[3:5])
    with pytest.raises(PlanError, match=r"weight of a Embedding in w4a16; expected matrices in nn.Linear"):
        store(scheme_named("w4a16"), nn.Sequential(nn.Embedding(4, 4)))


CHOICES = [
    WeightChoice(Weight("q", 24, 40), "dense", 24),
    WeightChoice(Weight("q", 24, 40), "low_rank", 8),
    WeightChoice(Weight("up", 24, 40, "out"), "narrow", 16),
]


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_on_meta_nothing_is_allocated_and_nowhere_are_random_numbers_drawn(choice: WeightChoice) -> None:
    before = torch.get_rng_state()
    built = [empty_module(choice, True, device, torch.float32) for device in ("cpu", "meta")]
    assert torch.equal(torch.get_rng_state(), before)
    assert {parameter.device.type for parameter in built[1].parameters()} == {"meta"}
    assert {type(one) for one in built[0].modules() if not [*one.children()]} == {torch.nn.Linear}
    with torch.device("meta"):
        assert empty_linear(2, 3, bias=True).weight.is_meta
