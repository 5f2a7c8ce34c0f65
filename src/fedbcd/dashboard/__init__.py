"""The dashboard: the views of the report, live, for a simulation that goes on or a real deployment.
It reads, and changes nothing.

`library` finds runs and follows the logs of those that are looked at, `deployment` asks the roles
of a deployment over HTTP, `app` serves both to a browser. Needs the extra `dashboard` (starlette
and uvicorn).
"""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether a name is this machine itself; nothing is looked up, so that names cannot lie."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
