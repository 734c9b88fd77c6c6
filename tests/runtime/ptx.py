"""Compile kernels for an H200, without one: ``python -m tests.runtime.ptx`` prints their loads in JSON, by bytes."""

import json
import re
from collections import Counter
from collections.abc import Collection
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gac.runtime.kernels.few_rows import some_factors_kernel, some_rows_kernel

LOAD = re.compile(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], (\w+)|ld\.global\S*\.[bfus](\d+) ")
TILE = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "NUM_STAGES": 4, "EARLY": True}


def loads(kernel: Any, aligned: Collection[str], **constants: Any) -> dict[int, int]:
    """Return how many loads of a kernel of bfloat16 take so many bytes; those of sums beside the loop come last."""
    names, numbers = kernel.arg_names, {"partial_ptr": "*fp32", "counters_ptr": "*i32"}
    types = {
        name: "constexpr" if name in constants else numbers.get(name, "*bf16" if name.endswith("_ptr") else "i32")
        for name in names
    }
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    sizes = (int(copied, 16) if copied else int(bits) // 8 for copied, bits in LOAD.findall(compiled.asm["ptx"]))
    return Counter(sizes)


def main() -> None:
    operands = ["x_ptr", "weight_ptr", "out_ptr", "x_stride", "out_stride"]
    shared = {"bias_ptr": None, "SPLIT_K": 4}
    print(
        json.dumps(
            {
                "factors": loads(some_factors_kernel, operands, **TILE),
                "rows": loads(some_rows_kernel, [*operands, "n_cols", "partial_ptr"], **TILE, **shared),
            }
        )
    )


if __name__ == "__main__":
    main()
