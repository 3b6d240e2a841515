# For type checkers: the modules of the ops are no files, and this makes each of them Any.
from typing import Any

def __getattr__(name: str) -> Any: ...
