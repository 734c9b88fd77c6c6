"""Defaults of ``gac.allocate_tokens`` and ``gac tokens``. Loads nothing."""

KEEP = 0.5
PRESS = "snapkv"
TEXT = "wiki-sample:8x1152"
FOLLOWING = 128
SHARES = tuple(eighth / 8 for eighth in range(1, 8))
"""Shares of the context to price for each layer; keeping all is always priced."""
STEP = 16
