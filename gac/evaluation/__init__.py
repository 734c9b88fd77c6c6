"""Check: perplexity and latency of a model."""
