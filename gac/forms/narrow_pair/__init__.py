"""A weight of a narrower MLP as two factors."""
