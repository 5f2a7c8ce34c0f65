"""What an operator asks of a listener: how it is doing, and to admit or dismiss a device."""

import asyncio
from collections.abc import Awaitable
from typing import Any

from fedbcd.engines.deploy.links.addresses import split_address
from fedbcd.engines.deploy.links.endpoint import SERVICE, words
from fedbcd.engines.deploy.links.fedbcd_pb2 import (
    ChangeReply,
    ChangeRequest,
    StatusReply,
    StatusRequest,
)
from fedbcd.engines.deploy.links.refusals import MissingExtra, RefusedForGood
from fedbcd.engines.deploy.links.tls import Plain, Security, check_plain, host_name
from fedbcd.engines.deploy.links.traffic import parse_text
from fedbcd.errors import Refused
from fedbcd.protocol.messages import Actor

try:
    import grpc
except ImportError as missing:
    raise MissingExtra(missing.name or "grpcio") from None


class NoAnswer(Refused):
    """Nothing is heard of a role: is it the network, or does its process stand still?"""

    def __init__(self, peer: Actor, address: str) -> None:
        super().__init__("unreachable", f"{peer} does not answer at {address} (network?)")


async def request_status(
    peer: Actor, address: str, security: Security, timeout_s: float = 10.0
) -> dict[str, Any]:
    async with _operator_channel(peer, address, security) as channel:
        ask = channel.unary_unary(
            f"/{SERVICE}/Status", StatusRequest.SerializeToString, StatusReply.FromString
        )
        call = asyncio.wait_for(ask(StatusRequest(), timeout=timeout_s), timeout_s)
        reply: StatusReply = await _answered(call, peer, address)
    return parse_text(reply.body)


async def ask_change(
    peer: Actor, address: str, security: Security, what: str, device: int, timeout_s: float = 30.0
) -> bool:
    """Let a server admit or dismiss a device; whether that changed anything. Once it returns it is
    durable.
    """
    async with _operator_channel(peer, address, security) as channel:
        ask = channel.unary_unary(
            f"/{SERVICE}/Change", ChangeRequest.SerializeToString, ChangeReply.FromString
        )
        reply: ChangeReply = await _answered(
            ask(ChangeRequest(what=what, device=device), timeout=timeout_s), peer, address
        )
    return bool(reply.changed)


async def _answered(call: Awaitable[Any], peer: Actor, address: str) -> Any:
    try:
        return await call
    except TimeoutError:
        raise NoAnswer(peer, address) from None
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.PERMISSION_DENIED:
            raise RefusedForGood(str(error.details())) from None
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            raise Refused("change", str(error.details())) from None
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise NoAnswer(peer, address) from None
        raise Refused(
            "unreachable", f"{peer} does not answer at {address}: {_reason(error)}"
        ) from None


def _reason(error: grpc.aio.AioRpcError) -> str:
    """The last and only telling part of what gRPC says, such as: Connection refused."""
    said = words(error).rpartition("last error: ")[2]
    return said.rpartition("remote host: ")[2] if "remote host: " in said else said


def _operator_channel(peer: Actor, address: str, security: Security) -> grpc.aio.Channel:
    host, _ = split_address(address)
    options: list[tuple[str, int | str]] = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]
    if isinstance(security, Plain):
        check_plain(host)
        return grpc.aio.insecure_channel(address, options=options)
    options.append(("grpc.ssl_target_name_override", host_name(peer)))
    return grpc.aio.secure_channel(address, security.for_dialler()[0], options=options)
