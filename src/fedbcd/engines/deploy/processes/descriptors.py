"""Descriptors: a process may have so many, and needs some for its store whoever connects."""

import errno
import os
import resource

from fedbcd.engines.deploy.processes.exit_codes import DiskError, ExitCode
from fedbcd.errors import RecordError

WANTED = 65_536  # that a process asks for, where it may have them
RESERVED = 96  # for the store, the health port and what is opened now and then
LEAST = 16  # connections at a port, however few descriptors there are
NONE_LEFT = (errno.EMFILE, errno.ENFILE)


class DescriptorsError(RecordError):
    """There is no descriptor left for what was to be read or written; the disk is as good as
    ever.
    """

    exit_code = int(ExitCode.DESCRIPTORS)

    def __init__(self, what: object) -> None:
        super().__init__(
            f"{what} cannot be opened, since this process has all the files open that it may have"
            f" ({limit()}); raise that limit (ulimit -n, LimitNOFILE=), then start this role again"
        )


def limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def raise_limit() -> int:
    """As many as this process wants and is allowed; how many these are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return limit()


def places() -> int:
    """How many connections there is room for besides what is open now and what is reserved."""
    most = WANTED if limit() == resource.RLIM_INFINITY else min(WANTED, limit())
    return max(most - len(os.listdir("/proc/self/fd")) - RESERVED, LEAST)


def are_exhausted(error: Exception) -> bool:
    """Whether there was no descriptor; SQLite only says that it cannot open a file."""
    if isinstance(error, OSError):
        return error.errno in NONE_LEFT
    try:
        os.close(os.dup(0))
    except OSError as found:
        return found.errno in NONE_LEFT
    return False


def unwritten(what: object, error: Exception) -> RecordError:
    """Why something could not be written."""
    return DescriptorsError(what) if are_exhausted(error) else DiskError(what, error)
