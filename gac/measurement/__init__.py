"""Measure the model: what a choice loses."""
