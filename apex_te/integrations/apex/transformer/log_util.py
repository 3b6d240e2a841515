"""Loggers of apex.transformer."""

from __future__ import annotations

import logging
import os


def get_transformer_logger(name: str) -> logging.Logger:
    """Returns the logger of a module, by the last part of its name."""
    return logging.getLogger(os.path.splitext(name)[0])


def set_logging_level(verbosity: int | str) -> None:
    """Sets the level of the package's loggers, such as ``logging.INFO``."""
    logging.getLogger(__name__.rpartition(".")[0]).setLevel(verbosity)
