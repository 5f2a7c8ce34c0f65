"""Addresses of roles: `host:port`."""

from fedbcd.errors import ConfigError


def split_list(addresses: str) -> list[str]:
    """Several addresses in one text, with commas between them."""
    return [address.strip() for address in addresses.split(",")]


def split_address(address: str, where: str = "the address") -> tuple[str, int]:
    """Host and port of `host:port`, `127.0.0.1:7400` or `[::1]:7400`; `where` names its setting."""
    host, _, port = address.rpartition(":")
    if not (host and not set(host) & set(" \t,;/") and port.isdecimal() and int(port) < 65_536):
        raise ConfigError(
            f"{where} = {address!r} must be host:port, such as 10.0.0.5:7400 or [::1]:7400"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)
