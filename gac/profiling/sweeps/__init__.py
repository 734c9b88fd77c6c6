"""Which points to time, in which order, into a file that survives."""
