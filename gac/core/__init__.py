"""Base layer: files, errors, registries, progress, arrays, distributed runs."""
