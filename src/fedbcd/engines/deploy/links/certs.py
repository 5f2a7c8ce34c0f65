"""A small certificate authority in a folder: make it, issue and rotate identities, revoke them.

certs/
  ca.pem, ca.key         the authority; ca.key never leaves this machine, and can be taken off it
  between uses
  crl.pem                the list of revoked certificates, signed by the authority
  issued.jsonl           what was issued, for `list` and `revoke`
  device-7/              what device/7 needs, and nothing else: identity.pem (key and certificate),
  ca.pem, crl.pem

Keys are of the curve P-256 and lie in files that only their owner can read. Hand a role its folder;
hand out crl.pem after `revoke`.
"""

import ipaddress
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedbcd.engines.deploy.links.refusals import CredentialsError, MissingExtra
from fedbcd.engines.deploy.links.tls import CA, CRL, HOME, IDENTITY, SCHEME, folder_name, host_name
from fedbcd.errors import ConfigError
from fedbcd.protocol.messages import Actor
from fedbcd.record.tensorfile import sync

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
        load_pem_private_key,
    )
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as missing:
    raise MissingExtra(missing.name or "cryptography") from None

CA_KEY, INDEX = "ca.key", "issued.jsonl"
NUMBER = r"(0|[1-9][0-9]{0,11})"
ACTOR = re.compile(
    rf"device/{NUMBER}|server/{NUMBER}|coordinator|operator(/[a-z0-9][a-z0-9_.-]{{0,31}})?"
)
SKEW = timedelta(minutes=5)  # clocks of devices are not exact


@dataclass(frozen=True)
class Issued:
    """One certificate that was issued."""

    identity: Actor
    serial: str  # hexadecimal
    until: str  # ISO date and time, UTC
    revoked: bool = False


class Authority:
    """The folder of a certificate authority, opened."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.certificate = x509.load_pem_x509_certificate((folder / CA).read_bytes())
            key = load_pem_private_key((folder / CA_KEY).read_bytes(), password=None)
        except OSError as error:
            raise CredentialsError(
                f"{error.filename} cannot be read ({error.strerror}); 'fedbcd certs init' makes an"
                " authority"
            ) from None
        except (ValueError, TypeError):
            raise CredentialsError(
                f"{folder} holds a {CA} or {CA_KEY} that is damaged; put them back from a copy"
            ) from None
        if (
            not isinstance(key, ec.EllipticCurvePrivateKey)
            or key.public_key() != self.certificate.public_key()
        ):
            raise CredentialsError(f"{CA} and {CA_KEY} in {folder} do not belong together")
        self._key = key

    @classmethod
    def create(cls, folder: Path, days: int = 3650) -> "Authority":
        if (folder / CA_KEY).exists() or (folder / CA).exists():
            raise ConfigError(
                f"{folder} already holds an authority; a second one would lock out everybody the"
                " first has let in"
            )
        _check_days(days)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name(
            [x509.NameAttribute(NameOID.COMMON_NAME, f"fedbcd authority {os.urandom(4).hex()}")]
        )
        certificate = (
            _builder(name, name, key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        write_private(
            folder / CA_KEY, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        )
        write_private(folder / CA, certificate.public_bytes(Encoding.PEM), mode=0o644)
        authority = cls(folder)
        authority._write_list([], number=1)
        return authority

    # ---------------------------------------------------------------------------------------------
    # issuing
    def issue(
        self,
        identity: Actor,
        *,
        hosts: Sequence[str] = (),
        at: Actor | None = None,
        days: int = 365,
    ) -> Path:
        """Make key and certificate of a new identity; the folder to hand to its process."""
        folder = self._folder_of(identity)
        if (folder / IDENTITY).exists():
            raise ConfigError(
                f"{identity} has a certificate in {folder}; use 'fedbcd certs rotate {identity}'"
                " for a new one"
            )
        self._make(identity, hosts, at, days)
        return folder

    def rotate(self, identity: Actor, *, days: int = 365, revoke_old: bool = False) -> Path:
        """Give an identity a new key and certificate with the same names; new connections use it,
        without a restart.

        The old certificate stays good until it expires, so that open connections go on, unless
        `revoke_old`.
        """
        folder = self._folder_of(identity)
        try:
            old = x509.load_pem_x509_certificate((folder / IDENTITY).read_bytes())
        except (OSError, ValueError):
            raise CredentialsError(
                f"{folder / IDENTITY} is missing or damaged; use 'fedbcd certs issue {identity}'"
            ) from None
        hosts, at = _names_of(old)
        self._make(identity, hosts, at, days)
        if revoke_old:
            self._revoke({old.serial_number})
        return folder

    def _make(self, identity: Actor, hosts: Sequence[str], at: Actor | None, days: int) -> None:
        _check_days(days)
        listens = identity == "coordinator" or identity.startswith("server/")
        if hosts and not listens:
            raise ConfigError(
                f"{identity} listens nowhere, so hosts={list(hosts)} mean nothing; leave them out"
            )
        if at is not None and not (
            identity.startswith("device/") and ACTOR.fullmatch(at) and at.startswith("server/")
        ):
            raise ConfigError(
                f"at={at!r} with {identity}: only devices belong at a server, such as at=server/3"
            )
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(SCHEME + identity)]
        names += [x509.UniformResourceIdentifier(HOME + at)] if at is not None else []
        names += [x509.DNSName(host_name(identity)), *map(_host, hosts)] if listens else []
        uses = [ExtendedKeyUsageOID.SERVER_AUTH] if listens else []
        uses += [ExtendedKeyUsageOID.CLIENT_AUTH] if identity != "coordinator" else []
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity)])
        certificate = (
            _builder(subject, self.certificate.subject, key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self._record(identity, certificate)
        self._hand_out(identity, key, certificate)

    def _hand_out(
        self, identity: Actor, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate
    ) -> None:
        folder = self._folder_of(identity)
        folder.mkdir(exist_ok=True, mode=0o700)
        for name in (CA, CRL):
            write_private(folder / name, (self.folder / name).read_bytes(), mode=0o644)
        pem = key.private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
        ) + certificate.public_bytes(Encoding.PEM)
        write_private(folder / IDENTITY, pem)

    def _record(self, identity: Actor, certificate: x509.Certificate) -> None:
        entry = Issued(
            identity, f"{certificate.serial_number:x}", certificate.not_valid_after_utc.isoformat()
        )
        with (self.folder / INDEX).open("a", encoding="utf-8") as file:
            file.write(
                json.dumps({k: v for k, v in asdict(entry).items() if k != "revoked"}) + "\n"
            )
            file.flush()
            os.fsync(file.fileno())

    def _folder_of(self, identity: Actor) -> Path:
        if ACTOR.fullmatch(identity) is None:
            raise ConfigError(
                f"{identity!r} is no identity; write device/7, server/3, coordinator, operator or"
                " operator/alice"
            )
        return self.folder / folder_name(identity)

    # ---------------------------------------------------------------------------------------------
    # revoking
    def revoke(self, identity: Actor) -> int:
        """Revoke every certificate of an identity that is still good; how many there were."""
        self._folder_of(identity)
        serials = {
            int(entry.serial, 16)
            for entry in self.issued()
            if entry.identity == identity and not entry.revoked
        }
        if not serials:
            raise ConfigError(f"{identity} has no certificate to revoke; see 'fedbcd certs list'")
        self._revoke(serials)
        return len(serials)

    def _revoke(self, serials: set[int]) -> None:
        crl = self._list()
        number = crl.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number
        new = [_revoked(serial) for serial in sorted(serials)]
        self._write_list([*crl, *new], number + 1)
        for folder in self._handed_out():
            write_private(folder / CRL, (self.folder / CRL).read_bytes(), mode=0o644)

    def _handed_out(self) -> Iterator[Path]:
        return (path.parent for path in self.folder.glob(f"*/{IDENTITY}"))

    def _list(self) -> x509.CertificateRevocationList:
        try:
            return x509.load_pem_x509_crl((self.folder / CRL).read_bytes())
        except (OSError, ValueError):
            raise CredentialsError(
                f"{self.folder / CRL} is missing or damaged; put it back from a copy: it says who"
                " is locked out"
            ) from None

    def _write_list(self, revoked: Sequence[x509.RevokedCertificate], number: int) -> None:
        builder = x509.CertificateRevocationListBuilder().issuer_name(self.certificate.subject)
        builder = builder.last_update(datetime.now(UTC) - SKEW).next_update(
            self.certificate.not_valid_after_utc
        )
        builder = builder.add_extension(x509.CRLNumber(number), critical=False)
        for entry in revoked:
            builder = builder.add_revoked_certificate(entry)
        crl = builder.sign(self._key, hashes.SHA256())
        write_private(self.folder / CRL, crl.public_bytes(Encoding.PEM), mode=0o644)

    def issued(self) -> list[Issued]:
        crl = self._list()
        try:
            lines = (self.folder / INDEX).read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        entries = [Issued(**json.loads(line)) for line in lines]
        gone = {entry.serial_number for entry in crl}
        return [Issued(e.identity, e.serial, e.until, int(e.serial, 16) in gone) for e in entries]


def write_private(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Replace a file at once and for good; readers see the old or the new, and never with looser
    rights than `mode`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = (
        builder.serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + timedelta(days=days))
    )
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _revoked(serial: int) -> x509.RevokedCertificate:
    return (
        x509.RevokedCertificateBuilder()
        .serial_number(serial)
        .revocation_date(datetime.now(UTC))
        .build()
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", host) is None:
        raise ConfigError(f"{host!r} is neither a host name nor an IP address")
    return x509.DNSName(host)


def _names_of(certificate: x509.Certificate) -> tuple[list[str], Actor | None]:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    hosts = [
        *names.get_values_for_type(x509.DNSName),
        *map(str, names.get_values_for_type(x509.IPAddress)),
    ]
    at = next((uri.removeprefix(HOME) for uri in uris if uri.startswith(HOME)), None)
    return [host for host in hosts if not host.endswith(".fedbcd")], at


def _check_days(days: int) -> None:
    if not 1 <= days <= 36_500:
        raise ConfigError(f"days={days} must be between 1 and 36500")
