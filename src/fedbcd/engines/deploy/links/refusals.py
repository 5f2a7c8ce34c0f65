"""Saying no: what is refused and why, counted by reason, logged once per peer and reason.

What turns one letter, notice or connection down is `errors.Refused`; it changes nothing, and the
peer is told the sentence. What ends a process:

                   exit code
Replaced           20  another process with this identity has connected since
RefusedForGood     21  the peer will not have this process: version, model, membership, certificate
CredentialsError   23  certificates are missing, expired or not those of this role
MissingExtra       24  the packages of the deploy extra are not installed

`processes/exit_codes.py` has those that are not final: AddressError (22), DiskError (25);
`processes/descriptors.py`: DescriptorsError (27).
"""

from collections import Counter
from dataclasses import dataclass, field

from fedbcd.engines.deploy.processes.logs import RoleLog
from fedbcd.errors import ConfigError, FedBCDError, ProtocolError
from fedbcd.protocol.messages import Actor


class Replaced(FedBCDError):
    """Another process with this identity has connected since; the newest wins and this one must
    end.
    """

    exit_code = 20


class RefusedForGood(FedBCDError):
    """The peer refuses this process, and trying again cannot help."""

    exit_code = 21


class CredentialsError(FedBCDError):
    """Certificates are missing, expired, revoked or not those of this role."""

    exit_code = 23


class MissingExtra(ConfigError):
    """The packages of the deploy extra are not installed."""

    exit_code = 24

    def __init__(self, package: str) -> None:
        super().__init__(
            f"the package {package} is missing; a deployment needs the extra: pip install"
            " 'fedbcd[deploy]'"
        )


def reason_of(error: FedBCDError) -> str:
    return str(
        getattr(
            error,
            "reason",
            "protocol" if isinstance(error, ProtocolError) else type(error).__name__,
        )
    )


@dataclass
class Counts:
    """What went over the links of one role; the metrics read it."""

    letters_in: int = 0
    letters_out: int = 0
    bytes_in: int = 0  # of frames, before TLS and HTTP/2
    bytes_out: int = 0
    dropped: int = 0  # letters for a peer that was gone or too slow; the machines say them again
    connections: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by reason: what this side turned down
    refused_by_peer: Counter[str] = field(
        default_factory=Counter
    )  # by reason: what the other side turned down


STORES = frozenset(
    {"ahead", "older", "lost", "behind"}
)  # reasons that mean: somebody's store is not the newest, or is gone


class Refusals:
    """Counts every refusal by its reason, and logs the first of each peer and reason; those about
    stores are errors, and `trouble`.
    """

    REMEMBERED = 10_000  # pairs of peer and reason; beyond, refusals are counted only
    REASONS = 50  # that peers may invent; the others are counted together

    def __init__(self, counts: Counts, log: RoleLog) -> None:
        self._counts = counts
        self._log = log
        self._logged: set[tuple[Actor, str]] = set()
        self.trouble: dict[Actor, str] = {}  # what is said about stores, until the peer is welcome

    def note(self, peer: Actor, reason: str, sentence: str) -> None:
        self._counts.refused[reason] += 1
        self._once(peer, reason, "refused", sentence, reason in STORES)

    def note_from_peer(self, peer: Actor, reason: str, sentence: str) -> None:
        """Take note that the peer has refused something of ours. Its reasons are its own invention,
        so their number is bounded.
        """
        if (
            reason not in self._counts.refused_by_peer
            and len(self._counts.refused_by_peer) >= self.REASONS
        ):
            reason = "other"
        self._counts.refused_by_peer[reason] += 1
        self._once(peer, f"by peer: {reason}", "refused_by_peer", sentence, reason in STORES)

    def _once(self, peer: Actor, reason: str, what: str, sentence: str, is_error: bool) -> None:
        if is_error:
            self.trouble[peer] = sentence
        if (peer, reason) not in self._logged and len(self._logged) < self.REMEMBERED:
            self._logged.add((peer, reason))
            (self._log.error if is_error else self._log.warning)(
                what, peer=peer, reason=reason, sentence=sentence
            )
