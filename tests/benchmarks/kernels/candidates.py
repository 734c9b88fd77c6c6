"""What can multiply with a weight of each scheme on a GPU: PyTorch's operators, packages, and kernels of GAC's own.

A candidate makes a callable from a weight as GAC stores it. Packages are imported when their first candidate is made.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from gac.runtime.kernels import low_bit
from gac.runtime.kernels.low_bit.packed import Packed
from gac.runtime.kernels.quantise_rows import quantise_rows
from gac.runtime.plain.modeling_gac import unpack
from gac.runtime.storage.base import Storage
from gac.runtime.storage.eight_bits import READERS
from gac.runtime.storage.modules import STORAGES
from gac.runtime.storage.packed import PackedIntegers
from gac.schemes import Scheme, scheme_named

DTYPE = torch.bfloat16
GEMLITE_CONFIGS = 4
"""GemLite tries so many configurations where it has none for the shape: each takes about a second to compile."""
FEW_BITS = ("w8a16", "w4a16", "w3a16", "w2a16")
EIGHT_BITS = {"w8a8": torch.int8, "fp8": torch.float8_e4m3fn}
_MOST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_INT_MM_ROWS = 32  # it takes more than 16
_HUMMING_ROWS = 128  # of a weight: what does not fill so many is filled up with zeros

Inputs = Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class Weight:
    """A weight ``(rows, columns)`` as a scheme stores it."""

    name: str
    rows: int
    columns: int
    held: Mapping[str, Tensor]

    @staticmethod
    def of(name: str, k: int, n: int, device: str) -> "Weight":
        """A random one, rounded number by number."""
        generator = torch.Generator(device).manual_seed(0)
        matrix = 0.02 * torch.randn(n, k, device=device, generator=generator)
        scheme = scheme_named(name)
        held = scheme.stored(matrix.to(DTYPE)) if scheme.storage else {"weight": matrix.to(DTYPE)}
        return Weight(name, n, k, held)

    @property
    def scheme(self) -> Scheme:
        return scheme_named(self.name)

    @property
    def storage(self) -> Storage:
        spec = self.scheme.storage
        assert spec is not None, self.name
        return STORAGES[spec.storage][0](**spec.options)

    def values(self, dtype: torch.dtype) -> Tensor:
        if self.scheme.storage is None:
            return self.held["weight"].to(dtype)
        return self.storage.values(self.held, self.rows, self.columns, dtype)

    def expected(self, x: Tensor) -> Tensor:
        """``x @ weight.T`` in float32, with the inputs rounded where the scheme rounds them."""
        weight, reads = self.values(torch.float32), self.scheme.input_quantiser
        if reads is None:
            return x.float() @ weight.T
        numbers, scale = READERS[reads](x)
        return (numbers.float() @ weight.T) * scale

    @property
    def group(self) -> int:
        """Columns that have one scale."""
        storage = self.storage
        assert isinstance(storage, PackedIntegers)
        return min(storage.group or self.columns, self.columns)

    @property
    def numbers(self) -> Tensor:
        """Whole numbers ``(rows, columns)``, uint8, from 0 on."""
        return unpack(self.held["weight_packed"], self.scheme.bits, self.columns).to(torch.uint8)

    @property
    def scale(self) -> Tensor:
        return self.held["weight_scale"].to(DTYPE)

    @property
    def zeros(self) -> Tensor:
        """Zero points ``(rows, groups)``, uint8."""
        return unpack(self.held["weight_zero_point"].T, self.scheme.bits, self.rows).T.contiguous().to(torch.uint8)


@dataclass(frozen=True, eq=False)
class Made:
    """A product with one weight.

    Attributes:
        tensors: what it reads beside the input.
        run: of the input's tensors and those.
        inputs: what the input is before the clock runs.
    """

    tensors: tuple[Tensor, ...]
    run: Callable[[Inputs, Sequence[Tensor]], Tensor]
    inputs: Callable[[Tensor], Inputs] = lambda x: (x,)


@dataclass(frozen=True)
class Candidate:
    """Something that multiplies with the weights of some schemes.

    Attributes:
        package: where it is from.
        schemes: by their names without parameters.
        takes: whether it can multiply ``(m, k)`` and a weight ``(n, k)``, of so many columns a scale.
        make: of a weight and the rows of the input.
        whole: whether it does all of the work; else inputs are rounded before the clock runs.
    """

    name: str
    package: str
    schemes: tuple[str, ...]
    make: Callable[[Weight, int], Made]
    takes: Callable[[int, int, int, int], bool] = lambda m, k, n, group: True
    whole: bool = True

    def can(self, name: str, m: int, k: int, n: int) -> bool:
        scheme = scheme_named(name)
        group = getattr(scheme, "group", None) or k
        return name.split(":")[0] in self.schemes and self.takes(m, k, n, min(group, k))


def linear(weight: Weight, rows: int) -> Made:
    return Made((weight.held["weight"],), lambda inputs, own: functional.linear(inputs[0], own[0]))


def of_models(weight: Weight, rows: int, plain: bool) -> Made:
    """As models of GAC multiply: in their kernels, or in plain PyTorch, where the weight is unpacked first."""
    names, storage = tuple(weight.held), weight.storage

    def multiply(x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        if plain:
            return storage.linear(x, storage.values(tensors, weight.rows, weight.columns, x.dtype), None)
        return storage.multiply(x, tensors, weight.rows, weight.columns, None)

    def run(inputs: Inputs, own: Sequence[Tensor]) -> Tensor:
        return multiply(inputs[0], dict(zip(names, own, strict=True)))

    return Made(tuple(weight.held.values()), run)


def int8pack(weight: Weight, rows: int) -> Made:
    own = _signed(weight), weight.scale[:, 0].contiguous()
    return Made(own, lambda inputs, own: torch._weight_int8pack_mm(inputs[0], own[0], own[1]))


def tinygemm(weight: Weight, rows: int) -> Made:
    """``(number - 8) * scale + shift``, with shifts in 16 bits."""
    numbers, scale, group = weight.numbers, weight.scale.float(), weight.group
    shift = (8 - weight.zeros.float()) * scale
    pairs = (numbers[:, ::2] << 4 | numbers[:, 1::2]).contiguous()
    tiles = next(tiles for tiles in (8, 4, 2) if not weight.columns % (16 * tiles))
    both = torch.stack([scale.T, shift.T], dim=-1).to(DTYPE).contiguous()
    own = torch._convert_weight_to_int4pack(pairs, tiles), both
    return Made(own, lambda inputs, own: torch._weight_int4pack_mm(inputs[0], own[0], group, own[1]))


def plainly(x: Tensor, dtype: torch.dtype, least_rows: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs rounded token by token, in PyTorch's own operators."""
    wide = functional.pad(x, (0, 0, 0, max(0, least_rows - len(x)))).float()
    scale = (wide.abs().amax(-1, keepdim=True) / _MOST[dtype]).clamp_min_(torch.finfo(torch.float32).tiny)
    units = wide.div_(scale)
    return (units if dtype.is_floating_point else units.round_()).to(dtype), scale


def in_triton(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same in one kernel."""
    numbers, scale, _ = quantise_rows(x, dtype)
    return numbers, scale


def scaled_mm(weight: Weight, rows: int, rounding: Callable[..., Any], given: bool, fast: bool) -> Made:
    """Args: given: inputs are rounded before the clock runs; fast: sums in fewer bits (``use_fast_accum``)."""

    def run(inputs: Inputs, own: Sequence[Tensor]) -> Tensor:
        numbers, scale = inputs if given else rounding(inputs[0], torch.float8_e4m3fn)
        y: Tensor = torch._scaled_mm(numbers, own[0].t(), scale, own[1], out_dtype=DTYPE, use_fast_accum=fast)
        return y

    own = weight.held["weight"], weight.held["weight_scale"].float().t().contiguous()
    return Made(own, run, partial(rounding, dtype=torch.float8_e4m3fn)) if given else Made(own, run)


def int_mm(weight: Weight, rows: int) -> Made:
    def run(inputs: Inputs, own: Sequence[Tensor]) -> Tensor:
        numbers, scale = plainly(inputs[0], torch.int8, _INT_MM_ROWS)
        sums = torch._int_mm(numbers, own[0].t())[:rows]
        y: Tensor = (sums * scale[:rows]).mul_(own[1]).to(DTYPE)
        return y

    return Made((weight.held["weight"], weight.held["weight_scale"].float().t().contiguous()), run)


def gemlite(weight: Weight, rows: int) -> Made:
    helper = _gemlite()
    name, scale = weight.name.split(":")[0], weight.scale
    kind = {"w8a16": "A16W8_INT8", "w8a8": "A8W8_int8_dynamic", "fp8": "A8W8_fp8_dynamic"}
    if name in kind:
        numbers = _signed(weight) if name == "w8a16" else weight.held["weight"]
        made = getattr(helper, kind[name])(dtype=DTYPE).from_weights(numbers, scales=scale)
    else:
        maker = helper.A16Wn(dtype=DTYPE)
        made = maker.from_weights(weight.numbers, scale, weight.zeros, weight.scheme.bits, weight.group)
    options = made.get_meta_args()

    def run(inputs: Inputs, own: Sequence[Tensor]) -> Tensor:
        y: Tensor = torch.ops.gemlite.forward_functional(inputs[0], None, list(own), options)
        return y

    return Made(tuple(one.detach() for one in made.get_tensor_args()), run)


@cache
def _gemlite() -> Any:
    """Its helpers, with the configurations that it has for the H100, and few to try where it has none."""
    import gemlite
    from triton import runtime
    from triton.testing import do_bench

    gemlite.load_config(f"{gemlite.__path__[0]}/configs/h100.json")
    for module in [one for name, one in sys.modules.items() if name.startswith("gemlite")]:
        for kernel in [one for one in vars(module).values() if isinstance(one, runtime.Autotuner)]:
            kernel.configs = kernel.configs[:: ceil(len(kernel.configs) / GEMLITE_CONFIGS)]
            kernel._do_bench = lambda call, quantiles: do_bench(call, warmup=4, rep=12, quantiles=quantiles)
    return gemlite.helper


def humming(weight: Weight, rows: int) -> Made:
    """A kernel that NVRTC compiles for this shape, scheme and number of rows."""
    from humming.layer import HummingLayer

    name, scheme = weight.name.split(":")[0], weight.scheme
    own_zero = "weight_zero_point" in weight.held
    kind = "float8e4m3" if name == "fp8" else f"uint{scheme.bits}"
    described = {"dtype": kind, "group_size": weight.group if own_zero else 0, "has_zero_point": own_zero}
    reads = {"w8a8": {"dtype": "int8"}, "fp8": {"dtype": "float8e4m3"}}.get(name)
    filled = _HUMMING_ROWS if weight.rows % _HUMMING_ROWS else 1
    layer = HummingLayer(weight.rows, weight.columns, described, reads, filled, torch_dtype=DTYPE).cuda()
    layer.load_from_tensors({"weight": _words(weight), "weight_scale": weight.scale} | _own_zeros(weight))
    layer.transform()
    known = ("weight", "weight_scale", "zero_point", "weight_scale_2")
    names = [one for one in known if getattr(layer, one, None) is not None]
    options = {"locks": layer.locks, "tuning_config": _tuning(layer.humming_config, rows)}
    forward, config = _humming_forward(), layer.humming_config

    def run(inputs: Inputs, own: Sequence[Tensor]) -> Tensor:
        return forward(config, inputs=inputs[0], **dict(zip(names, own, strict=True)), **options)

    return Made(tuple(getattr(layer, one).detach() for one in names), run)


@cache
def _humming_forward() -> Callable[..., Tensor]:
    from humming.forward import humming_forward

    forward: Callable[..., Tensor] = humming_forward
    return forward


def _tuning(config: Any, rows: int) -> str:
    """What its heuristics give for so many rows, as it takes it."""
    from humming.tune import get_heuristics_config

    found = get_heuristics_config(config, shape_m=rows, device=torch.cuda.current_device())
    return json.dumps(found, default=lambda one: getattr(one, "value", str(one)))


def _words(weight: Weight) -> Tensor:
    """Numbers of a row in words of 32 bits; signed bytes count from -128."""
    if "weight_packed" in weight.held:
        return weight.held["weight_packed"]
    held = weight.held["weight"]
    return (held.view(torch.uint8) ^ 128 if held.dtype == torch.int8 else held).contiguous().view(torch.int32)


def _own_zeros(weight: Weight) -> dict[str, Tensor]:
    held = weight.held.get("weight_zero_point")
    return {} if held is None else {"zero_point": held}


def _signed(weight: Weight) -> Tensor:
    return (weight.numbers.short() - 128).to(torch.int8)


def packed_of(weight: Weight) -> Packed:
    """As GAC's few-bit kernels read it."""
    storage = weight.storage
    assert isinstance(storage, PackedIntegers)
    return Packed.of(weight.held, storage.bits, storage.group, weight.columns)


def tensors_of(packed: Packed) -> tuple[Tensor, ...]:
    return tuple(one for one in (packed.words, packed.scale, packed.zeros) if one is not None)


def with_tensors(packed: Packed, tensors: Sequence[Tensor]) -> Packed:
    """The same in other tensors."""
    words, scale, *zeros = tensors
    return replace(packed, words=words, scale=scale, zeros=zeros[0] if zeros else None)


def unpacked(weight: Weight, rows: int) -> Made:
    """One Triton kernel writes the weight in 16 bits, then ``F.linear``."""
    packed = packed_of(weight)

    def run(inputs: Inputs, own: Sequence[Tensor]) -> Tensor:
        return functional.linear(inputs[0], low_bit.dequantised(with_tensors(packed, own), DTYPE))

    return Made(tensors_of(packed), run)


def reading(weight: Weight, rows: int) -> Made:
    """What no kernel can be faster than."""
    from tests.benchmarks.kernels.reading import read

    return Made((weight.held["weight_packed"],), lambda inputs, own: read(inputs[0], own[0]))


def takes_few(k: int, group: int) -> bool:
    """Whether GAC's few-bit kernels take the columns."""
    return not k % 32 and (group >= k or (group >= 64 and not group & group - 1))


def _tinygemm(m: int, k: int, n: int, group: int) -> bool:
    return m <= 64 and group in (32, 64, 128, 256) and not k % group and not k % 32 and not n % 8


def _candidates() -> list[Candidate]:
    eight = tuple(EIGHT_BITS)
    found = [
        Candidate("F.linear", "torch", ("bf16",), linear),
        Candidate("words read, no more", "gac", FEW_BITS, reading, lambda m, k, n, group: m == 1, whole=False),
        Candidate("as models run", "gac", (*FEW_BITS, *eight), partial(of_models, plain=False)),
        Candidate("unpacked in PyTorch", "torch", (*FEW_BITS, *eight), partial(of_models, plain=True)),
        Candidate("_weight_int8pack_mm", "torch", ("w8a16",), int8pack),
        Candidate("_weight_int4pack_mm", "torch", ("w4a16",), tinygemm, _tinygemm),
        Candidate("_int_mm, rounded in PyTorch", "torch", ("w8a8",), int_mm),
        Candidate(
            "GemLite", "gemlite", ("w8a16", "w4a16", "w2a16", *eight), gemlite,
            lambda m, k, n, group: not k % group and not k % 32,
        ),
        Candidate("Humming", "humming", (*FEW_BITS, *eight), humming, lambda m, k, n, group: not k % group),
        Candidate(
            "unpacked in Triton", "gac", FEW_BITS, unpacked, lambda m, k, n, group: m >= 64 and takes_few(k, group),
        ),
    ]  # fmt: skip
    for fast in (False, True):
        label = "_scaled_mm" + ", fast sums" * fast
        made = partial(scaled_mm, fast=fast, given=False)
        given = partial(scaled_mm, rounding=plainly, given=True, fast=fast)
        found += [
            Candidate(f"{label}, inputs given", "torch", ("fp8",), given, whole=False),
            Candidate(f"{label}, rounded in Triton", "gac", ("fp8",), partial(made, rounding=in_triton)),
        ]
    plain = partial(scaled_mm, rounding=plainly, given=False, fast=False)
    found.append(Candidate("_scaled_mm, rounded in PyTorch", "torch", ("fp8",), plain))
    return found


CANDIDATES: dict[str, Candidate] = {one.name: one for one in _candidates()}
"""By name."""


def error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, over the root of the mean square of what is expected."""
    return float((found.float() - expected).abs().max() / expected.square().mean().sqrt())
