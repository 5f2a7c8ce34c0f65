"""Who is let in: wrong CA, expired, revoked, wrong name, plain text on the TLS port; and
certificates that change without a restart.
"""

import asyncio
import contextlib
import shutil
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from fedbcd.engines.deploy.links import certs as certs_module
from fedbcd.engines.deploy.links.certs import Authority
from fedbcd.engines.deploy.links.dialer import Dialer
from fedbcd.engines.deploy.links.fedbcd_pb2 import Frame
from fedbcd.engines.deploy.links.listener import Listener
from fedbcd.engines.deploy.links.refusals import CredentialsError, RefusedForGood
from fedbcd.engines.deploy.links.tls import (
    Credentials,
    _number,
    host_name,
    identity_of,
    is_loopback,
)
from fedbcd.errors import Refused
from support.waiting import LIMIT_S, eventually
from support.wire import (
    DEVICE,
    SERVER,
    Recorder,
    dialer,
    down,
    linked,
    listener,
    make_authority,
    running,
    up,
)

LINK = "/fedbcd.v1.Federation/Link"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return make_authority(tmp_path / "certs", "device/8", "server/4")


def _years_ago(monkeypatch: pytest.MonkeyPatch, years: float) -> None:
    """Certificates are issued as if it were so long ago."""

    class Past(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz or UTC) - timedelta(days=365 * years)

    monkeypatch.setattr(certs_module, "datetime", Past)


async def _why_not(folder: Path, port: int, me: str = DEVICE) -> str:
    """What a peer with this certificate is told by TLS itself, if it does not look at its own
    certificate.
    """
    pem = (folder / me.replace("/", "-") / "identity.pem").read_bytes()
    root = (folder / me.replace("/", "-") / "ca.pem").read_bytes()
    credentials = grpc.ssl_channel_credentials(root, pem, pem)
    options = [("grpc.ssl_target_name_override", host_name(SERVER))]
    async with grpc.aio.secure_channel(
        f"127.0.0.1:{port}", credentials, options=options
    ) as channel:
        call: Any = channel.stream_stream(LINK, Frame.SerializeToString, Frame.FromString)()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    return str(error.value.details())


async def _no_connection(device: Dialer, ear: Recorder, words: str) -> None:
    async with running(device.run()):
        await eventually(lambda: ear.heard("not_connected"))
        await asyncio.sleep(0.2)
        assert not device.connected
    assert words in ear.heard("not_connected")[0]["sentence"]


# ------------------------------------------------------------------------------------------------
# who is not let in
def test_a_device_of_another_authority_is_not_let_in(authority: Authority, tmp_path: Path) -> None:
    other = make_authority(tmp_path / "other")

    async def scenario() -> None:
        ear = Recorder()
        server = listener(Recorder(), Credentials(authority.folder, SERVER))
        port = await server.start()
        await _no_connection(
            dialer(ear, Credentials(other.folder, DEVICE), port), ear, "of another authority"
        )
        shutil.copy(
            authority.folder / "ca.pem", other.folder / "device-7" / "ca.pem"
        )  # it trusts the server, but not the other way round
        await _why_not(other.folder, port)
        assert not server.connected
        await server.stop()

    asyncio.run(scenario())


def test_nobody_without_a_certificate_is_let_in(authority: Authority) -> None:
    async def scenario() -> None:
        server = listener(Recorder(), Credentials(authority.folder, SERVER))
        port = await server.start()
        credentials = grpc.ssl_channel_credentials((authority.folder / "ca.pem").read_bytes())
        options = [("grpc.ssl_target_name_override", host_name(SERVER))]
        async with grpc.aio.secure_channel(
            f"127.0.0.1:{port}", credentials, options=options
        ) as channel:
            call: Any = channel.stream_stream(LINK, Frame.SerializeToString, Frame.FromString)()
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()
        await server.stop()

    asyncio.run(scenario())


def test_an_expired_certificate_is_not_let_in(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as past:
        _years_ago(past, 2)
        authority.rotate(DEVICE)

    async def scenario() -> None:
        server = listener(Recorder(), Credentials(authority.folder, SERVER))
        port = await server.start()
        with pytest.raises(
            CredentialsError,
            match=r"the certificate of device/7 expired on .* use 'fedbcd certs rotate device/7'",
        ):
            await dialer(Recorder(), Credentials(authority.folder, DEVICE), port).run()
        await _why_not(authority.folder, port)
        await server.stop()

    asyncio.run(scenario())


def test_a_listener_with_an_expired_certificate_does_not_start_nor_fool_anybody(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as past:
        _years_ago(past, 2)
        authority.rotate(SERVER)

    async def scenario() -> None:
        server = listener(Recorder(), Credentials(authority.folder, SERVER))
        with pytest.raises(CredentialsError, match="the certificate of server/3 expired on"):
            await server.start()
        monkeypatch.setattr(Credentials, "check_own", lambda self: None)
        ear = Recorder()
        await _no_connection(
            dialer(ear, Credentials(authority.folder, DEVICE), await server.start()),
            ear,
            "use 'fedbcd certs rotate server/3'",
        )
        await server.stop()

    asyncio.run(scenario())


def test_a_listener_with_another_name_is_not_taken_for_the_server(authority: Authority) -> None:
    async def scenario() -> None:
        ear = Recorder()
        server = listener(Recorder(), Credentials(authority.folder, "server/4"), me="server/4")
        await _no_connection(
            dialer(ear, Credentials(authority.folder, DEVICE), await server.start()),
            ear,
            "server/4 is at 127.0.0.1",
        )
        await server.stop()

    asyncio.run(scenario())


def test_a_device_cannot_pose_as_a_server(authority: Authority) -> None:
    """Its certificate is for dialling only."""
    assert identity_of(Credentials(authority.folder, DEVICE).certificate) == DEVICE
    pem = (authority.folder / "device-7" / "identity.pem").read_bytes()
    (authority.folder / "server-3" / "identity.pem").write_bytes(pem)
    with pytest.raises(CredentialsError, match=r"is of device/7, but this process is server/3"):
        Credentials(authority.folder, SERVER)


def test_plain_text_on_the_tls_port_disturbs_nobody(authority: Authority) -> None:
    async def scenario() -> None:
        async with linked(authority.folder) as (server, here, device, _):
            for words in (
                b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100),
                b"\x16\x03\x01\xff\xff" + bytes(50),
                b"",
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(words)
                if words:
                    async with asyncio.timeout(LIMIT_S):
                        assert (
                            len(await reader.read()) < 200
                        )  # a TLS alert, or nothing; then the end
                writer.close()
                await writer.wait_closed()
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                call: Any = channel.stream_stream(LINK, Frame.SerializeToString, Frame.FromString)()
                with pytest.raises(grpc.aio.AioRpcError):
                    await call.read()
            assert await device.send(up(None))
            await eventually(lambda: here.letters)
            assert here.disconnects == []

    asyncio.run(scenario())


# ------------------------------------------------------------------------------------------------
# revocation
def test_a_revoked_device_is_cut_off_and_not_let_in_again(
    authority: Authority, tmp_path: Path
) -> None:
    stolen = tmp_path / "stolen"
    shutil.copytree(
        authority.folder / "device-7", stolen
    )  # with the old list: it does not know that it is revoked

    async def scenario() -> None:
        here, there = Recorder(), Recorder()
        server = listener(here, Credentials(authority.folder, SERVER))
        port = await server.start()
        device = dialer(there, Credentials(stolen, DEVICE), port)
        async with running(device.run()):
            await eventually(lambda: device.connected)
            authority.revoke(DEVICE)
            await eventually(lambda: here.disconnects and there.disconnects)
            await eventually(
                lambda: server.counts.refused["certificate"] >= 3
            )  # it tries again, in vain
            assert len(here.connects) == 1
            assert {"by peer: certificate"} == {
                fields["reason"] for fields in there.heard("refused_by_peer")
            }
            assert len(here.heard("refused")) == 1
        with pytest.raises(
            RefusedForGood,
            match="server/3 refuses device/7: the certificate of device/7 has been revoked",
        ):
            await dialer(Recorder(), Credentials(stolen, DEVICE), port).run()
        await server.stop()

    asyncio.run(scenario())


def test_a_revoked_server_is_left_and_not_believed_again(
    authority: Authority, tmp_path: Path
) -> None:
    """gRPC shows a dialler no certificate: the signed Welcome is what tells it."""
    stolen = tmp_path / "stolen"
    shutil.copytree(authority.folder / "server-3", stolen)

    async def scenario() -> None:
        here, there = Recorder(), Recorder()
        server = listener(here, Credentials(stolen, SERVER))
        port = await server.start()
        device = dialer(there, Credentials(authority.folder, DEVICE), port)
        async with running(device.run()):
            await eventually(lambda: device.connected)
            authority.revoke(SERVER)
            await eventually(lambda: there.disconnects)
            await eventually(lambda: device.counts.refused["certificate"] >= 3)
            assert len(there.connects) == 1
        with pytest.raises(RefusedForGood, match="the certificate of server/3 has been revoked"):
            await dialer(Recorder(), Credentials(authority.folder, DEVICE), port).run()
        await server.stop()

    asyncio.run(scenario())


def test_a_welcome_that_was_signed_for_somebody_else_is_not_believed(authority: Authority) -> None:
    server, device = Credentials(authority.folder, SERVER), Credentials(authority.folder, DEVICE)
    other = Credentials(authority.folder, "device/8")
    der, signature = server.sign(b"nonce", device.certificate)
    assert (
        identity_of(device.check_signature(der, signature, b"nonce", SERVER, device.certificate))
        == SERVER
    )
    for changes in (
        {"nonce": b"other"},
        {"dialled_as": other.certificate},
        {"signature": bytes(70)},
        {"der": b"no certificate"},
    ):
        fields: dict[str, Any] = {
            "der": der,
            "signature": signature,
            "nonce": b"nonce",
            "listener": SERVER,
            "dialled_as": device.certificate,
        }
        with pytest.raises(Refused, match="has not proved who it is"):
            device.check_signature(**{**fields, **changes})
    der, signature = other.sign(b"nonce", device.certificate)
    with pytest.raises(Refused, match="server/3 was dialled, but device/8 answered"):
        device.check_signature(der, signature, b"nonce", SERVER, device.certificate)


def test_a_list_that_is_damaged_foreign_or_older_leaves_the_last_good_one_in_force(
    authority: Authority, tmp_path: Path
) -> None:
    old = (authority.folder / "crl.pem").read_bytes()
    authority.revoke("device/8")
    foreign = (make_authority(tmp_path / "other").folder / "crl.pem").read_bytes()
    ear = Recorder()
    credentials = Credentials(authority.folder, SERVER, ear)
    revoked = Credentials(authority.folder, "device/8").certificate
    path = credentials.folder / "crl.pem"
    for content, words in (
        (b"", "no PEM"),
        (b"garbage", "no PEM"),
        (foreign, "is not signed by"),
        (old, "has number 1, older than 2"),
    ):
        path.write_bytes(content)
        assert not credentials.refresh()
        assert words in ear.heard("credentials_kept")[-1]["sentence"]
        assert credentials.objection(revoked) == "has been revoked"
    path.unlink()
    assert not credentials.refresh()
    assert credentials.objection(revoked) == "has been revoked"
    authority.revoke(DEVICE)
    assert credentials.refresh()


# ------------------------------------------------------------------------------------------------
# rotation
def _serial(end: Dialer | Listener, peer: str) -> int:
    certificate = end._peers[peer].certificate
    assert certificate is not None
    return certificate.serial_number


def test_new_certificates_are_used_for_new_connections_without_a_restart(
    authority: Authority,
) -> None:
    async def scenario() -> None:
        async with linked(authority.folder) as (server, here, device, there):
            before = _serial(server, DEVICE), _serial(device, SERVER)
            authority.rotate(DEVICE)
            authority.rotate(SERVER)
            await asyncio.sleep(0.3)
            assert there.disconnects == []  # the old ones are good until they expire
            assert (_serial(server, DEVICE), _serial(device, SERVER)) == before
            server._peers[DEVICE].connection.end("certificate", "connect again")
            await eventually(lambda: len(there.connects) == 2)
            after = _serial(server, DEVICE), _serial(device, SERVER)
            assert not {*before} & {*after}
            assert after[0] == Credentials(authority.folder, DEVICE).certificate.serial_number
            await server.send(down(None))
            await eventually(lambda: there.letters)
            assert here.letters == []

    asyncio.run(scenario())


def test_a_rotation_that_revokes_the_old_certificate_moves_the_connection_over(
    authority: Authority,
) -> None:
    async def scenario() -> None:
        async with linked(authority.folder) as (server, here, device, _there):
            before = _serial(server, DEVICE)
            authority.rotate(DEVICE, revoke_old=True)
            await eventually(
                lambda: len(here.connects) >= 2 and device.connected and server.connected
            )
            await eventually(lambda: _serial(server, DEVICE) != before)
            assert await device.send(up(None))
            await eventually(lambda: here.letters)

    asyncio.run(scenario())


def test_a_session_ends_when_the_certificate_of_the_peer_expires(authority: Authority) -> None:
    """The certificate is made to expire a second from now."""

    async def scenario() -> None:
        issued = authority.rotate(DEVICE)
        assert issued.is_dir()
        async with linked(authority.folder) as (server, here, _, _there):
            peer = server._peers[DEVICE]
            assert peer.certificate is not None

            class Soon:
                not_valid_after_utc = datetime.now(UTC) - timedelta(seconds=1)

            peer.certificate = Soon()  # type: ignore[assignment]
            server._security.objection = lambda certificate: (
                "expired on a day" if isinstance(certificate, Soon) else None
            )  # type: ignore
            await eventually(lambda: len(here.connects) == 2)

    asyncio.run(scenario())


# ------------------------------------------------------------------------------------------------
# files
def test_the_folder_of_a_role_is_enough(authority: Authority) -> None:
    assert (
        Credentials(authority.folder / "device-7", DEVICE).certificate
        == Credentials(authority.folder, DEVICE).certificate
    )


def test_a_key_that_others_can_read_is_complained_about(authority: Authority) -> None:
    ear = Recorder()
    Credentials(authority.folder, DEVICE, ear)
    assert ear.said == []
    (authority.folder / "device-7" / "identity.pem").chmod(0o640)
    Credentials(authority.folder, DEVICE, ear)
    assert "use chmod 600" in ear.heard("key_readable")[0]["sentence"]


@pytest.mark.parametrize("name", ["identity.pem", "ca.pem", "crl.pem"])
def test_a_file_that_is_missing_or_damaged_is_a_sentence(authority: Authority, name: str) -> None:
    path = authority.folder / "device-7" / name
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CredentialsError, match="no PEM of its kind") as damaged:
        Credentials(authority.folder / "device-7", DEVICE)
    assert damaged.value.exit_code == 23
    path.unlink()
    with pytest.raises(CredentialsError, match=r"cannot be read .* 'fedbcd certs issue' make"):
        Credentials(authority.folder / "device-7", DEVICE)


def test_key_and_certificate_must_belong_together(authority: Authority) -> None:
    path = authority.folder / "device-7" / "identity.pem"
    mine, other = path.read_text(), (authority.folder / "device-8" / "identity.pem").read_text()
    path.write_text(other[: other.index("-----BEGIN CERT")] + mine[mine.index("-----BEGIN CERT") :])
    with pytest.raises(CredentialsError, match="do not belong together") as wrong:
        Credentials(authority.folder, DEVICE)
    assert "PRIVATE" not in str(wrong.value)


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("localhost", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("192.0.2.7", False),
    ],
)
def test_loopback_is_told_from_the_network(host: str, is_local: bool) -> None:
    assert is_loopback(host) is is_local


# ------------------------------------------------------------------------------------------------
# many at once
def test_grpc_hears_of_certificates_only_when_they_change(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it is told anew it puts in the place of what other handshakes are using, so it must not
    be told at every connection.
    """
    fetched: list[Callable[[], object]] = []
    monkeypatch.setattr(
        grpc, "dynamic_ssl_server_credentials", lambda _, fetch, **__: fetched.append(fetch)
    )
    Credentials(authority.folder, SERVER).for_listener()
    (fetch,) = fetched
    assert [fetch(), fetch()] == [None, None]
    authority.revoke(DEVICE)  # a new list is our business, not that of gRPC
    assert fetch() is None
    authority.rotate(SERVER)
    assert [fetch() is None, fetch() is None] == [False, True]


LISTENER = """
import asyncio, sys, grpc
from pathlib import Path
from fedbcd.engines.deploy.links.tls import Credentials

async def main():
    server = grpc.aio.server()
    own = Credentials(Path(sys.argv[1]), "server/3").for_listener()
    port = server.add_secure_port("127.0.0.1:0", own)
    await server.start()
    print(port, flush=True)
    await asyncio.sleep(10_000)

asyncio.run(main())
"""


def test_a_listener_survives_many_handshakes_at_once(authority: Authority) -> None:
    folder = authority.folder
    context = ssl.create_default_context(cafile=folder / "ca.pem")
    context.check_hostname = False
    context.load_cert_chain(folder / "device-7" / "identity.pem")
    context.set_alpn_protocols(["h2"])

    def shake_hands(port: int) -> None:
        for _ in range(100):
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port), timeout=LIMIT_S) as plain,
            ):
                context.wrap_socket(plain).close()

    with subprocess.Popen(
        [sys.executable, "-c", LISTENER, str(folder)], stdout=subprocess.PIPE, text=True
    ) as listener:
        try:
            assert listener.stdout is not None
            port = int(listener.stdout.readline())
            with ThreadPoolExecutor(12) as pool:
                list(pool.map(shake_hands, [port] * 12))
            assert listener.poll() is None
        finally:
            listener.kill()


# ------------------------------------------------------------------------------------------------
# what is promised of certificates
def test_tls_1_2_is_turned_away(authority: Authority) -> None:
    async def scenario() -> None:
        async with linked(authority.folder) as (server, _, _, _):

            def version(wanted: ssl.TLSVersion) -> str | None:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
                context.check_hostname = False
                context.load_verify_locations(authority.folder / "ca.pem")
                context.load_cert_chain(authority.folder / "device-7" / "identity.pem")
                context.minimum_version = context.maximum_version = wanted
                context.set_alpn_protocols(["h2"])
                with socket.create_connection(("127.0.0.1", server.port), LIMIT_S) as plain:
                    try:
                        with context.wrap_socket(plain) as wrapped:
                            return wrapped.version()
                    except (ssl.SSLError, OSError):
                        return None

            assert await asyncio.to_thread(version, ssl.TLSVersion.TLSv1_2) is None
            assert await asyncio.to_thread(version, ssl.TLSVersion.TLSv1_3) == "TLSv1.3"

    asyncio.run(scenario())


def test_an_older_list_is_not_taken_after_a_restart_either(
    authority: Authority, tmp_path: Path
) -> None:
    seen, lists = tmp_path / "revocations", authority.folder / SERVER.replace("/", "-") / "crl.pem"
    old = lists.read_bytes()
    number = _number(Credentials(authority.folder, SERVER, seen=seen)._files.crl)
    assert seen.read_text() == str(number)
    authority.issue("device/77")
    authority.revoke("device/77")
    Credentials(authority.folder, SERVER, seen=seen)
    lists.write_bytes(old)
    with pytest.raises(CredentialsError, match=f"has number {number}, older than {number + 1}"):
        Credentials(authority.folder, SERVER, seen=seen)
    lists.write_bytes((authority.folder / "crl.pem").read_bytes())
    assert Credentials(authority.folder, SERVER, seen=seen).list_age_s < 3600.0


def test_a_certificate_that_expires_soon_is_trouble(tmp_path: Path) -> None:
    made = make_authority(tmp_path)
    assert Credentials(tmp_path, DEVICE).trouble == []
    made.rotate(DEVICE, days=7)
    soon = Credentials(tmp_path, DEVICE)
    assert 6.9 < soon.seconds_left / 86_400 <= 7.0
    assert "expires in 7.0 days; 'fedbcd certs rotate device/7'" in soon.trouble[0]
