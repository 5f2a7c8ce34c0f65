"""Whether anybody is there, and what answers instead: looked at with sockets of our own, since gRPC
tells neither a lost packet from a firewall nor a wrong authority from plain text.
"""

import asyncio
import contextlib
import ssl
import time
from pathlib import Path

from fedbcd.engines.deploy.links.refusals import CredentialsError, MissingExtra
from fedbcd.engines.deploy.links.tls import CA, IDENTITY, Plain, Security, host_name, identity_of
from fedbcd.protocol.messages import Actor

try:
    from cryptography.x509 import load_der_x509_certificate
except ImportError as missing:
    raise MissingExtra(missing.name or "cryptography") from None

AGAIN_S = 2.0  # a system repeats a lost SYN ever more seldom, so we try anew
OTHER_NAME, EXPIRED, NOT_YET = 62, 10, 9  # of OpenSSL's reasons to turn a certificate down


async def knock(host: str, port: int, patience_s: float) -> float:
    """The seconds that a connection takes to be accepted; raises OSError, TimeoutError."""
    until = time.monotonic() + patience_s
    trying: set[asyncio.Task[float]] = set()
    try:
        while (left_s := until - time.monotonic()) > 0:
            trying.add(asyncio.create_task(_accepted(host, port)))
            done, trying = await asyncio.wait(
                trying, timeout=min(AGAIN_S, left_s), return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                return task.result()
        raise TimeoutError
    finally:
        for task in trying:
            task.cancel()


async def _accepted(host: str, port: int) -> float:
    began = time.monotonic()
    _, writer = await asyncio.open_connection(host, port)
    writer.transport.abort()
    return time.monotonic() - began


def silent(peer: Actor, where: str, error: OSError | TimeoutError, waited_s: float) -> str:
    """Nobody accepts a connection there, in a sentence."""
    if isinstance(error, ConnectionRefusedError):
        why = "nobody listens (connection refused); is it started, and is the port right?"
    elif isinstance(error, TimeoutError):
        why = f"no answer for {waited_s:.0f} s; look at the network, firewalls and the address"
    else:
        why = f"{error.strerror or error}; look at the network and the address"
    return f"{peer} cannot be reached at {where}: {why}"


def no_answer(peer: Actor, where: str) -> str:
    """A connection is accepted, and nothing comes of it."""
    return (
        f"somebody accepts connections at {where}, but {peer} does not answer; is that process"
        " overloaded or stopped, or is this another service?"
    )


async def explain(
    host: str, port: int, me: Actor, peer: Actor, security: Security, patience_s: float
) -> str:
    """Why no link comes of a connection that is accepted there: the cause and what to do."""
    where = f"{host}:{port}"
    try:
        async with asyncio.timeout(patience_s):
            if isinstance(security, Plain):
                return await _explain_plain(host, port, peer)
            return await _explain_tls(host, port, me, peer, security.folder)
    except TimeoutError:
        return no_answer(peer, where)
    except (OSError, EOFError):
        return f"whatever is at {where} hangs up; is it {peer}, and is the port right?"


async def _explain_plain(host: str, port: int, peer: Actor) -> str:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    is_tls = True
    try:
        await _shake_hands(host, port, context, None)
    except ssl.SSLError as error:
        is_tls = "WRONG_VERSION" not in str(error)
    if is_tls:
        return (
            f"{host}:{port} speaks TLS, but this process plain text; leave out 'plain', or start"
            f" {peer} with it as well"
        )
    return f"{host}:{port} does not speak as {peer} does; is the port right?"


async def _explain_tls(host: str, port: int, me: Actor, peer: Actor, folder: Path) -> str:
    where, context = f"{host}:{port}", ssl.create_default_context(cafile=str(folder / CA))
    context.load_cert_chain(folder / IDENTITY)
    context.set_alpn_protocols(["h2"])
    try:
        _, said = await _shake_hands(host, port, context, host_name(peer))
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == OTHER_NAME:
            return await _explain_name(host, port, peer, context)
        if error.verify_code in (EXPIRED, NOT_YET):
            return (
                f"the certificate of {peer} at {where} has expired or is not valid yet; look at"
                f" the clocks, or use 'fedbcd certs rotate {peer}'"
            )
        return (
            f"whoever is at {where} has a certificate of another authority than the one in"
            f" {folder / CA}; issue {me} and {peer} by the same"
        )
    except ssl.SSLError:
        return (
            f"what is at {where} does not speak TLS (plain text, or another service); is the port"
            f" right, and is {peer} started without 'plain'?"
        )
    if not said:
        return (
            f"{peer} at {where} turns the certificate of {me} down; was it issued by the authority"
            f" in its {CA}, has it expired, are the clocks right?"
        )
    return f"{peer} at {where} ends the connection before an answer; its own log may say why"


async def _explain_name(host: str, port: int, peer: Actor, context: ssl.SSLContext) -> str:
    context.check_hostname = False
    der, _ = await _shake_hands(host, port, context, host_name(peer))
    name = "another service of this authority"
    with contextlib.suppress(CredentialsError, ValueError):
        name = identity_of(load_der_x509_certificate(der))
    return f"{name} is at {host}:{port}, not {peer}; look at the addresses in [deploy]"


async def _shake_hands(
    host: str, port: int, context: ssl.SSLContext, name: str | None
) -> tuple[bytes, bytes]:
    """The certificate of who is there, and what it says first: one that turns ours down hangs up
    after the handshake, others greet.
    """
    reader, writer = await asyncio.open_connection(
        host, port, ssl=context, server_hostname=name or host
    )
    try:
        found: ssl.SSLObject = writer.get_extra_info("ssl_object")
        return found.getpeercert(binary_form=True) or b"", await reader.read(1)
    finally:
        writer.transport.abort()
