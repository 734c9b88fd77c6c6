"""A weight as it is."""
