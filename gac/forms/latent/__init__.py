"""Keys and values that the cache keeps as latents of groups of heads."""
