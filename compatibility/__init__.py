"""Loaders of the ops: real modules whose functions build their library when first called."""
