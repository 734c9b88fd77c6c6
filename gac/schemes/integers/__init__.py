"""Low-bit integer weights with a scale for each group of neighbouring columns."""
