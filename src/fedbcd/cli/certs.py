"""The commands of the certificate authority: `fedbcd certs init | issue | rotate | revoke | list`.
Keys are never printed.
"""

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedbcd.cli.commands import add_command
from fedbcd.cli.output import say, show, table_of
from fedbcd.errors import ConfigError

if TYPE_CHECKING:
    from fedbcd.engines.deploy.links.certs import Authority

certs_app = typer.Typer(
    no_args_is_help=True, help="Certificates of a deployment: who may act as whom."
)
Folder = Annotated[Path, typer.Option("--dir", help="Folder of the authority.")]
Identities = Annotated[
    list[str],
    typer.Argument(help="device/7, server/3, coordinator, operator; device/0-99 for many."),
]
Days = Annotated[int, typer.Option(help="Days until the certificates expire.")]


def init_command(
    folder: Folder = Path("certs"),
    days: Annotated[int, typer.Option(help="Days until the authority expires.")] = 3650,
) -> None:
    """Make a certificate authority. Its ca.key opens everything: keep it off the machines of the
    roles.
    """
    from fedbcd.engines.deploy.links.certs import Authority

    Authority.create(folder, days)
    say(
        f"a new authority is in {folder}; next: fedbcd certs issue coordinator server/0 device/0"
        f" --dir {folder}",
        Console(),
    )


def issue_command(
    identities: Identities,
    folder: Folder = Path("certs"),
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="Host name or IP address of a server, for tools that look for one; repeat."
        ),
    ] = None,
    at: Annotated[
        str | None,
        typer.Option(help="The only server at which these devices may act, such as server/3."),
    ] = None,
    days: Days = 365,
) -> None:
    """Make key and certificate of new identities, each in a folder of its own."""
    authority = _authority(folder)
    for identity in expand(identities):
        made = authority.issue(identity, hosts=host or (), at=at, days=days)
        say(f"{identity}: hand {made} to its process, over a safe way", Console())


def rotate_command(
    identities: Identities,
    folder: Folder = Path("certs"),
    days: Days = 365,
    revoke_old: Annotated[
        bool, typer.Option("--revoke-old", help="Lock the old certificates out at once.")
    ] = False,
) -> None:
    """Replace keys and certificates. Processes use the new ones for new connections, without a
    restart.
    """
    authority = _authority(folder)
    for identity in expand(identities):
        made = authority.rotate(identity, days=days, revoke_old=revoke_old)
        say(f"{identity}: copy {made} over the old one", Console())


def revoke_command(identities: Identities, folder: Folder = Path("certs")) -> None:
    """Lock identities out: new connections are refused, open ones end as soon as a role sees the
    new list.
    """
    authority = _authority(folder)
    for identity in expand(identities):
        count = authority.revoke(identity)
        say(f"{identity}: {count} certificate{'s' if count > 1 else ''} revoked", Console())
    say(f"copy {folder / 'crl.pem'} to every role", Console())


def list_command(
    folder: Folder = Path("certs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON array.")] = False,
) -> None:
    """Show what was issued, until when it is good, and what was revoked."""
    issued = _authority(folder).issued()
    if as_json:
        print(json.dumps([asdict(entry) for entry in issued]))
        return
    now = datetime.now(UTC).isoformat()
    names = ("identity", "serial number", "good until", "")
    table = table_of(*names, words=names, plain=True)
    for entry in issued:
        state = "revoked" if entry.revoked else "expired" if entry.until < now else ""
        table.add_row(entry.identity, entry.serial, entry.until[:16].replace("T", " "), state)
    show(table, Console())


def expand(identities: list[str]) -> list[str]:
    """Identities with ranges written out: `device/0-2` is device/0, device/1 and device/2."""
    found: list[str] = []
    for text in identities:
        kind, slash, numbers = text.partition("/")
        first, dash, last = numbers.partition("-")
        if not dash:
            found.append(text)
        elif first.isdecimal() and last.isdecimal() and 0 <= int(last) - int(first) < 1_000_000:
            found += [f"{kind}{slash}{number}" for number in range(int(first), int(last) + 1)]
        else:
            raise ConfigError(f"{text!r} is no range of identities; write device/0-99")
    return found


def _authority(folder: Path) -> "Authority":
    from fedbcd.engines.deploy.links.certs import Authority

    return Authority(folder)


for _name, _command in (
    ("init", init_command),
    ("issue", issue_command),
    ("rotate", rotate_command),
    ("revoke", revoke_command),
    ("list", list_command),
):
    add_command(certs_app, _name, _command)
