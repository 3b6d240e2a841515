"""rms_norm, every function, against a copy of the same bytes and its peers in the same run.

Bytes counted, an element for bf16: forward 4 (read x, write y), to FP8 rowwise 3, both layouts 4,
backward 6 (read dy and x, write dx); with a residual 8 (forward also reads the residual and writes
the sum, backward also reads the residual's gradient).
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import norm_rows

from apex_te.ops import rms_norm

if __name__ == "__main__":
    norm_rows.run(rms_norm)
