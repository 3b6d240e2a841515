"""Alias of new_op.py, under the name of the script in ROCm apex."""

from __future__ import annotations

import sys

from new_op import main

if __name__ == "__main__":
    sys.exit(main())
