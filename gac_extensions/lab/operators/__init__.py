"""Operators that describe a GPU, and that no plan looks up; ``gac.profiling.operators`` asks for them by name."""
