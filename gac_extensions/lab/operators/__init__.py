"""Operators that the studies time; ``gac.profiling.operators`` names them."""
