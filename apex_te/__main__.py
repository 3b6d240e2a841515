"""Command line of the op libraries: which are compiled, where they lie, and why one is rebuilt.

``python -m apex_te report | why | list | clean | build``.
"""

from __future__ import annotations

import sys

from .op_builder.jit.cli import main

if __name__ == "__main__":
    sys.exit(main())
