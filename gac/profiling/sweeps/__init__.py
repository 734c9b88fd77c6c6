"""Sweeps: the points to time, and their order, into a file that survives an interrupt."""
