"""The version, in one place: the wheel, plans, profiles and pages all read it here."""

__version__ = "0.1.0"
