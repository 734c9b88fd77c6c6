"""Check: perplexity, divergence, tasks and latency of a model."""
