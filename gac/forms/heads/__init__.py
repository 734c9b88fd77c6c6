"""Attention with fewer heads."""
