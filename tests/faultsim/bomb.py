"""A peer that sends what is small on the wire and huge when inflated: `python -m faultsim.bomb
FOLDER ACTOR PEER BYTES`.

FOLDER holds its certificates. It reads the port from its input and prints one object a bomb: how it
was compressed, bytes, and the answer.
"""

import asyncio
import json
import sys
from contextlib import suppress
from pathlib import Path

import grpc

from fedbcd.engines.deploy.links.endpoint import SERVICE
from fedbcd.engines.deploy.links.fedbcd_pb2 import Frame, Hello
from fedbcd.engines.deploy.links.tls import Credentials, host_name


async def throw(credentials: Credentials, peer: str, port: int, size: int) -> None:
    """One of each kind."""
    bomb = Frame(hello=Hello(about="0" * size)).SerializeToString()
    options = [
        ("grpc.ssl_target_name_override", host_name(peer)),
        ("grpc.max_send_message_length", -1),
    ]
    for kind in (grpc.Compression.Gzip, grpc.Compression.Deflate, grpc.Compression.NoCompression):
        async with grpc.aio.secure_channel(
            f"127.0.0.1:{port}", credentials.for_dialler()[0], options=options
        ) as channel:
            call = channel.stream_stream(f"/{SERVICE}/Link")(compression=kind)
            with suppress(grpc.aio.AioRpcError):  # the call may have ended while it writes
                await call.write(bomb)
                await call.read()
            answer = f"{(await call.code()).name}: {await call.details()}"
        print(
            json.dumps({"compression": kind.name, "bytes": len(bomb), "answer": answer}), flush=True
        )


def main(folder: str, actor: str, peer: str, size: str) -> None:
    """Throw them at a port of this machine."""
    port = int(sys.stdin.readline())
    asyncio.run(throw(Credentials(Path(folder), actor), peer, port, int(size)))


if __name__ == "__main__":
    main(*sys.argv[1:])
