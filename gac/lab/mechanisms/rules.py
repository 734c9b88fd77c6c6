"""The constraints behind the cliffs: what each asks of a dim, on which GPUs, what breaking it costs, who says so.

What matters is the contiguous dimension of a matrix: for a GEMM k (the rows of both operands) and n (the rows of the
result), never the number of rows m; a low-rank pair's r is n of its first GEMM and k of its second; attention's
head_dim is k of its first GEMM and n of its second.
"""

from gac.lab.mechanisms import checks, flash, sources
from gac.lab.mechanisms.rule import Level, Published, Rule, Setting
from gac.lab.mechanisms.sectors import SECTOR, VECTOR

__all__ = ["RULES", "Level", "Published", "Rule", "Setting", "rule_named", "rules_for"]

KERNEL_RULE = "cuBLAS heuristic"
"""The rule that a recorded kernel switch breaks."""

WAVE_RULE = "CTA wave quantisation"
"""A rule of which only a record tells."""

_STUDY = "the published A100 study behind GAC (arXiv 2604.09595)"


def rule_named(name: str) -> Rule | None:
    """The rule of this name or alias; None where there is none."""
    return next((rule for rule in RULES if name in (rule.name, *rule.aliases)), None)


def rules_for(setting: Setting) -> tuple[Rule, ...]:
    """The rules that concern an operator's axis in a dtype, on its GPU where one is named."""
    capability = setting.compute_capability
    return tuple(rule for rule in RULES if rule.concerns(setting) and (capability is None or rule.holds_on(capability)))


RULES: tuple[Rule, ...] = (
    Rule(
        "SDPA backend selection",
        "framework",
        "head_dim is a multiple of 8",
        checks.head_dim("", "flash", "efficient", "cudnn"),
        checks.multiple_of_8,
        checks.say_backend,
        "7.5",
        None,
        (sources.SDP_UTILS, sources.SDPA_PADDING),
        Published(
            "1.3x-2x (flash pads or another backend serves it); mem-efficient and cuDNN refuse it", "A100", _STUDY
        ),
    ),
    Rule(
        "FlashAttention-2 template",
        "framework",
        "head_dim is one of 32, 64, 96, 128, 160, 192, 224, 256: else the next larger template's tile serves it, with "
        "bounds checks (is_even_K is false)",
        checks.head_dim("", "flash"),
        flash.is_template,
        flash.say_template,
        "8.0",
        None,
        (sources.FLASH_SWITCH, sources.FLASH_LAUNCH),
        Published("the next template's tile: a step in latency; and bounds checks", "A100", _STUDY),
        ("FlashAttention-2 is_even_K",),
    ),
    Rule(
        "FlashAttention-2 padding waste",
        "framework",
        f"head_dim is less than {flash.TOLERATED_PADDING:.0%} below its template",
        checks.head_dim("", "flash"),
        flash.little_padding,
        flash.say_template,
        "8.0",
        None,
        (sources.FLASH_SWITCH,),
        Published("15-25 % of the work wasted", "A100", _STUDY),
    ),
    Rule(
        "cuBLAS alignment tier",
        "library",
        "k and n are multiples of 16 bytes: of 8 elements of two bytes, 16 of FP8, 4 of FP32",
        checks.gemm_rows,
        checks.aligned_rows(VECTOR),
        checks.say_tier,
        "7.0",
        None,
        (sources.CUBLAS, sources.MATMUL_GUIDE),
        Published("25-60 %", "A100", _STUDY),
        ("cuBLAS kernel tier",),
    ),
    Rule(
        KERNEL_RULE,
        "library",
        "the dim lies inside a range that the heuristic serves well",
        checks.gemm,
        checks.untold,
        checks.say_kernel,
        "7.0",
        None,
        (sources.CUBLAS_HEURISTIC,),
        Published("up to 30-60 % at a kernel switch (m from 1728 to 1729)", "A100", _STUDY),
    ),
    Rule(
        "vectorised access",
        "hardware",
        "rows are a multiple of 16 bytes long",
        checks.rows,
        checks.aligned_rows(VECTOR),
        checks.say_vector,
        "5.0",
        None,
        (sources.DEVICE_MEMORY,),
        Published("loads 4-8x narrower", "A100", _STUDY),
    ),
    Rule(
        "Tensor Core tile",
        "hardware",
        "k is a multiple of 32 bytes (16 elements of two bytes), n a multiple of 8",
        checks.tensor_core_rows,
        checks.whole_mma,
        checks.say_mma,
        "8.0",
        None,
        (sources.MMA, sources.MATMUL_GUIDE),
        Published("up to 58-70 %", "A100", _STUDY),
    ),
    Rule(
        "L2 sector",
        "hardware",
        "rows are a multiple of 32 bytes long",
        checks.rows,
        checks.aligned_rows(SECTOR),
        checks.say_sector,
        "6.0",
        None,
        (sources.BEST_PRACTICES,),
        Published("5.8 % wasted sectors measured, 16 % worst case; not a main cause", "A100", _STUDY),
    ),
    Rule(
        WAVE_RULE,
        "hardware",
        "the number of tiles is a multiple of the number of SMs, or just below one",
        checks.launched,
        checks.untold,
        checks.say_waves,
        "5.0",
        None,
        (sources.MATMUL_GUIDE,),
        Published("the last wave runs mostly empty", "A100", _STUDY),
    ),
    Rule(
        "cp.async",
        "hardware",
        "rows begin at multiples of 16 bytes, the widest copy and the only one past L1 (.cg); at 8 or 4 bytes copies "
        "are narrower, below 4 there are none",
        checks.rows,
        checks.aligned_rows(VECTOR),
        checks.say_async,
        "8.0",
        None,
        (sources.CP_ASYNC,),
        Published("falls back to scalar tails", "A100", _STUDY),
    ),
    Rule(
        "TMA alignment",
        "hardware",
        "the distance between rows is a multiple of 16 bytes",
        checks.tma_rows,
        checks.aligned_rows(VECTOR),
        checks.say_rows,
        "9.0",
        None,
        (sources.TMA,),
        Published("no bulk copies: a pre-Hopper kernel serves it", "Hopper, not measured there", _STUDY),
        ("TMA (Hopper)",),
    ),
    Rule(
        "WGMMA tile",
        "hardware",
        "n is a multiple of 8, the step of the instruction's N (m64nNk16); other n are padded to tiles, and what keeps "
        "a Hopper kernel from serving them is TMA",
        checks.wgmma_rows,
        checks.multiple_of_8,
        checks.say_wgmma,
        "9.0",
        "10.0",
        (sources.WGMMA,),
        Published("a pre-Hopper kernel serves it", "Hopper, not measured there", _STUDY),
        ("WGMMA (Hopper)",),
    ),
    Rule(
        "FP8 packing",
        "hardware",
        "k and n are multiples of 16",
        checks.fp8,
        checks.multiple_of_16,
        checks.say_fp8,
        "8.9",
        None,
        (sources.SCALED_MM, sources.CUBLAS),
        Published("scaled_mm refuses it", "Ada and newer", _STUDY),
    ),
    Rule(
        "shared-memory tile budget",
        "memory",
        "the Q, K and V tiles of its template fit the shared memory of a CTA; they and the registers for scores and "
        "output grow with head_dim, so that larger templates have smaller tiles",
        checks.head_dim("", "flash"),
        flash.fitting_tile,
        flash.say_budget,
        "8.0",
        None,
        (sources.SPECIFICATIONS, sources.FLASH_LAUNCH, sources.FLASH_PAPER),
        Published("smaller tiles as head_dim grows: a staircase", "A100", _STUDY),
        ("shared memory budget",),
    ),
    Rule(
        "shared-memory banks",
        "memory",
        "rows read together begin in different banks",
        checks.head_dim("", "flash", "efficient", "cudnn"),
        checks.untold,
        flash.say_banks,
        "5.0",
        None,
        (sources.SHARED_MEMORY,),
        Published("none: the libraries swizzle their tiles", "any", "no published figure"),
    ),
)
"""Every constraint, from the framework down to memory."""
