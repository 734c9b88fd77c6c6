"""``python -m gac``: the command line."""

from gpu_aligned_compression import main

main()
