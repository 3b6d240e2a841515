"""Module ``apex_te.autocast``, which is replaced by the class of that name on import.

Importing a submodule makes it an attribute of its package, where the module would hide the class
``autocast``. So the class takes the module's place in ``sys.modules``, and has all names of the
module as attributes: ``import apex_te.autocast``, imports from it and pickles that name it go on
working.
"""

import sys

from .fp8.autocast import Region as Region
from .fp8.autocast import autocast as autocast
from .fp8.autocast import fp8_autocast as fp8_autocast
from .fp8.autocast import get_fp8_recipe as get_fp8_recipe
from .fp8.autocast import graph_task_id as graph_task_id
from .fp8.autocast import is_fp8_enabled as is_fp8_enabled
from .fp8.autocast import is_process_group as is_process_group
from .fp8.autocast import local as local

sys.modules[__name__] = autocast  # type: ignore[assignment]
