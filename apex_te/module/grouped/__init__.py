"""Grouped linear layers, as experts have them, and the padding of their rows."""
