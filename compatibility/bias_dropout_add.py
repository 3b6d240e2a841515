"""Loader of bias_dropout_add."""

from .loader import define_loader

define_loader(globals(), "bias_dropout_add")
