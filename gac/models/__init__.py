"""The linear weights of a model, by family."""
