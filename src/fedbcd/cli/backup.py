"""The commands `fedbcd backup | restore`: copies of what roles keep, and roles that go on from them
(docs/recovery.md).
"""

import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedbcd.cli.deploy import Deployed, read_deployment
from fedbcd.cli.output import Trust, say
from fedbcd.errors import ConfigError
from fedbcd.own import imports
from fedbcd.protocol.messages import COORDINATOR, number_of
from fedbcd.record.names import LOG

if TYPE_CHECKING:
    from fedbcd.engines.deploy.processes.assemble import Deployment

Stores = Annotated[
    list[Path], typer.Argument(help="Stores of roles on this machine, or folders that hold such.")
]


def backup_command(
    folders: Stores,
    out: Annotated[Path, typer.Option(help="A new folder for the copies, on another disk.")],
) -> None:
    """Copy stores while their roles run: each as it was after one event, checked whole."""
    from fedbcd.engines.deploy.local.growing_log import stores_in
    from fedbcd.engines.deploy.roles.backup import back_up

    stores = [store for folder in folders for store in stores_in(folder)]
    names = [store.name for store in stores]
    if len({*names}) < len(names):
        raise ConfigError(f"two of these stores have one name: {', '.join(sorted(names))}")
    out.mkdir(parents=True, exist_ok=True)
    for store in stores:
        length = back_up(store, out / store.name)
        say(f"{out / store.name}: {length} events", Console())


def restore_command(
    file: Deployed,
    role: Annotated[str, typer.Argument(help="coordinator, server/3 or device/7.")],
    backup: Annotated[
        Path | None, typer.Option("--from", help="The newest copy of its store that there is.")
    ] = None,
    coordinator: Annotated[
        Path | None,
        typer.Option(
            help="For a server: the store of its coordinator, or a copy of now. The server goes on"
            " under a new generation, and needs no backup."
        ),
    ] = None,
    servers: Annotated[
        list[Path] | None,
        typer.Option(
            "--server",
            help="For the coordinator: the store of a server, or a copy of now; repeat for all, in"
            " order. Its log is put together from theirs, and it needs no backup.",
        ),
    ] = None,
    folder: Annotated[
        str | None, typer.Option(help="Where roles keep their stores, as for the role itself.")
    ] = None,
    trust: Trust = False,
) -> None:
    """Give a role that has lost its store, or has a damaged one, another one; it must not run."""
    with imports(allowed=trust):
        deployment = read_deployment(file, {"folder": folder})
    if role != COORDINATOR and not role.startswith(("server/", "device/")):
        raise ConfigError(f"{role!r} is no role; such are coordinator, server/3 and device/7")
    deployment.check_actor(role)
    if coordinator is not None and not role.startswith("server/"):
        raise ConfigError(f"--coordinator is for servers; leave it out for {role}")
    if servers and role != COORDINATOR:
        raise ConfigError(f"--server is for the coordinator; leave it out for {role}")
    if servers and backup is not None:
        raise ConfigError("a coordinator is rebuilt from its servers, or from a copy: not both")
    if backup is None and coordinator is None and not servers:
        raise ConfigError(f"nothing to restore {role} from; name a copy of its store with --from")
    said = _restore(deployment, role, backup, coordinator, servers or ())
    for line in said:
        say(line, Console())
    if file.is_dir() and (file / LOG).exists():
        (file / LOG).rename(file / f"{LOG}.before-{int(time.time())}")
        say(f"{file / LOG} is written anew when the deployment goes on", Console())


def _restore(
    deployment: "Deployment",
    role: str,
    backup: Path | None,
    coordinator: Path | None,
    servers: Sequence[Path],
) -> list[str]:
    """Made beside its place, so that nothing is there unless all of it is."""
    from fedbcd.engines.deploy.roles.backup import check_free, put_back, take_place

    folder, said = deployment.options.folder_of(role), []
    check_free(folder)
    restored = folder.with_name(f".{folder.name}.restored")
    shutil.rmtree(restored, ignore_errors=True)
    if backup is not None:
        said.append(f"{role} has {put_back(backup, restored)} events of {backup}")
    if coordinator is not None:
        said.append(_begin_generation(deployment, role, coordinator, restored))
    elif servers:
        said.append(_rebuilt(deployment, servers, restored))
    elif not role.startswith("device/"):
        said.append("only the newest will do: its peers refuse it if they know of more")
    take_place(restored, folder)
    return said


def _begin_generation(
    deployment: "Deployment", role: str, coordinator: Path, restored: Path
) -> str:
    from fedbcd.engines.deploy.roles.filestore import FileStore
    from fedbcd.engines.deploy.roles.recovery import recover
    from fedbcd.engines.deploy.roles.server import ServerRole

    with ExitStack() as stack:
        known = FileStore(coordinator, read_only=True)
        stack.callback(known.close)
        store = FileStore(restored, begin=not restored.exists())
        stack.callback(store.close)
        server = ServerRole.open(store, deployment.blueprint, number_of(role))
        brought = recover(server, known, time.time() - deployment.options.epoch)
        return (
            f"{role} has {brought} events from the log of its coordinator; it goes on in phase"
            f" {server.machine.phase}, as generation {server.machine.generation}, and counts each"
            " device once it has contributed again"
        )


def _rebuilt(deployment: "Deployment", servers: Sequence[Path], restored: Path) -> str:
    from fedbcd.engines.deploy.roles.coordinator import CoordinatorRole
    from fedbcd.engines.deploy.roles.filestore import FileStore
    from fedbcd.engines.deploy.roles.rebuild import rebuild

    with ExitStack() as stack:
        known = [FileStore(server, read_only=True) for server in servers]
        for one in known:
            stack.callback(one.close)
        store = FileStore(restored, begin=True)
        stack.callback(store.close)
        role = CoordinatorRole.open(store, deployment.blueprint)
        rounds = rebuild(role, known, time.time() - deployment.options.epoch)
        return f"coordinator has {rounds} rounds, of which its servers knew"
