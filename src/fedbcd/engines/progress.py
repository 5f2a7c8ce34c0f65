"""What somebody who looks on at a run is told after every round; its models are made when they are
asked for.
"""

from dataclasses import dataclass, field

from torch import Tensor, nn

from fedbcd.compute.numbers import Numbers
from fedbcd.compute.players import Player
from fedbcd.data.federation import Federation
from fedbcd.engines.look import tested
from fedbcd.engines.result import Models
from fedbcd.errors import ConfigError
from fedbcd.record.history import ACCURACY, Row
from fedbcd.schedule.driver import Machines


class LiveModels(Models):
    """Those of a run that goes on, as they are after its present round."""

    def __init__(
        self, federation: Federation, seed: int, numbers: Numbers, machines: Machines
    ) -> None:
        self.federation, self._seed = federation, seed
        self._numbers, self._machines = numbers, machines
        self.player: Player | None = None  # that plays the rounds

    @property
    def seed(self) -> int:
        return self._seed

    def after(self, round_: int) -> "LiveModels":
        """These models, while that round is the present one."""
        if self.player is None or self.player.round != round_:
            raise ConfigError(
                f"the run has gone on since round {round_}, and its models with it; ask for them"
                " within on_round, and keep what you need"
            )
        self.player.settle()
        return self

    def all_global(self) -> Tensor:
        return self._numbers.global_VF().cpu()

    def one_personal(self, device: int) -> Tensor:
        return tested(self._numbers, {device: self._machines.home[device]})[device].cpu()


@dataclass(frozen=True)
class Progress:
    """Told after every round."""

    round: int
    clock: float
    fraction: float  # of the run that is done
    latest: Row  # the latest evaluation
    row: Row | None = None  # the same, where this round was looked at
    models: LiveModels | None = field(default=None, repr=False, compare=False)
    measure: str = ACCURACY  # the first, by which the run is judged

    def global_model(self, server: int | None = None) -> nn.Module:
        """A server's model after this round, as a module; without a number the mean of all."""
        models = self._models()
        return models.global_model if server is None else models.server_model(server)

    def personal_model(self, device: int) -> nn.Module:
        """A device's own model after this round, as it is tested."""
        return self._models().personal_model(device)

    def _models(self) -> LiveModels:
        if self.models is None:
            raise ConfigError("this progress was not made by a run, so there are no models")
        return self.models.after(self.round)
