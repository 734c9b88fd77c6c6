#!/bin/sh
# Measures profiles/nvidia-h100-80gb-hbm3.jsonl: run it from the checkout on a machine with that GPU. A second run goes on
# where the first stopped. The shipped file was stopped after 487 s, with one pass over all 12,873 shapes and a second
# over 1,930 of them, which says how well passes agree (gac.profiling.sweep.summary).
set -eu
exec python3 -c '
from gac.profiling.sweep import profile_gpu
profile_gpu(["smollm2", "llama-3-8b"], rows=(1, 1024, 4096), dtype="bf16", path="profiles/nvidia-h100-80gb-hbm3.jsonl")
'
