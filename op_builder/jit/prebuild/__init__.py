"""Compilation of libraries before their first use: at install time or into the user's cache."""
