"""Peers' methods and rules, to compare with."""
