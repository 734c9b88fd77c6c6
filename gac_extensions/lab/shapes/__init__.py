"""Plans for models of known shapes, timed with random weights: ``gac bench --shapes``."""
