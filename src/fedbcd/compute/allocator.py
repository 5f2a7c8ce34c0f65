"""Keep freed memory at hand. Stacked models are tensors of many megabytes that live for one step;
the C library of Linux gives such blocks back to the system at once and gets them again page by
page, which costs more than the arithmetic on them.
"""

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # malloc.h of glibc
_LARGE = 2**30


def keep_freed_memory() -> bool:
    """Let this process reuse large blocks instead of returning them; for programs of our own, not
    for other people's processes.

    False where the C library has no such switch. The price: memory once used stays with the process
    until it ends.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_MMAP_THRESHOLD, _LARGE), (_TRIM_THRESHOLD, _LARGE), (_TOP_PAD, _LARGE // 16))
    return all(
        mallopt(ctypes.c_int(option), ctypes.c_int(value)) == 1 for option, value in settings
    )
