"""Building libraries before they are needed: at install time or into the user's cache."""
