"""Plan the tokens that each layer caches of a context, and evict the others with a press of kvpress."""
