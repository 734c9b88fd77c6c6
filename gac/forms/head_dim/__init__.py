"""Attention with shorter value vectors."""
