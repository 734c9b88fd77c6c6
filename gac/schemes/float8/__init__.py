"""8-bit floating point on both sides."""
