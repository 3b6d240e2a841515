"""Version of apex_te, in a file that can be read without importing anything."""

__version__ = "0.1.0"
