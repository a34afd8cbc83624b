"""The version, in one place: setup.py reads it too."""

__version__ = "0.4.0.dev0"
