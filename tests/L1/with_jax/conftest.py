"""Longer tests of JAX's side, with helpers and four CPU devices of ``tests/L0/with_jax``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "L0" / "with_jax"))
import four_devices  # noqa: F401
