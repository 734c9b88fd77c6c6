"""Whole numbers of few bits, with a scale for each group of neighbouring columns."""
