"""Latency tables for tests, as fixtures."""

from tests.profiling.conftest import header, profile_file

__all__ = ["header", "profile_file"]
