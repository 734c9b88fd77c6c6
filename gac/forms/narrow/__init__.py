"""An MLP with fewer neurons."""
