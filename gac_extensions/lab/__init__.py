"""Studies of the published experiments, why a dim is slow, and plans of known shapes, timed."""
