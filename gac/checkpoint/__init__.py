"""Save, load and export a compressed model."""
