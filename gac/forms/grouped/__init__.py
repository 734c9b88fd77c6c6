"""A low-rank pair for each group of heads."""
