"""The version and the name on the package index, in one place: the wheel, plans, profiles and pages read the first."""

__version__ = "0.1.0"
__distribution__ = "gpu-aligned-compression"
