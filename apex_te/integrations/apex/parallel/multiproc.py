"""Starts a script once for each GPU: ``python -m apex.parallel.multiproc script.py arguments``.

The script gets ``--world-size`` and ``--rank``; ``torchrun`` is the modern way. Ranks other than 0
write to ``GPU_<rank>.log``.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import ExitStack

import torch


def main(arguments: list[str]) -> int:
    """Runs a script once for each GPU; returns the first exit status that is not 0, or 0.

    ``arguments`` are the script's path and its arguments, to which ``--world-size`` (default: the
    number of GPUs) and ``--rank`` are added.
    """
    arguments = list(arguments)
    if "--world-size" in arguments:
        size = int(arguments[arguments.index("--world-size") + 1])
    else:
        size = torch.cuda.device_count()
        arguments += ["--world-size", str(size)]
    if "--rank" not in arguments:
        arguments += ["--rank", "0"]
    place = arguments.index("--rank") + 1
    with ExitStack() as files:
        workers = []
        for rank in range(size):
            arguments[place] = str(rank)
            log = files.enter_context(open(f"GPU_{rank}.log", "w")) if rank else None
            workers.append(subprocess.Popen([sys.executable, *arguments], stdout=log))
        statuses = [worker.wait() for worker in workers]
    return next((status for status in statuses if status), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
