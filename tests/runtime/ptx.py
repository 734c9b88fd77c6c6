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
from gac.runtime.kernels.low_bit.few_rows import few_rows_kernel
from gac.runtime.kernels.low_bit.tiles import gemm_kernel

LOAD = re.compile(r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], (\w+)|ld\.global\S*?(?:\.v(\d))?\.[bfus](\d+) ")
POINTERS = {
    "partial_ptr": "*fp32", "counters_ptr": "*i32", "x_sums_ptr": "*fp32", "words_ptr": "*i32", "zeros_ptr": "*i32",
    "scale_ptr": "*fp16",
}  # fmt: skip
TILE = {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "NUM_STAGES": 4, "EARLY": True}


def loads(kernel: Any, aligned: Collection[str], words: Collection[str] = (), **constants: Any) -> dict[int, int]:
    """Return how many loads of a kernel of bfloat16 take so many bytes; those of sums beside the loop come last.

    Inputs that are named as words are read as int32.
    """
    names, pointers = kernel.arg_names, POINTERS | dict.fromkeys(words, "*i32")
    types = {
        name: "constexpr" if name in constants else pointers.get(name, "*bf16" if name.endswith("_ptr") else "i32")
        for name in names
    }
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name in names}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    found = LOAD.findall(compiled.asm["ptx"])
    sizes = (int(copied, 16) if copied else int(count or 1) * int(bits) // 8 for copied, count, bits in found)
    return Counter(sizes)


def main() -> None:
    operands = ["x_ptr", "weight_ptr", "out_ptr", "x_stride", "out_stride"]
    shared = {"bias_ptr": None, "SPLIT_K": 4}
    of_words = ["x_ptr", "words_ptr", "scale_ptr", "zeros_ptr", "out_ptr", "partial_ptr", "x_sums_ptr", "n", "n_cols"]
    groups = {"GROUP": 128, "OWN_ZERO": True, "EVEN_K": True, "EARLY": True}
    warps = {"BITS": 3, "SHARED": False, "EIGHTS": 1, "TILES": 1, "WARPS": 4, "COMPILED": True}
    tiles = {
        "BITS": 4,
        "DEEP": 4,
        "BLOCK_M": 16,
        "BLOCK_N": 64,
        "BLOCK_K": 256,
        "CHUNK": 128,
        "ACROSS": 4,
        "SPLIT_K": 4,
        "NUM_STAGES": 4,
    }
    print(
        json.dumps(
            {
                "factors": loads(some_factors_kernel, operands, **TILE),
                "rows": loads(some_rows_kernel, [*operands, "n_cols", "partial_ptr"], **TILE, **shared),
                "words, few rows": loads(few_rows_kernel, of_words, ["x_ptr"], **groups, **warps),
                "words, tiles": loads(gemm_kernel, of_words, **groups, **tiles),
            }
        )
    )


if __name__ == "__main__":
    main()
