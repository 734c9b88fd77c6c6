"""What ``gac.allocate_tokens`` and ``gac tokens`` take where nothing is said. Loads nothing."""

KEEP = 0.5
PRESS = "snapkv"
TEXT = "wiki-sample:8x1152"
FOLLOWING = 128
SHARES = tuple(eighth / 8 for eighth in range(1, 8))
"""What is priced of each layer; all tokens are there besides."""
STEP = 16
