"""What can change: one adapter a model family, from its config alone."""
