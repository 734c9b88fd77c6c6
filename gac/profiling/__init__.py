"""Measure the GPU: what a shape costs."""
