"""Styles that split modules over a device mesh as DTensors."""
