"""``python -m apex_te report | why | list | clean | build``: what is compiled, where, and why."""

from __future__ import annotations

import sys

from .op_builder.jit.cli import main

if __name__ == "__main__":
    sys.exit(main())
