"""The certificate authority: what it makes, who can read it, and its commands."""

import json
import stat
from pathlib import Path

import pytest
from cryptography import x509
from typer.testing import CliRunner

from fedbcd.cli import app
from fedbcd.cli.certs import expand
from fedbcd.engines.deploy.links.certs import Authority
from fedbcd.engines.deploy.links.refusals import CredentialsError
from fedbcd.engines.deploy.links.tls import Credentials, home_of, identity_of
from fedbcd.errors import ConfigError


def _mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def _run(*words: str) -> str:
    result = CliRunner().invoke(app, ["certs", *words], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_keys_can_be_read_by_their_owner_only(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "certs")
    folder = authority.issue("device/7")
    assert _mode(tmp_path / "certs") == 0o700
    assert _mode(folder) == 0o700
    for path in (authority.folder / "ca.key", folder / "identity.pem"):
        assert _mode(path) == 0o600
        assert b"PRIVATE KEY" in path.read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == ["ca.pem", "crl.pem", "identity.pem"]
    assert b"PRIVATE" not in (folder / "ca.pem").read_bytes()


def test_names_hosts_and_home_are_in_the_certificate_and_survive_a_rotation(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path)
    authority.issue("server/3", hosts=["server.example", "10.0.0.5", "::1"])
    authority.issue("device/7", at="server/3", days=30)
    for _ in range(2):
        server, device = (
            Credentials(tmp_path, "server/3").certificate,
            Credentials(tmp_path, "device/7").certificate,
        )
        names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert names.get_values_for_type(x509.DNSName) == ["server-3.fedbcd", "server.example"]
        assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.5", "::1"]
        assert (identity_of(device), home_of(device)) == ("device/7", "server/3")
        authority.rotate("server/3")
        authority.rotate("device/7")
    assert Credentials(tmp_path, "server/3").certificate != server


def test_a_device_can_only_dial_and_the_coordinator_only_listen(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path)
    uses = {}
    for identity in ("device/7", "server/3", "coordinator", "operator"):
        authority.issue(identity)
        extension = Credentials(tmp_path, identity).certificate.extensions.get_extension_for_class(
            x509.ExtendedKeyUsage
        )
        uses[identity] = {use._name for use in extension.value}
    assert uses == {
        "device/7": {"clientAuth"},
        "server/3": {"serverAuth", "clientAuth"},
        "coordinator": {"serverAuth"},
        "operator": {"clientAuth"},
    }


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path)
    authority.issue("device/7")
    with pytest.raises(ConfigError, match="already holds an authority"):
        Authority.create(tmp_path)
    with pytest.raises(
        ConfigError, match=r"device/7 has a certificate in .* use 'fedbcd certs rotate device/7'"
    ):
        authority.issue("device/7")


@pytest.mark.parametrize(
    "identity",
    [
        "",
        "device",
        "device/",
        "device/-1",
        "device/07",
        "device/7/8",
        "../x",
        "device/7\n",
        "server/x",
        "root",
    ],
)
def test_what_is_no_identity_is_refused(tmp_path: Path, identity: str) -> None:
    authority = Authority.create(tmp_path)
    for act in (authority.issue, authority.rotate, authority.revoke):
        with pytest.raises(
            ConfigError,
            match=r"is no identity; write device/7, .*, operator or operator/alice",
        ):
            act(identity)


def test_settings_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path)
    with pytest.raises(ConfigError, match="days=0 must be between 1 and 36500"):
        authority.issue("device/7", days=0)
    with pytest.raises(ConfigError, match="device/7 listens nowhere"):
        authority.issue("device/7", hosts=["x"])
    with pytest.raises(ConfigError, match="only devices belong at a server"):
        authority.issue("server/3", at="server/4")
    with pytest.raises(ConfigError, match="neither a host name nor an IP address"):
        authority.issue("server/3", hosts=["a b"])
    with pytest.raises(ConfigError, match="has no certificate to revoke"):
        authority.revoke("device/7")
    with pytest.raises(CredentialsError, match="use 'fedbcd certs issue device/7'"):
        authority.rotate("device/7")
    assert authority.issued() == []


def test_without_an_authority_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(CredentialsError, match="'fedbcd certs init' makes an authority"):
        Authority(tmp_path)


def test_the_list_grows_and_reaches_every_folder(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path)
    for identity in ("device/7", "device/8", "server/3"):
        authority.issue(identity)
    authority.rotate("device/7")
    assert authority.revoke("device/7") == 2
    authority.revoke("device/8")
    assert [(entry.identity, entry.revoked) for entry in authority.issued()] == [
        ("device/7", True),
        ("device/8", True),
        ("server/3", False),
        ("device/7", True),
    ]
    lists = {path.read_bytes() for path in tmp_path.rglob("crl.pem")}
    assert len(lists) == 1
    assert len(x509.load_pem_x509_crl(lists.pop())) == 3


def test_the_commands(tmp_path: Path) -> None:
    folder = str(tmp_path / "certs")
    said = _run("init", "--dir", folder)
    said += _run("issue", "coordinator", "server/0", "device/0-2", "--dir", folder)
    said += _run("rotate", "server/0", "--dir", folder, "--revoke-old")
    said += _run("revoke", "device/1", "--dir", folder)
    entries = json.loads(_run("list", "--dir", folder, "--json"))
    assert [(entry["identity"], entry["revoked"]) for entry in entries] == [
        ("coordinator", False),
        ("server/0", True),
        ("device/0", False),
        ("device/1", True),
        ("device/2", False),
        ("server/0", False),
    ]
    table = _run("list", "--dir", folder)
    assert "revoked" in table
    for text in (said, table):
        assert "PRIVATE" not in text
    assert Credentials(Path(folder), "device/2").certificate


def test_ranges_are_written_out() -> None:
    assert expand(["coordinator", "device/8-10"]) == [
        "coordinator",
        "device/8",
        "device/9",
        "device/10",
    ]
    for wrong in ("device/3-1", "device/a-b", "device/1-"):
        with pytest.raises(ConfigError, match="no range of identities"):
            expand([wrong])
