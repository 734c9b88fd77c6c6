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

from gac.profiling.operators import OPERATORS
from gac.profiling.operators.attention import Sdpa
from gac.profiling.operators.base import ITEM_BYTES, Operator, numbers_of
from gac.profiling.operators.latent import LatentAttention
from gac.profiling.records import Launch
from gac.runtime.limits import ALIGNED, latents
from gac.schemes import Scheme, scheme_timed_as
from gac_extensions.lab.kernel_names import Kernel, describe
from gac_extensions.lab.operators.attention import FLASH_TEMPLATES

SECTOR = 32
VECTOR = 16
CACHE_LINE = 128


def parse_capability(compute_capability: str) -> tuple[int, int]:
    major, _, minor = compute_capability.partition(".")
    return int(major), int(minor)


@dataclass(frozen=True)
class Setting:
    """All that a rule needs to know besides the dim, as far as it is known.

    ``shared_bytes`` is what a CTA may have, ``launches`` were recorded at the dim, and ``fixed`` has the sizes of the
    other axes.
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


Judgement = tuple[bool | None, str]
"""True where a dim keeps a rule, None where the dim alone does not tell and the recorded kernels could; and why."""

Judge = Callable[[int, Setting], Judgement]


class Check(NamedTuple):
    """The kind of axis that a rule binds, one of ``_kinds``, and whether a dim keeps the rule."""

    kind: str
    judge: Judge


@dataclass(frozen=True)
class Source:
    author: str
    title: str
    section: str
    url: str


@dataclass(frozen=True)
class Rule:
    """A demand on dims, in words, of a layer.

    Attributes:
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
        capability = parse_capability(compute_capability)
        ended = self.before is not None and capability >= parse_capability(self.before)
        return parse_capability(self.since) <= capability and not ended


def rules_for(setting: Setting) -> tuple[Rule, ...]:
    """List the rules that apply to an operator's axis in a dtype, on its GPU where one is named."""
    capability, kinds = setting.compute_capability, _kinds(setting)
    applying = (rule for rule in RULES if rule.check.kind in kinds)
    return tuple(rule for rule in applying if capability is None or rule.holds_on(capability))


def _kinds(setting: Setting) -> set[str]:
    row, scheme, backend = bool(setting.sides), setting.scheme, setting.backend
    head_dim = backend if setting.axis == "d" else None
    cublas = setting.description.cublas and scheme is None
    tensor_core = row and backend != "math"
    # what a Hopper kernel would read by TMA: rows in cuBLAS's GEMMs, and in attention by cuDNN
    tma = (cublas and tensor_core) or head_dim in ("auto", "cudnn")
    limited = scheme is not None and scheme.storage is not None and scheme.storage.limit is not None
    kinds = {
        "any": setting.operator != "copy",
        "row": row,
        "cuBLAS": cublas,
        "cuBLAS row": cublas and row,
        "Tensor Core row": tensor_core,
        "TMA row": tma,
        "TMA n": tma and "n" in setting.sides,
        "FP8 row": row and setting.dtype == "fp8",
        "fused head_dim": head_dim in ("auto", "flash", "efficient", "cudnn"),
        "flash head_dim": head_dim in ("auto", "flash"),
        # ranks of latents, and the head_dim that is rebuilt from them
        "latent": isinstance(setting.description, LatentAttention) and setting.axis in ("k", "v", "d"),
        "row of a scheme with needs": row and scheme is not None and scheme.shape_requirement is not None,
        "columns of limited kernels": limited and any(_matrices(1, setting)),
        "columns in groups": scheme is not None and scheme.group is not None and any(_matrices(1, setting)),
    }
    return {kind for kind, applies in kinds.items() if applies}


# --- rows and tiles ---


def _aligned(divisor: int) -> Judge:

    def judge(dim: int, setting: Setting) -> Judgement:
        size = setting.row_bytes(dim)
        detail = f"rows of {size} bytes, which start at multiples of {row_alignment(size)} bytes"
        return size % divisor == 0, detail

    return judge


def _multiple(step: int) -> Judge:
    return lambda dim, _: (dim % step == 0, f"{dim} % {step} = {dim % step}")


def _recorded(detail: str) -> Judge:
    return lambda *_: (None, detail)


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


def _flash(judge: Callable[[int, Flash, Setting], Judgement]) -> Judge:
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

    return judge_served


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


CHECKS: Mapping[str, Check] = {
    "SDPA backend selection": Check("fused head_dim", _multiple(8)),
    "FlashAttention-2 template": Check("flash head_dim", _flash(_template)),
    "FlashAttention-2 padding waste": Check("flash head_dim", _flash(_little_padding)),
    "shared-memory tile budget": Check("flash head_dim", _flash(_tile)),
    "scheme operator": Check("row of a scheme with needs", _scheme_operator),
    "scheme kernel": Check("columns of limited kernels", _scheme_kernel),
    "scheme groups": Check("columns in groups", _scheme_groups),
    "latent kernel": Check("latent", _latent_kernel),
    "cuBLAS alignment tier": Check("cuBLAS row", _aligned(VECTOR)),
    "cuBLAS heuristic": Check("cuBLAS", _recorded("only the recorded kernels tell which one is chosen")),
    "vectorised access": Check("row", _aligned(VECTOR)),
    "Tensor Core tile": Check("Tensor Core row", _whole_instructions),
    "L2 sector": Check("row", _aligned(SECTOR)),
    "CTA wave quantisation": Check(
        "any", _recorded("the number of tiles follows from the kernel's tile, which only a record tells")
    ),
    "cp.async": Check("row", _aligned(VECTOR)),
    "TMA alignment": Check("TMA row", _aligned(VECTOR)),
    "WGMMA tile": Check("TMA n", _multiple(8)),
    "FP8 packing": Check("FP8 row", _multiple(16)),
    "shared-memory banks": Check(
        "fused head_dim", _recorded("the libraries swizzle their tiles, so kernels should have no conflicts")
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
