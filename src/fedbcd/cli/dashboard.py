"""`fedbcd dashboard`: the web server is loaded only when it runs."""

import contextlib
import secrets
import socket
from pathlib import Path
from typing import Annotated

import typer

from fedbcd.cli.output import note, say
from fedbcd.dashboard import is_loopback
from fedbcd.errors import ConfigError


def dashboard_command(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="A run, a folder of runs, or the folder of 'fedbcd up' (default: runs)."
        ),
    ] = None,
    connect: Annotated[
        list[str] | None,
        typer.Option(
            help="host:port where a role of a deployment tells its /status; may be repeated."
        ),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Where to listen; anything but this machine itself needs a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port; 0 takes any that is free.")] = 8050,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="FEDBCD_DASHBOARD_TOKEN",
            help="The token to ask for (default: a new one, where one is needed).",
        ),
    ] = None,
) -> None:
    """Show runs and deployments live in a browser, as the report shows them finished. It only
    reads; Ctrl-C ends it.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn
    except ImportError as error:
        raise ConfigError(
            f"the dashboard needs {error.name}; pip install 'fedbcd[dashboard]'"
        ) from None
    from fedbcd.dashboard.app import make_app
    from fedbcd.dashboard.deployment import WatchedDeployment
    from fedbcd.dashboard.library import Library

    token = _token(token, host)
    paths = [folder] if folder is not None else [] if connect else [Path("runs")]
    for path in paths:
        if not path.exists():
            raise ConfigError(
                f"there is no folder {path}; give one that holds runs, or --connect host:port"
            )
    up = folder if folder is not None and (folder / "state").is_dir() else None
    deployment = WatchedDeployment(connect or [], up) if connect or up is not None else None
    if deployment is not None:
        deployment.start()
    config = uvicorn.Config(
        make_app(Library(paths), deployment, token), log_level="warning", access_log=False
    )
    listener = _listen(host, port)
    address = _address(listener) + (f"?token={token}" if token is not None else "")
    say(f"dashboard at {address}")
    if not is_loopback(host):
        note(
            "this is plain HTTP; on a network that you do not trust, put a proxy with TLS in"
            " front of it"
        )
    with contextlib.suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])
    if deployment is not None:
        deployment.stop()


def _token(token: str | None, host: str) -> str | None:
    """What to ask for; a new one where one is needed and none was given."""
    if token is None and not is_loopback(host):
        return secrets.token_urlsafe(24)
    if token is not None and len(token) < 16:
        raise ConfigError(
            f"a token of {len(token)} characters is too easy to guess; use 16 or more"
        )
    return token


def _address(listener: socket.socket) -> str:
    place = listener.getsockname()
    name = socket.gethostname() if place[0] in ("0.0.0.0", "::") else place[0]
    return f"http://[{name}]:{place[1]}/" if ":" in name else f"http://{name}:{place[1]}/"


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot listen at {host}:{port}: {reason}; choose another --port, or 0 for any that is"
            " free"
        ) from None
    return listener
