"""Exit codes: stable, documented in docs/operations.md, one meaning each."""

import errno
import os
import sqlite3
from enum import IntEnum
from pathlib import Path

from fedbcd.errors import ConfigError, RecordError

FULL_DISK_BYTES = 1 << 20  # bytes: a disk with less than this is full


class ExitCode(IntEnum):
    """How a fedbcd process ended. Codes 2 to 7 are those of `fedbcd.errors`; supervisors restart
    after signals and what is not final.
    """

    DONE = 0  # finished, or stopped by SIGTERM with everything durable
    BUG = 1  # an error that fedbcd did not expect; the trace is on stderr
    CONFIG = 2  # a setting is unknown, impossible or contradicts another
    DATA = 3  # data are missing, empty or do not fit the model
    RECORD = 4  # a store, log or run folder is damaged, foreign or in use
    NUMERICAL = 5  # training gave a value that is not finite
    REPLAY = 6  # the log does not end where the run ended
    PROTOCOL = 7  # a peer, or this process, said something that cannot be true
    REPLACED = 20  # another process with this identity has connected since
    REFUSED = 21  # the peer refuses this process for good: version, membership or certificate
    ADDRESS = 22  # the address to listen at cannot be used
    CREDENTIALS = 23  # certificates are missing, expired or not those of this role
    EXTRA = 24  # the deploy extra is not installed
    DISK = 25  # the disk is full, or cannot be written; everything that was acknowledged is on it
    NO_STORE = 26  # a server or the coordinator finds no store, and was not told to begin one
    DESCRIPTORS = 27  # this process has as many files open as it may have; the disk is in order
    INTERRUPTED = 130  # Ctrl-C

    @property
    def is_final(self) -> bool:
        """Whether starting the process again cannot help."""
        return self not in (
            ExitCode.DONE,
            ExitCode.BUG,
            ExitCode.ADDRESS,
            ExitCode.DISK,
            ExitCode.DESCRIPTORS,
            ExitCode.INTERRUPTED,
        )


class AddressError(ConfigError):
    """The address to listen at is in use, or not one of this machine."""

    exit_code = int(ExitCode.ADDRESS)


class DiskError(RecordError):
    """What was to be kept cannot be written: once there is room, the role goes on from what it has
    acknowledged.
    """

    exit_code = int(ExitCode.DISK)

    def __init__(self, path: object, error: Exception) -> None:
        super().__init__(
            f"cannot write to {path} ({error}); make room or repair the disk, then start this role"
            " again"
        )


def is_of_the_disk(error: Exception, path: Path) -> bool:
    """Whether something went wrong because the disk is full or fails, as far as it can be told;
    `path` is on it.
    """
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_CANTOPEN:  # it may have had no room for a file that belongs to it
        room = os.statvfs(path)
        return room.f_bavail * room.f_frsize < FULL_DISK_BYTES
    return code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
