"""Exit codes: stable, documented in docs/operations.md, one meaning each."""

from enum import IntEnum

from fedbcd.errors import ConfigError


class ExitCode(IntEnum):
    """How a fedbcd process ended. Codes 2 to 7 are those of `fedbcd.errors`; a supervisor restarts after 1 and after signals only."""

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
    NO_STORE = 26  # a server or the coordinator finds no store, and was not told to begin one
    INTERRUPTED = 130  # Ctrl-C

    @property
    def is_final(self) -> bool:
        """Whether starting the process again cannot help."""
        return self not in (ExitCode.DONE, ExitCode.BUG, ExitCode.ADDRESS, ExitCode.INTERRUPTED)


class AddressError(ConfigError):
    """The address to listen at is in use, or not one of this machine."""

    exit_code = int(ExitCode.ADDRESS)
