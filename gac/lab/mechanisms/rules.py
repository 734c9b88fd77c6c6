"""The rules behind the cliffs: their demand on a dim, the GPUs that make it, the cost of breaking it, and the source.

The contiguous dimension of a matrix counts: for a GEMM k (the rows of both operands) and n (the rows of the result),
never the number of rows m; a low-rank pair's r is n of its first GEMM and k of its second; attention's head_dim is k
of its first GEMM and n of its second. ``rules.toml`` states the rules; the checks below test them.

Memory is read in sectors of 32 bytes, and a thread loads at most 16 bytes at once (CUDA C++ Best Practices Guide,
"Coalesced Access to Global Memory"; CUDA C++ Programming Guide, "Device Memory Accesses").
"""

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from gac.profiling.kernel_names import Kernel, describe
from gac.profiling.operators import OPERATORS
from gac.profiling.operators.attention import FLASH_TEMPLATES, Sdpa
from gac.profiling.operators.base import ITEM_BYTES, Operator, numbers_of
from gac.profiling.operators.latent import LatentAttention
from gac.profiling.records import Launch
from gac.runtime.limits import ALIGNED, latents
from gac.schemes import Scheme, scheme_timed_as

SECTOR = 32
VECTOR = 16
CACHE_LINE = 128


def parse_capability(compute_capability: str) -> tuple[int, int]:
    major, _, minor = compute_capability.partition(".")
    return int(major), int(minor)


@dataclass(frozen=True)
class Setting:
    """All that a rule needs to know besides the dim.

    Attributes:
        compute_capability: ``"9.0"``; None where no GPU is named.
        shared_bytes: shared memory that a CTA may have; None where not known.
        launches: recorded at the dim, in order; empty where nothing was.
        fixed: sizes of the other axes; empty where they are not known.
    """

    operator: str
    axis: str
    dtype: str
    compute_capability: str | None = None
    shared_bytes: int | None = None
    launches: tuple[Launch, ...] = ()
    fixed: tuple[tuple[str, int], ...] = ()

    @property
    def description(self) -> Operator:
        return OPERATORS.get(self.operator)

    def sizes(self, dim: int) -> dict[str, int]:
        return dict(self.fixed) | {self.axis: dim}

    @property
    def sides(self) -> str:
        """``k``, ``n`` or both, by the side of a GEMM that the axis is; empty where it only counts rows.

        Bucketed and padded heads have none, since they are rounded up to multiples of 8 before they run.
        """
        return self.description.gemm_sides.get(self.axis, "")

    @property
    def backend(self) -> str | None:
        """Backend of attention; None of other operators."""
        return self.description.backend if isinstance(self.description, Sdpa) else None

    @property
    def element_bytes(self) -> int:
        """Bytes of an element that kernels read: activations where weights are quantised, fp32 in math attention."""
        return ITEM_BYTES["fp32" if self.backend == "math" else numbers_of(self.dtype)]

    @property
    def scheme(self) -> Scheme | None:
        """Scheme whose storage holds the weights and has kernels of its own; None where there is none."""
        return None if self.dtype in ITEM_BYTES else scheme_timed_as(self.dtype)

    def row_bytes(self, dim: int) -> int:
        return dim * self.element_bytes


def row_alignment(row_bytes: int, largest: int = CACHE_LINE) -> int:
    """Return the largest power of two, up to ``largest`` bytes, at whose multiples every row of a matrix starts."""
    return min(row_bytes & -row_bytes, largest)


AppliesTo = Callable[[Setting], bool]
Judgement = tuple[bool | None, str]
"""True where a dim keeps a rule, None where the dim alone does not tell and the recorded kernels could; and why."""


class Check(NamedTuple):
    applies_to: AppliesTo
    judge: Callable[[int, Setting], Judgement]


@dataclass(frozen=True)
class Source:
    author: str
    title: str
    section: str
    url: str


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        level: the layer that imposes it.
        constraint: its demand, in words.
        since, before: compute capabilities: the first that imposes it, and the first that no longer does.
        published: cost of breaking it, measured by others: in words, with the GPU and the source.
    """

    name: str
    level: Literal["framework", "library", "hardware", "memory"]
    constraint: str
    since: str
    sources: tuple[Source, ...]
    published: str
    check: Check
    before: str | None = None

    def holds_on(self, compute_capability: str) -> bool:
        """Return True if GPUs of this compute capability impose the rule."""
        capability = parse_capability(compute_capability)
        ended = self.before is not None and capability >= parse_capability(self.before)
        return parse_capability(self.since) <= capability and not ended


def rules_for(setting: Setting) -> tuple[Rule, ...]:
    """List the rules that apply to an operator's axis in a dtype, on its GPU where one is named."""
    capability = setting.compute_capability
    applying = (rule for rule in RULES if rule.check.applies_to(setting))
    return tuple(rule for rule in applying if capability is None or rule.holds_on(capability))


# --- axes ---


def _is_head_dim(*backends: str) -> AppliesTo:
    return lambda setting: setting.axis == "d" and setting.backend in backends


def _is_row(setting: Setting) -> bool:
    return bool(setting.sides)


def _is_cublas(setting: Setting) -> bool:
    return setting.description.cublas and setting.scheme is None


def _is_cublas_row(setting: Setting) -> bool:
    return _is_cublas(setting) and _is_row(setting)


def _is_tensor_core_row(setting: Setting) -> bool:
    return _is_row(setting) and setting.backend != "math"


def _is_tma_row(setting: Setting) -> bool:
    """Rows that a Hopper kernel would read by TMA: in cuBLAS's GEMMs, and in attention by cuDNN."""
    return (_is_cublas_row(setting) and _is_tensor_core_row(setting)) or _is_head_dim("auto", "cudnn")(setting)


def _is_latent(setting: Setting) -> bool:
    """Ranks of latents, and the head_dim that is rebuilt from them."""
    return isinstance(setting.description, LatentAttention) and setting.axis in ("k", "v", "d")


# --- rows and tiles ---


def _aligned_rows(applies_to: AppliesTo, divisor: int = VECTOR) -> Check:
    """Rows whose bytes are a multiple of the divisor."""

    def judge(dim: int, setting: Setting) -> Judgement:
        size = setting.row_bytes(dim)
        detail = f"rows of {size} bytes, which start at multiples of {row_alignment(size)} bytes"
        return size % divisor == 0, detail

    return Check(applies_to, judge)


def _multiples(applies_to: AppliesTo, step: int) -> Check:
    return Check(applies_to, lambda dim, _: (dim % step == 0, f"{dim} % {step} = {dim % step}"))


def _recorded(applies_to: AppliesTo, detail: str) -> Check:
    return Check(applies_to, lambda *_: (None, detail))


def _whole_instructions(dim: int, setting: Setting) -> Judgement:
    """An instruction takes 32 bytes of k (16 elements of 2 bytes, 32 of FP8) and 8 columns of n."""
    steps = {side: step for side, step in (("k", 32 // setting.element_bytes), ("n", 8)) if side in setting.sides}
    detail = " and ".join(f"{dim} % {step} = {dim % step} along {side}" for side, step in steps.items())
    return all(dim % step == 0 for step in steps.values()), detail


# --- attention ---


def _latent_kernel(dim: int, setting: Setting) -> Judgement:
    problem = latents(*(dim if setting.axis == axis else ALIGNED for axis in ("d", "k", "v")))
    if problem is None:
        return True, f"{dim} = {ALIGNED} x {dim // ALIGNED}: read 16 bytes at a time"
    return False, f"{problem}: PyTorch rebuilds the keys and values of all tokens in every step"


RETIRED = (160, 224)  # templates that newer FlashAttention-2 releases no longer have; the next larger one serves
TOLERATED_PADDING = 0.15  # fraction of a template that may be padding: from here on the published study calls it waste

_BACKENDS = {"cudnn attention": "cuDNN", "mem-efficient": "the memory-efficient kernel"}


class Flash(NamedTuple):
    """FlashAttention-2 at a head_dim: its template, and the recorded kernel, if any."""

    template: int
    kernel: Kernel | None
    launch: Launch | None


def template_for(head_dim: int) -> int | None:
    """Return the smallest template that holds the head_dim; None where it is larger than every template."""
    return min((template for template in FLASH_TEMPLATES if template >= head_dim), default=None)


def _flash_check(judge: Callable[[int, Flash, Setting], Judgement]) -> Check:
    """Judge dims that FlashAttention-2 serves, as far as the record tells."""

    def judge_served(dim: int, setting: Setting) -> Judgement:
        kernels = [describe(launch.name) for launch in setting.launches]
        pairs = zip(kernels, setting.launches, strict=True)
        kernel, launch = next((pair for pair in pairs if pair[0].role == "attention"), (None, None))
        if kernel is None and any(other.main for other in kernels):
            return None, "the math backend served it"
        if kernel is not None and kernel.family in _BACKENDS:
            return None, f"{_BACKENDS[kernel.family]} served it"
        if kernel is None or kernel.family != "flash":
            kernel = launch = None
        template = template_for(dim) if kernel is None else kernel.template_d
        if template is None:
            return False, f"{dim} is larger than the largest template, {FLASH_TEMPLATES[-1]}"
        return judge(dim, Flash(template, kernel, launch), setting)

    return Check(_is_head_dim("auto", "flash"), judge_served)


def _template(dim: int, flash: Flash, _setting: Setting) -> Judgement:
    if dim in RETIRED and flash.kernel is None:
        larger = template_for(dim + 1)
        detail = f"older releases have a template for {dim}, newer ones serve it with {larger}; the kernel's name tells"
        return None, detail
    even = None if flash.kernel is None else flash.kernel.even_k
    bounds = "" if even is None else f"; it ran with is_even_K {str(even).lower()}"
    waste = f"{1 - dim / flash.template:.1%} of its work is padding"
    return dim == flash.template, f"the template for {flash.template} serves {dim}: {waste}{bounds}"


def _little_padding(dim: int, flash: Flash, setting: Setting) -> Judgement:
    return 1 - dim / flash.template < TOLERATED_PADDING, _template(dim, flash, setting)[1]


def _tile(_dim: int, flash: Flash, setting: Setting) -> Judgement:
    """FlashAttention-2's source picks tiles of every template that fit every GPU from 8.0 on."""
    if flash.kernel is None or flash.kernel.tile is None or flash.launch is None:
        return True, "FlashAttention-2 picks a tile that fits; a recorded kernel tells which"
    rows, columns = flash.kernel.tile
    limit = "" if setting.shared_bytes is None else f" of {setting.shared_bytes // 1024}"
    return True, f"{rows}x{columns} tile (recorded): Q, K and V take {flash.launch.shared_bytes // 1024}{limit} KiB"


# --- a scheme's own rules ---

_ANY_SIZE = 4096  # stands for a size that is not known: every scheme has an operator at it (``gac.testing.schemes``)


def _has_needs(setting: Setting) -> bool:
    return _is_row(setting) and setting.scheme is not None and setting.scheme.shape_requirement is not None


def _has_kernel_limits(setting: Setting) -> bool:
    storage = None if setting.scheme is None else setting.scheme.storage
    return storage is not None and storage.limit is not None and any(_matrices(1, setting))


def _has_groups(setting: Setting) -> bool:
    return setting.scheme is not None and setting.scheme.group is not None and any(_matrices(1, setting))


def _scheme_operator(dim: int, setting: Setting) -> Judgement:
    assert setting.scheme is not None
    operator, sizes = setting.description, setting.sizes(dim)
    refusal = operator.refusal(dict.fromkeys(operator.axes, _ANY_SIZE) | sizes, setting.dtype)
    text = ", ".join(f"{axis} = {size}" for axis, size in sizes.items() if axis != "m")
    return refusal is None, f"scheme {setting.scheme.name} needs {setting.scheme.shape_requirement}: {text}"


def _scheme_kernel(dim: int, setting: Setting) -> Judgement:
    reason = unreadable(dim, setting)
    return reason is None, reason or _columns_text(dim, setting)


def unreadable(dim: int, setting: Setting) -> str | None:
    """Say why the kernels cannot read one of the matrices, and what runs instead; None where they read all known."""
    if (scheme := setting.scheme) is None:
        return None
    reasons = (scheme.kernel_unsupported_reason(*matrix) for matrix in _matrices(dim, setting))
    reason = next(filter(None, reasons), None)
    return None if reason is None else f"{reason}: plain PyTorch unpacks it for every product"


def _scheme_groups(dim: int, setting: Setting) -> Judgement:
    assert setting.scheme is not None
    remainders = [setting.scheme.ragged(columns) for _, columns in _matrices(dim, setting)]
    last = "; ".join(f"the last has {count}" for count in remainders if count)
    detail = f"{_columns_text(dim, setting)} in groups of {setting.scheme.group}{f': {last}' if last else ''}"
    return not any(remainders), detail


def _columns_text(dim: int, setting: Setting) -> str:
    return f"{' and '.join(str(columns) for _, columns in _matrices(dim, setting))} columns"


def _matrices(dim: int, setting: Setting) -> Iterator[tuple[int, int]]:
    """Yield rows and columns of each weight whose columns are known; none where the axis only counts rows."""
    if not setting.sides:
        return
    operator, known = setting.description, setting.sizes(dim)
    gemms = operator.gemms(dict.fromkeys(operator.axes, _ANY_SIZE) | known)
    for names, gemm in zip(operator.products, gemms, strict=True):
        if names.split()[-2] in known:  # as ``linear`` and ``batched_gemm`` have them: ..., columns, rows
            yield gemm.axes["n"], gemm.axes["k"]


_any_backend = _is_head_dim("auto", "flash", "efficient", "cudnn")

CHECKS: Mapping[str, Check] = {
    "SDPA backend selection": _multiples(_any_backend, 8),
    "FlashAttention-2 template": _flash_check(_template),
    "FlashAttention-2 padding waste": _flash_check(_little_padding),
    "shared-memory tile budget": _flash_check(_tile),
    "scheme operator": Check(_has_needs, _scheme_operator),
    "scheme kernel": Check(_has_kernel_limits, _scheme_kernel),
    "scheme groups": Check(_has_groups, _scheme_groups),
    "latent kernel": Check(_is_latent, _latent_kernel),
    "cuBLAS alignment tier": _aligned_rows(_is_cublas_row),
    "cuBLAS heuristic": _recorded(_is_cublas, "only the recorded kernels tell which one is chosen"),
    "vectorised access": _aligned_rows(_is_row),
    "Tensor Core tile": Check(_is_tensor_core_row, _whole_instructions),
    "L2 sector": _aligned_rows(_is_row, SECTOR),
    "CTA wave quantisation": _recorded(
        lambda setting: setting.operator != "copy",
        "the number of tiles follows from the kernel's tile, which only a record tells",
    ),
    "cp.async": _aligned_rows(_is_row),
    "TMA alignment": _aligned_rows(_is_tma_row),
    "WGMMA tile": _multiples(lambda setting: _is_tma_row(setting) and "n" in setting.sides, 8),
    "FP8 packing": _multiples(lambda setting: setting.dtype == "fp8" and _is_row(setting), 16),
    "shared-memory banks": _recorded(
        _any_backend, "the libraries swizzle their tiles, so kernels should have no conflicts"
    ),
}
"""The check of each rule in ``rules.toml``, by its name."""


def _read() -> tuple[Rule, ...]:
    document = tomllib.loads(Path(__file__).with_name("rules.toml").read_text(encoding="utf-8"))
    sources = {name: Source(**source) for name, source in document["sources"].items()}
    rules = []
    for rule in document["rules"]:
        cited = tuple(sources[name] for name in rule["sources"])
        published = "{cost} ({setting}; {source})".format_map(rule["published"])
        rules.append(Rule(**rule | {"sources": cited, "published": published, "check": CHECKS[rule["name"]]}))
    return tuple(rules)


RULES = _read()
"""Every rule, from the framework down to memory."""
