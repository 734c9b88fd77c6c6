"""Modules as they are made, and with numbers packed into words: outputs are those of the rounded weights."""

import copy
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
from gac.runtime.modules import BlockLinear, LatentLinear, LowRankLinear, ValueLinear, empty_linear
from gac.runtime.plain.modeling_gac import Heads, unpack
from gac.runtime.storage.modules import StoredLinear, plain_state, stored_modules
from gac.runtime.storage.packed import words_of
from gac.schemes import scheme_named
from gac.schemes.integers.levels import pack


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


def output(module: nn.Module, x: Tensor) -> Tensor:
    found = module(x)
    return found.features if isinstance(found, Heads) else found


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
    assert torch.equal(output(held, x), output(plain, x))
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
