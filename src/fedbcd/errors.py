"""Every error fedbcd raises on purpose.

FedBCDError                      exit code
├── ConfigError (ValueError)     2   a setting is unknown, impossible or contradicts another
├── DataError (ValueError)       3   data are missing, empty, not finite or of the wrong shape
├── RecordError                  4   an event log, checkpoint or run folder is damaged, foreign or
not ours to write
├── NumericalError               5   training produced a value that is not finite
├── ReplayMismatch               6   a replay did not end where the recorded run ended
└── ProtocolError                7
    ├── LocalProtocolError           our own engine fed a machine an event it cannot have
    └── RemoteProtocolError          a peer sent something that cannot be true
        └── Refused                      a letter, notice or connection is turned down, for a reason

Each message names the value, the bound and the remedy. A machine that raises has not changed.
"""


class FedBCDError(Exception):
    """Base of all; `exit_code` is what the command line exits with."""

    exit_code = 1


class ConfigError(FedBCDError, ValueError):
    """A setting is unknown, impossible or contradicts another."""

    exit_code = 2


class DataError(FedBCDError, ValueError):
    """Data are missing, empty, not finite or of the wrong shape."""

    exit_code = 3


class RecordError(FedBCDError):
    """An event log, checkpoint or run folder is damaged, foreign or not ours to write."""

    exit_code = 4


class NumericalError(FedBCDError):
    """Training produced a value that is not finite."""

    exit_code = 5


class ReplayMismatch(FedBCDError):
    """A replay did not end where the recorded run ended."""

    exit_code = 6


class ProtocolError(FedBCDError):
    """An event that a machine cannot accept; the machine is unchanged."""

    exit_code = 7


class LocalProtocolError(ProtocolError):
    """Our own engine fed a machine an event it cannot have in this state."""


class RemoteProtocolError(ProtocolError):
    """A peer sent something that cannot be true."""


class Refused(RemoteProtocolError):
    """What a peer sent is turned down and has changed nothing; `reason` is one word, for counters,
    the text is for people.
    """

    def __init__(self, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.reason = reason


class BorderWarning(UserWarning):
    """Weights sit on the border of the set X that was asked for, which may hold them back."""


class DivergenceWarning(UserWarning):
    """A run was started that may diverge, or whose servers have nothing that makes them agree, as
    far as a glance can tell.
    """


class RenamedWarning(DeprecationWarning):
    """An old name was used; it is understood for one version after it was given up."""
