"""A TCP proxy with moods. Lines on its input change them: `PORT MODE`, e.g. `23001 slow`.

open: passes everything; up, down: one way is dead; slow: 30 kB/s; reset: all connections of this
port are aborted, then open. `python -m faultsim.proxy 23001:23002 ...` listens at the first of each
pair and dials the second.
"""

import asyncio
import contextlib
import sys

RATE = 30_000


class Door:
    """One port."""

    def __init__(self, port: int, to: int) -> None:
        self.port = port
        self.to = to
        self.mode = "open"
        self._writers: set[asyncio.StreamWriter] = set()

    async def listen(self) -> None:
        """For ever."""
        await asyncio.start_server(self._connected, "127.0.0.1", self.port)

    def set(self, mode: str) -> None:
        """Another mood."""
        self.mode = "open" if mode == "reset" else mode
        if mode == "reset":
            for writer in [*self._writers]:
                writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.to)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, back}
        await asyncio.gather(self._pass(reader, back, "up"), self._pass(there, writer, "down"))
        self._writers -= {writer, back}

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(16384):
                while self.mode == way:
                    await asyncio.sleep(0.05)
                if self.mode == "slow":
                    await asyncio.sleep(len(data) / RATE)
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


async def main(pairs: list[str]) -> None:
    """Serve until the input ends."""
    doors = {}
    for pair in pairs:
        port, to = map(int, pair.split(":"))
        doors[port] = Door(port, to)
        await doors[port].listen()
    print("ready", flush=True)
    orders = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(orders), sys.stdin
    )
    while line := (await orders.readline()).decode().split():
        doors[int(line[0])].set(line[1])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
