"""Attention: dot products with their masks and backends, and the layer around them."""
