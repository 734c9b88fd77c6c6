"""Whole numbers of 8 bits on both sides."""
