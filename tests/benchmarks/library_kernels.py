"""GAC's kernels beside those of well-kept libraries, on one GPU: microseconds in CUDA graphs, and their ratio.

    pip install liger-kernel gemlite
    python tests/benchmarks/library_kernels.py --output library-kernels.json

Shapes are Llama-3-8B's. A ratio above 1 means that the library is slower. Liger has RMSNorm, SwiGLU, RoPE and
KL; torch._scaled_mm and torch._int_mm multiply 8-bit numbers (quantising the input is timed in both). GemLite has
weights of 4 bits in groups of 128.
"""

import json
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import kl_div

from gac.healing import triton_kernels
from gac.runtime.kernels import int8_fp8, low_bit
from gac.runtime.kernels.elementwise import rows
from gac.runtime.kernels.low_bit.packed import Packed
from tests.benchmarks.harness import machine, options

HIDDEN, NEURONS, HEADS, KV_HEADS, SIZE, VOCABULARY = 4096, 14336, 32, 8, 128, 128256
ROWS = (1, 16, 64, 512, 8192)
Case = tuple[str, str, int, Callable[[], Any], Callable[[], Any]]


def bf16(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def elementwise(count: int) -> Iterator[Case]:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.rope import LigerRopeFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    x, weight, gate, up = bf16(count, HIDDEN), bf16(HIDDEN), bf16(count, NEURONS), bf16(count, NEURONS)
    yield (
        "RMSNorm", "Liger", count,
        lambda: rows.normed(x, weight, 1e-5, "llama"),
        lambda: LigerRMSNormFunction.apply(x, weight, 1e-5, 0.0, "llama", False),
    )  # fmt: skip
    yield ("SwiGLU", "Liger", count, lambda: rows.gated(gate, up, "silu"), lambda: LigerSiLUMulFunction.apply(gate, up))
    q, k = (bf16(1, count, heads, SIZE).transpose(1, 2) for heads in (HEADS, KV_HEADS))
    cos, sin = bf16(1, count, SIZE), bf16(1, count, SIZE)
    yield (
        "RoPE", "Liger", count,
        lambda: rows.rotated(q, k, cos, sin),
        lambda: LigerRopeFunction.apply(q, k, cos, sin),
    )  # fmt: skip


def eight_bits(count: int) -> Iterator[Case]:
    x = bf16(count, HIDDEN)
    wide = bf16(NEURONS, HIDDEN) / HIDDEN**0.5
    for number, most in ((torch.float8_e4m3fn, 448.0), (torch.int8, 127.0)):
        scale = (wide.abs().amax(1, keepdim=True) / most).to(torch.bfloat16)
        quotient = wide / scale
        weight = (quotient.round() if number == torch.int8 else quotient).clamp(-most, most).to(number)
        by_output = scale.float().t().contiguous()

        def quantised(x: Tensor = x, most: float = most, number: torch.dtype = number) -> tuple[Tensor, Tensor]:
            scales = x.float().abs().amax(1, keepdim=True) / most
            ratio = x.float() / scales
            return (ratio.round() if number == torch.int8 else ratio).to(number), scales

        compiled = torch.compile(quantised)

        def library(weight: Tensor = weight, by_output: Tensor = by_output, compiled: Any = compiled) -> Tensor:
            numbers, scales = compiled()
            if weight.dtype == torch.int8:
                product = torch._int_mm(numbers, weight.t())
                return (product * scales * by_output).to(torch.bfloat16)
            return torch._scaled_mm(numbers, weight.t(), scales, by_output, out_dtype=torch.bfloat16)

        if weight.dtype == torch.int8:
            if count <= 16:
                continue  # torch._int_mm takes more than 16 rows
            library = torch.compile(library)
        ours = lambda weight=weight, scale=scale: int8_fp8.eight_bits_linear(x, weight, scale)  # noqa: E731
        yield f"{str(number).removeprefix('torch.')} GEMM", "torch", count, ours, library


def four_bits(count: int) -> Iterator[Case]:
    from gemlite import DType, GemLiteLinear

    group = 128
    numbers = torch.randint(0, 16, (NEURONS, HIDDEN), device="cuda", dtype=torch.uint8)
    scale = bf16(NEURONS, HIDDEN // group).abs() / 1000
    theirs = GemLiteLinear(4, group, HIDDEN, NEURONS, input_dtype=DType.BF16, output_dtype=DType.BF16)
    theirs.pack(numbers, scale, torch.full_like(scale, 8), None)
    shifts = torch.arange(0, 32, 4, device="cuda")
    words = (numbers.view(NEURONS, -1, 8).to(torch.int64) << shifts).sum(-1)
    words = (words - (words >= 2**31) * 2**32).to(torch.int32)
    ours = Packed.of({"weight_packed": words, "weight_scale": scale}, 4, group, HIDDEN)
    x = bf16(count, HIDDEN)
    with torch.no_grad():
        difference = (low_bit.few_bits_linear(x, *ours.operands) - theirs(x)).float().norm() / theirs(x).float().norm()
    assert difference < 0.02, f"another product: {difference}"
    yield "4-bit GEMM", "GemLite", count, lambda: low_bit.few_bits_linear(x, *ours.operands), lambda: theirs(x)


def divergence(count: int) -> Iterator[Case]:
    from liger_kernel.ops.kl_div import LigerKLDivLossFunction

    student, teacher = (bf16(count, VOCABULARY) for _ in range(2))
    student.requires_grad_(True)
    kept, labels = torch.ones(count, device="cuda"), torch.zeros(count, device="cuda", dtype=torch.int64)
    by = torch.ones((), device="cuda")

    def ours() -> Tensor:
        _, logs = triton_kernels.kl_divergence(student.detach(), teacher)
        return triton_kernels.kl_gradient(student.detach(), teacher, logs, kept, labels, by)

    def liger() -> Tensor:
        loss = LigerKLDivLossFunction.apply(
            student.float().log_softmax(-1), teacher.float().log_softmax(-1), "sum", True
        )
        return torch.autograd.grad(loss, student)[0]

    @torch.compile
    def loss_of(student: Tensor, teacher: Tensor) -> Tensor:
        pair = student.float().log_softmax(-1), teacher.float().log_softmax(-1)
        return kl_div(*pair, reduction="sum", log_target=True)

    yield "KL, both passes", "Liger", count, ours, liger
    yield (
        "KL, both passes",
        "torch.compile",
        count,
        ours,
        lambda: torch.autograd.grad(loss_of(student, teacher), student),
    )


def microseconds(call: Callable[[], Any], graph: bool) -> float:
    if graph:
        return 1000 * float(triton.testing.do_bench_cudagraph(call, rep=50, return_mode="median"))
    return 1000 * float(triton.testing.do_bench(call, warmup=50, rep=200, return_mode="median"))


def main() -> None:
    output = options(__doc__, "--output").parse_args().output
    table: list[dict[str, Any]] = []
    cases = [(count, make, True) for count in ROWS for make in (elementwise, eight_bits, four_bits)]
    for count, make, graph in [*cases, (2048, divergence, False)]:
        for name, library, rows_, ours, theirs in make(count):
            pairs = [(microseconds(ours, graph), microseconds(theirs, graph)) for _ in range(3)]
            mine, other = (statistics.median(column) for column in zip(*pairs, strict=True))
            row = {"kernel": name, "library": library, "rows": rows_, "gac_us": mine, "library_us": other}
            table.append(row | {"ratio": other / mine})
            print(f"{name:22}{library:14}{rows_:6}{mine:10.1f}{other:10.1f}{other / mine:8.2f}", flush=True)
    output.write_text(json.dumps(machine() | {"triton": triton.__version__, "rows": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
