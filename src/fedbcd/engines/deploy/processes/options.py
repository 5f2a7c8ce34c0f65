"""The `[deploy]` table of a job file: where the roles are, whom they trust, how patient they are.

The file says it for everybody; an environment variable `FEDBCD_<KEY>` goes before the file, a flag
of the command before both.
"""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from fedbcd.config import build
from fedbcd.engines.deploy.links.addresses import split_address, split_list
from fedbcd.engines.deploy.roles.checks import REACH
from fedbcd.errors import ConfigError
from fedbcd.protocol.messages import COORDINATOR, Actor, number_of

PREFIX = "FEDBCD_"
Bounds = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Deploy:
    """Everything that a deployment needs beyond the job itself; times end in `_s` and are
    seconds.
    """

    folder: str = "fedbcd-state"  # what roles keep: one folder per role in it
    coordinator: str = "127.0.0.1:7400"  # host:port that servers dial
    servers: tuple[str, ...] = ()  # host:port of each server, in order, that its devices dial
    # host:port that this server or coordinator listens at, where it differs from what others dial
    listen: str = ""
    certificates: str | None = (
        None  # the folder that `fedbcd certs init` made, or this role's part of it
    )
    plain: bool = False  # plain text instead of TLS; on loopback only
    # host:port of /healthz, /readyz, /metrics and /status; port 0: any that is free
    health: str = "127.0.0.1:0"
    time_scale: float | None = (
        None  # seconds per unit of [clock], for experiments; left out: nothing is drawn
    )
    retry_s: Bounds = (
        1.0,
        120.0,
    )  # bounds of the time after which a role asks, uploads or reports again
    lost_s: Bounds = (
        10.0,
        3600.0,
    )  # bounds of the time after which a server gives an activated device up
    peer_s: Bounds = (10.0, 15.0)  # bounds of the time after which a silent connection is closed
    least_rate: float = 1000.0  # bytes a second; a model that moves more slowly stands still
    epoch: float = 0.0  # Unix time from which the clock of the run counts, the same for all roles
    offline_every_s: float = (
        60.0  # FedBCD-I: seconds between offline rounds of a device, where nothing is drawn
    )
    norm_limit: float | None = None  # of models that arrive; what is beyond is ...
    beyond_norm: Literal["refuse", "warn"] = (
        "refuse"  # ... turned down, or taken with a remark in the log
    )
    reach_limit: float = REACH  # how far an upload may be from z_n, in norms of z_n; inf: no bound
    reserve_mb: float = 16.0  # free on its disk, below which a role ends; 0: it goes on until full
    operator: str = "operator"  # whose certificate operators' commands use, such as operator/alice
    absent_s: float = 604_800.0  # a device away for so long is proposed for dismissal
    dismiss_absent: bool = False  # and dismissed
    late: tuple[int, ...] = ()  # devices that are no members until they are admitted
    # where devices bring data of their own, the number of samples of each; nobody loads [data]
    samples: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in (*(("listen",) if self.listen else ()), "health"):
            split_address(getattr(self, name), f"deploy.{name}")
        for one in split_list(self.coordinator):
            split_address(one, "deploy.coordinator")
        for n, address in enumerate(self.servers):
            for one in split_list(address):
                split_address(one, f"deploy.servers[{n}]")
        for name in ("retry_s", "lost_s", "peer_s"):
            low, high = getattr(self, name)
            if not 0 < low <= high < math.inf:
                raise ConfigError(
                    f"deploy.{name} = {[low, high]} must be two numbers with 0 < least <= most"
                )
        for name in ("absent_s", "time_scale", "offline_every_s", "norm_limit", "least_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"deploy.{name} = {value} must be above 0")
        if not 0 <= self.reserve_mb < math.inf:
            raise ConfigError(f"deploy.reserve_mb = {self.reserve_mb} must be 0 or more")
        if not self.reach_limit > 0:
            raise ConfigError(
                f"deploy.reach_limit = {self.reach_limit} must be above 0; inf is no bound"
            )

    def sizes(self, devices: int) -> list[int]:
        sizes = (
            [self.samples] * devices if isinstance(self.samples, int) else [*(self.samples or ())]
        )
        if len(sizes) != devices or not all(size >= 1 for size in sizes):
            raise ConfigError(
                f"deploy.samples = {self.samples} must be a number of samples, or one for each of"
                f" the {devices} devices"
            )
        return sizes

    def folder_of(self, actor: Actor) -> Path:
        return Path(self.folder) / actor.replace("/", "-")

    def address_of(self, actor: Actor) -> str:
        if actor == COORDINATOR:
            return self.coordinator
        number = number_of(actor)
        if number >= len(self.servers):
            raise ConfigError(
                f"deploy.servers names {len(self.servers)} addresses, none for server {number}; add"
                " one per server, in order"
            )
        return self.servers[number]

    def addresses_of(self, actor: Actor) -> list[str]:
        """Where to dial an actor: one address, or several with commas between them, tried in
        turn.
        """
        return split_list(self.address_of(actor))

    def certificates_of(self, actor: Actor) -> Path:
        """The folder of certificates; a role finds its own part in it."""
        if self.certificates is None:
            raise ConfigError(
                f"{actor} has no certificates; name their folder as deploy.certificates, or make"
                " one with 'fedbcd certs init'"
            )
        return Path(self.certificates)

    def listens_at(self, actor: Actor) -> tuple[str, int]:
        return split_address(self.listen or self.addresses_of(actor)[0], "deploy.listen")

    def check_servers(self, servers: int) -> None:
        if len(self.servers) != servers:
            raise ConfigError(
                f"deploy.servers names {len(self.servers)} addresses, but the job has {servers}"
                " servers; name one each"
            )


def merge_options(
    table: Mapping[str, Any], environment: Mapping[str, str], flags: Mapping[str, Any]
) -> Deploy:
    """The options of a process: flags before environment before file. None among the flags means
    not given.
    """
    names = {f.name for f in fields(Deploy)}
    asked = {
        name: environment[PREFIX + name.upper()]
        for name in sorted(names)
        if PREFIX + name.upper() in environment
    }
    given = {name: value for name, value in flags.items() if value is not None}
    return build(
        Deploy,
        {**table, **{name: _value(name, text) for name, text in asked.items()}, **given},
        "deploy",
    )


def _value(name: str, text: str) -> Any:
    """An environment variable as TOML would read it; what TOML cannot read is a text."""
    if name in ("folder", "coordinator", "listen", "certificates", "health", "operator"):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        raise ConfigError(
            f"{PREFIX}{name.upper()}={text} is not a TOML value, such as 1.5, true or [1.0, 60.0]"
        ) from None
