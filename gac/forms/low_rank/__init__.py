"""A weight as two factors."""
