# For type checkers: the ops' modules are not files, so each of them is typed as Any.
from typing import Any

def __getattr__(name: str) -> Any: ...
