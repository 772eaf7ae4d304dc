"""The version of this library, for whoever must not import the facade."""

__version__ = "0.1.0"
