"""Connections that are opened and then say nothing, in a process of its own: `python -m
faultsim.idle NUMBER`.

It reads the port from its input and holds the connections until that ends.
"""

import socket
import sys


def main(port: int, number: int) -> None:
    """Half of them begin a TLS handshake and stop."""
    held = []
    for k in range(number):
        try:
            one = socket.create_connection(("127.0.0.1", port), timeout=180)
        except OSError:
            break
        if k % 2:
            one.sendall(b"\x16\x03\x01\x02\x00\x01\x00")
        held.append(one)
    print(len(held), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(int(sys.stdin.readline()), int(sys.argv[1]))
