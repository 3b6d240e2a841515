"""Finds the platform tag of a wheel: the oldest C and C++ libraries that its libraries run with.

The rules are PEP 600's: ``manylinux_2_34_x86_64`` promises to run on every x86-64 Linux with glibc
2.34 or later and the libstdc++ of that time.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from op_builder.jit.find.elf import Needs, Version, needs

__all__ = ["Needs", "needs", "tag"]

# Libraries of the system that every Linux in question has.
SYSTEM_LIBRARIES = re.compile(
    r"(libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+|ld-linux-[\w-]+)\.so\.\d+"
)
# The newest GLIBCXX and CXXABI versions that systems of a glibc version have, as auditwheel's
# policies list them.
_POLICIES = {
    (2, 17): ((3, 4, 19), (1, 3, 7)),
    (2, 24): ((3, 4, 22), (1, 3, 10)),
    (2, 27): ((3, 4, 24), (1, 3, 11)),
    (2, 31): ((3, 4, 28), (1, 3, 12)),
    (2, 34): ((3, 4, 29), (1, 3, 13)),
    (2, 35): ((3, 4, 30), (1, 3, 13)),
    (2, 39): ((3, 4, 33), (1, 3, 15)),
}


def tag(libraries: dict[str, bytes]) -> str:
    """Returns the platform tag of a wheel with shared libraries, such as "manylinux_2_34_x86_64".

    Args:
        libraries: contents of the libraries by name.

    Raises:
        ValueError: there is none, they are for several machines, or one is linked with a library
            that not every system has or has a newer libstdc++ than any known system.
    """
    found = {name: needs(content) for name, content in libraries.items()}
    machines = {each.machine for each in found.values()}
    if len(machines) != 1:
        raise ValueError(f"libraries must be for one machine, got {sorted(machines)}")
    for name, each in found.items():
        strange = sorted(x for x in each.libraries if not SYSTEM_LIBRARIES.fullmatch(x))
        if strange:
            raise ValueError(f"{name} is linked with {', '.join(strange)}, which systems may lack")

    def highest(family: str) -> Version:
        return max((each.versions.get(family, ()) for each in found.values()), default=())

    glibc, glibcxx, abi = highest("GLIBC"), highest("GLIBCXX"), highest("CXXABI")
    for policy, (policy_glibcxx, policy_abi) in sorted(_POLICIES.items()):
        if glibcxx <= policy_glibcxx and abi <= policy_abi:
            major, minor = max(policy, glibc[:2])
            return f"manylinux_{major}_{minor}_{machines.pop()}"
    raise ValueError(f"GLIBCXX {glibcxx} and CXXABI {abi} are newer than those of known systems")
