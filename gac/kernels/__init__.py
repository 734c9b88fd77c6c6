"""Kernels of our own, in Triton: imported only where they run."""
