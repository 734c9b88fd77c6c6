"""Time models in an inference engine: one process a model, measured in turns."""
