"""Without a GPU, tests run Triton kernels in Triton's interpreter. This is read before anything imports Triton."""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
