"""16-bit weights, as they were loaded."""
