"""Decide: which form and dim every site gets. Imports no torch."""
