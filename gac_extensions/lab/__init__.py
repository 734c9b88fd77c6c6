"""Studies of the published experiments, and why a dim is slow."""
