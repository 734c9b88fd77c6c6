"""An attention or an MLP that is left out."""
