"""Latencies of shapes that a table lacks: a roofline, and Kriging of the rest."""
