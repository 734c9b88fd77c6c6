"""Where the rules are documented."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """Where a statement can be read: author, title, section (or function) and address."""

    author: str
    title: str
    section: str
    url: str


SDP_UTILS = Source(
    "PyTorch",
    "aten/src/ATen/native/transformers/cuda/sdp_utils.cpp",
    "check_head_dim_size_flash, check_head_dim_size_mem_efficient, check_cudnn_tensor_shapes",
    "https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp",
)

SDPA_PADDING = Source(
    "PyTorch",
    "aten/src/ATen/native/transformers/attention.cpp",
    "scaled_dot_product_attention: pad_last_dim<8> before the flash backend",
    "https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/transformers/attention.cpp",
)

FLASH_SWITCH = Source(
    "Dao-AILab",
    "flash-attention, csrc/flash_attn/src/static_switch.h",
    "HEADDIM_SWITCH",
    "https://github.com/Dao-AILab/flash-attention/blob/main/csrc/flash_attn/src/static_switch.h",
)

FLASH_LAUNCH = Source(
    "Dao-AILab",
    "flash-attention, csrc/flash_attn/src/flash_fwd_launch_template.h",
    "run_flash_fwd (is_even_K), run_mha_fwd_hdim32 to run_mha_fwd_hdim256",
    "https://github.com/Dao-AILab/flash-attention/blob/main/csrc/flash_attn/src/flash_fwd_launch_template.h",
)

FLASH_PAPER = Source(
    "Tri Dao",
    "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning",
    "section 3.3, tuning block sizes",
    "https://arxiv.org/abs/2307.08691",
)

CUBLAS = Source(
    "NVIDIA", "cuBLAS", "Tensor Core Usage", "https://docs.nvidia.com/cuda/cublas/index.html#tensor-core-usage"
)

CUBLAS_HEURISTIC = Source(
    "NVIDIA",
    "cuBLAS",
    "cublasLtMatmulAlgoGetHeuristic",
    "https://docs.nvidia.com/cuda/cublas/index.html#cublasltmatmulalgogetheuristic",
)

MATMUL_GUIDE = Source(
    "NVIDIA",
    "Matrix Multiplication Background User's Guide",
    "Requirements to Use Tensor Cores; Dimension Quantization Effects (tile and wave quantization)",
    "https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html",
)

BEST_PRACTICES = Source(
    "NVIDIA",
    "CUDA C++ Best Practices Guide",
    "Coalesced Access to Global Memory",
    "https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/index.html#coalesced-access-to-global-memory",
)

DEVICE_MEMORY = Source(
    "NVIDIA",
    "CUDA C++ Programming Guide",
    "Device Memory Accesses: Size and Alignment Requirement",
    "https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#device-memory-accesses",
)

SHARED_MEMORY = Source(
    "NVIDIA",
    "CUDA C++ Best Practices Guide",
    "Shared Memory and Memory Banks",
    "https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/index.html#shared-memory-and-memory-banks",
)

SPECIFICATIONS = Source(
    "NVIDIA",
    "CUDA C++ Programming Guide",
    "Technical Specifications per Compute Capability",
    "https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#features-and-technical-specifications",
)

MMA = Source(
    "NVIDIA",
    "Parallel Thread Execution ISA",
    "Warp Level Matrix Multiply-Accumulate Instructions: mma",
    "https://docs.nvidia.com/cuda/parallel-thread-execution/index.html#warp-level-matrix-instructions-mma",
)

CP_ASYNC = Source(
    "NVIDIA",
    "Parallel Thread Execution ISA",
    "Data Movement and Conversion Instructions: cp.async",
    "https://docs.nvidia.com/cuda/parallel-thread-execution/index.html#data-movement-and-conversion-instructions-cp-async",
)

TMA = Source(
    "NVIDIA",
    "CUDA Driver API",
    "Tensor Map Object Management: cuTensorMapEncodeTiled, globalStrides",
    "https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TENSOR__MEMORY.html",
)

WGMMA = Source(
    "NVIDIA",
    "Parallel Thread Execution ISA",
    "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions: wgmma.mma_async",
    "https://docs.nvidia.com/cuda/parallel-thread-execution/index.html#asynchronous-warpgroup-level-matrix-instructions",
)

SCALED_MM = Source(
    "PyTorch",
    "aten/src/ATen/native/cuda/Blas.cpp (later ScaledBlas.cpp)",
    "_scaled_mm: sizes divisible by 16",
    "https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/Blas.cpp",
)
