"""Who is who: mutual TLS from a folder of certificates, read anew for every connection, with a list
of those revoked.

The folder of a role holds `identity.pem` (its key and certificate in one file, so that both change
at once), `ca.pem` and `crl.pem`. Identity is the certificate's URI name `fedbcd:device/7`. Peers
look for the identity and not for the host, so a server may move.

gRPC does not show a dialler the certificate of its listener, and checks no revocation list.
Therefore a listener looks at the certificate of its peer itself, and signs its Welcome: the dialler
checks the signing certificate against CA, list and name. What is signed holds the dialler's nonce
and certificate, so that nobody who lacks the dialler's key can have obtained it for this
connection.
"""

import contextlib
import hashlib
import ipaddress
import socket
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from fedbcd.engines.deploy.links.refusals import CredentialsError, MissingExtra
from fedbcd.engines.deploy.processes.logs import RoleLog
from fedbcd.errors import ConfigError, Refused
from fedbcd.protocol.messages import Actor
from fedbcd.record.tensorfile import write_whole

try:
    import grpc
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
except ImportError as missing:
    raise MissingExtra(missing.name or "cryptography") from None

IDENTITY, CA, CRL = "identity.pem", "ca.pem", "crl.pem"
WARN_S = 30 * 86_400.0  # before a certificate expires, there are warnings
SCHEME = "fedbcd:"
HOME = "fedbcd:at/"
PURPOSE = b"fedbcd welcome 1\0"

Certificate = x509.Certificate


class Plain:
    """No TLS: whoever connects is who it says it is. On loopback only, and only because somebody
    asked for it.
    """


def folder_name(actor: Actor) -> str:
    return actor.replace("/", "-")


def host_name(actor: Actor) -> str:
    """The DNS name in a listener's certificate that stands for its identity."""
    return f"{folder_name(actor)}.fedbcd"


def identity_of(certificate: Certificate) -> Actor:
    names = [
        uri for uri in _uris(certificate) if uri.startswith(SCHEME) and not uri.startswith(HOME)
    ]
    if len(names) != 1:
        raise CredentialsError(
            f"the certificate with serial number {certificate.serial_number:x} holds {len(names)}"
            " fedbcd names; it must be one"
        )
    return names[0].removeprefix(SCHEME)


def home_of(certificate: Certificate) -> Actor | None:
    """The only server at which a device may act, if its certificate names one."""
    return next(
        (uri.removeprefix(HOME) for uri in _uris(certificate) if uri.startswith(HOME)), None
    )


def _uris(certificate: Certificate) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    return names.get_values_for_type(x509.UniformResourceIdentifier)


def fingerprint(certificate: Certificate) -> bytes:
    return certificate.fingerprint(hashes.SHA256())


@dataclass(frozen=True)
class _CertificateFiles:
    """What the folder held when it was read."""

    identity_pem: bytes
    ca_pem: bytes
    certificate: Certificate
    ca: Certificate
    crl: x509.CertificateRevocationList


class Credentials:
    """The certificates of one role. Files that change are read anew; files that do not fit leave
    the last good ones in force.
    """

    def __init__(
        self, folder: Path, me: Actor, log: RoleLog | None = None, seen: Path | None = None
    ) -> None:
        """`folder` is the role's own, or the one that `fedbcd certs init` made, which holds it. The
        number of the latest list is kept in the file `seen`, so that an older one is not taken
        after a restart either.
        """
        part = folder / folder_name(me)
        self.folder = part if (part / IDENTITY).is_file() else folder
        self.me = me
        self._log = log or RoleLog(me)
        self._lock = threading.Lock()  # gRPC asks for certificates from a thread of its own
        self.generation = 0  # counts the changes
        self._seen = seen
        self._stamp = self._look()
        self._files = self._read(_number_in(seen))
        self._note_list()
        if self._stamp[0] is not None and (self.folder / IDENTITY).stat().st_mode & 0o077:
            self._log.warning(
                "key_readable",
                sentence=f"others can read the key in {self.folder / IDENTITY}; use chmod 600",
            )

    # ---------------------------------------------------------------------------------------------
    # reading
    def refresh(self) -> bool:
        """Read what has changed; True if anything that is in force has."""
        with self._lock:
            stamp = self._look()
            if stamp == self._stamp:
                return False
            self._stamp = stamp
            try:
                files = self._read(_number(self._files.crl))
            except CredentialsError as error:
                self._log.warning(
                    "credentials_kept", sentence=f"{error}; the last good ones stay in force"
                )
                return False
            changed, self._files = files != self._files, files
            self.generation += changed
            self._note_list()
            return changed

    def _note_list(self) -> None:
        if self._seen is not None and _number_in(self._seen) < _number(self._files.crl):
            with contextlib.suppress(OSError):  # a full disk; the list is in force
                write_whole(self._seen, str(_number(self._files.crl)).encode())

    def _look(self) -> tuple[tuple[int, int, int] | None, ...]:
        return tuple(_stamp_of(self.folder / name) for name in (IDENTITY, CA, CRL))

    def _read(self, least: int) -> _CertificateFiles:
        """The list must have this number at least."""
        identity, ca_pem, crl_pem = (self._bytes(name) for name in (IDENTITY, CA, CRL))
        try:
            certificate, ca = (
                x509.load_pem_x509_certificate(identity),
                x509.load_pem_x509_certificate(ca_pem),
            )
            crl = x509.load_pem_x509_crl(crl_pem)
            key = load_pem_private_key(identity, password=None)
        except (ValueError, TypeError):
            raise CredentialsError(
                f"{self.folder} holds a file that is no PEM of its kind; issue {self.me} anew"
            ) from None
        if key.public_key() != certificate.public_key():
            raise CredentialsError(
                f"key and certificate in {self.folder / IDENTITY} do not belong together; issue"
                f" {self.me} anew"
            )
        if identity_of(certificate) != self.me:
            raise CredentialsError(
                f"{self.folder / IDENTITY} is of {identity_of(certificate)}, but this process is"
                f" {self.me}"
            )
        _check_issued(certificate, ca, f"{self.folder / IDENTITY}")
        if not crl.is_signature_valid(ca.public_key()):  # type: ignore[arg-type]
            raise CredentialsError(
                f"{self.folder / CRL} is not signed by {self.folder / CA}; copy both from the"
                " folder of the CA"
            )
        if _number(crl) < least:
            raise CredentialsError(
                f"{self.folder / CRL} has number {_number(crl)}, older than {least} which is in"
                " force; copy the newest from the folder of the CA"
            )
        return _CertificateFiles(identity, ca_pem, certificate, ca, crl)

    def _bytes(self, name: str) -> bytes:
        try:
            return (self.folder / name).read_bytes()
        except OSError as error:
            raise CredentialsError(
                f"{self.folder / name} cannot be read ({error.strerror}); 'fedbcd certs init' and"
                " 'fedbcd certs issue' make it"
            ) from None

    # ---------------------------------------------------------------------------------------------
    # judging
    @property
    def certificate(self) -> Certificate:
        return self._files.certificate

    @property
    def seconds_left(self) -> float:
        """Until this role's certificate, or its authority's, expires."""
        ends = (self._files.certificate, self._files.ca)
        return min(one.not_valid_after_utc.timestamp() for one in ends) - time.time()

    @property
    def list_age_s(self) -> float:
        """Since the revocation list in force was made."""
        return time.time() - self._files.crl.last_update_utc.timestamp()

    @property
    def trouble(self) -> list[str]:
        left = self.seconds_left
        if left > WARN_S:
            return []
        return [
            f"the certificate of {self.me}, or its authority's, expires in"
            f" {left / 86_400:.1f} days; 'fedbcd certs rotate {self.me}' makes a new one"
        ]

    def check_own(self) -> None:
        """Raise if this role's own certificate would be turned down."""
        objection = self.objection(self._files.certificate)
        if objection is not None:
            raise CredentialsError(
                f"the certificate of {self.me} {objection}; use 'fedbcd certs rotate {self.me}'"
            )

    def objection(self, certificate: Certificate) -> str | None:
        """Why a certificate does not count (any more), as the end of a sentence; None if it
        does.
        """
        files, now = self._files, datetime.now(UTC)
        try:
            certificate.verify_directly_issued_by(files.ca)
        except (ValueError, TypeError, InvalidSignature):
            return "is of another CA"
        if now > certificate.not_valid_after_utc:
            return f"expired on {certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"
        if now < certificate.not_valid_before_utc:
            return (
                f"is valid from {certificate.not_valid_before_utc:%Y-%m-%d %H:%M} UTC only; look at"
                " the clocks"
            )
        if (
            files.crl.get_revoked_certificate_by_serial_number(certificate.serial_number)
            is not None
        ):
            return "has been revoked"
        return None

    # ---------------------------------------------------------------------------------------------
    # for the links
    def for_listener(self) -> grpc.ServerCredentials:
        """Credentials that ask peers for certificates, and are looked at anew for every connection.

        gRPC must hear of changes only: it replaces what handshakes of other connections are using
        at that moment, without a lock, and a process in which that happened at every connection
        died of it now and then.
        """
        told = self._files

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            nonlocal told
            self.refresh()
            before, told = told, self._files
            changed = (told.identity_pem, told.ca_pem) != (before.identity_pem, before.ca_pem)
            return _configuration(told) if changed else None

        return grpc.dynamic_ssl_server_credentials(
            _configuration(told),
            fetch,  # type: ignore[arg-type]  # None says that nothing has changed
            require_client_authentication=True,
        )

    def for_dialler(self) -> tuple[grpc.ChannelCredentials, Certificate]:
        """Credentials for one connection, as the files are now, and the certificate in them."""
        self.refresh()
        self.check_own()
        files = self._files
        return (
            grpc.ssl_channel_credentials(files.ca_pem, files.identity_pem, files.identity_pem),
            files.certificate,
        )

    def sign(self, nonce: bytes, dialler: Certificate) -> tuple[bytes, bytes]:
        """The listener's certificate (DER), and its signature for this dialler and this nonce."""
        files = self._files
        key = load_pem_private_key(files.identity_pem, password=None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        signature = key.sign(_to_sign(nonce, dialler, files.certificate), ec.ECDSA(hashes.SHA256()))
        return files.certificate.public_bytes(Encoding.DER), signature

    def check_signature(
        self, der: bytes, signature: bytes, nonce: bytes, listener: Actor, dialled_as: Certificate
    ) -> Certificate:
        """The listener's certificate, if it has signed and counts; `dialled_as` is our own, as it
        was when we dialled.
        """
        try:
            certificate = x509.load_der_x509_certificate(der)
            key = certificate.public_key()
            assert isinstance(key, ec.EllipticCurvePublicKey)
            key.verify(
                signature, _to_sign(nonce, dialled_as, certificate), ec.ECDSA(hashes.SHA256())
            )
            name = identity_of(certificate)
        except (ValueError, AssertionError, InvalidSignature, CredentialsError):
            raise Refused(
                "certificate",
                f"{listener} has not proved who it is: its Welcome is not signed by its"
                " certificate",
            ) from None
        objection = self.objection(certificate)
        if objection is not None:
            raise Refused("certificate", f"the certificate of {listener} {objection}")
        if name != listener:
            raise Refused("identity", f"{listener} was dialled, but {name} answered")
        return certificate


Security = Credentials | Plain


def _configuration(files: _CertificateFiles) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(files.identity_pem, files.identity_pem)], root_certificates=files.ca_pem
    )


def _to_sign(nonce: bytes, dialler: Certificate, listener: Certificate) -> bytes:
    return PURPOSE + hashlib.sha256(nonce).digest() + fingerprint(dialler) + fingerprint(listener)


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _check_issued(certificate: Certificate, ca: Certificate, where: str) -> None:
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        raise CredentialsError(
            f"the certificate in {where} was not issued by the CA beside it; issue it anew"
        ) from None


def _number_in(seen: Path | None) -> int:
    try:
        return int(seen.read_text()) if seen is not None else 0
    except (OSError, ValueError):
        return 0


def _number(crl: x509.CertificateRevocationList) -> int:
    return crl.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number


# ------------------------------------------------------------------------------------------------
# loopback
def is_loopback(host: str) -> bool:
    """Whether a host is this machine and cannot be reached from another."""
    try:
        return all(
            ipaddress.ip_address(info[4][0]).is_loopback for info in socket.getaddrinfo(host, None)
        )
    except (OSError, ValueError):
        return False


def check_plain(host: str) -> None:
    if not is_loopback(host):
        raise ConfigError(
            f"plain text at {host} would be readable on the network; use certificates (fedbcd certs"
            " init), or 127.0.0.1"
        )
