"""Gives UBSAN's reports a file of their own, in every interpreter that scripts/sanitize.py starts.

ASAN and UBSAN have a function of one name that sets the file. UBSAN's start calls ASAN's, which is
loaded first, so that its own reports go to stderr, where a test's captured output hides them.
"""

import ctypes
import os

if "APEX_TE_UBSAN_LOG" in os.environ:
    _library = ctypes.CDLL("libubsan.so.1", mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
    _library.__sanitizer_set_report_path.argtypes = [ctypes.c_char_p]
    _library.__sanitizer_set_report_path.restype = None
    _library.__sanitizer_set_report_path(os.environ["APEX_TE_UBSAN_LOG"].encode())
