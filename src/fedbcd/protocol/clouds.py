"""The clouds a user can choose, as plain values; each knows how to make its coordinator."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedbcd.errors import ConfigError
from fedbcd.protocol.coordinator import (
    AsyncCoordinator,
    Coordinator,
    RigorousCoordinator,
    SyncCoordinator,
)

Weights = tuple[tuple[float, ...], ...]  # a_nm: a row for each server of a mix


class _PlainMean:
    """Clouds that mix by the mean."""

    __slots__ = ()

    def weights(self, round_: int, servers: Sequence[int]) -> Weights | None:  # noqa: ARG002
        """a_nm for the servers of a mix; None: 1 / how many they are."""
        return None


@dataclass(frozen=True, slots=True)
class SyncCloud(_PlainMean):
    """All servers wait for all: one global model, updated when the last server has reported."""

    name: ClassVar[str] = "sync"
    sync: ClassVar[bool] = True

    def coordinator(self, servers: int, iterations: int) -> Coordinator:
        return SyncCoordinator(range(servers), iterations)


@dataclass(frozen=True, slots=True)
class AsyncCloud(_PlainMean):
    """The first B = `first` servers to finish are mixed; the others go on undisturbed."""

    first: int
    name: ClassVar[str] = "async"
    sync: ClassVar[bool] = False

    def coordinator(self, servers: int, iterations: int) -> Coordinator:
        _check_first(self.first, servers)
        return AsyncCoordinator(range(servers), self.first, iterations)


@dataclass(frozen=True, slots=True)
class RigorousCloud(_PlainMean):
    """Appendix A: numbered rounds; the first B = `first` are mixed, the others finish their phase
    and step alone.
    """

    first: int
    name: ClassVar[str] = "rigorous"
    sync: ClassVar[bool] = False

    def coordinator(self, servers: int, iterations: int) -> Coordinator:
        _check_first(self.first, servers)
        return RigorousCoordinator(range(servers), self.first, iterations)


@dataclass(frozen=True, slots=True)
class GraphCloud:
    """Eq. (6) with your own mixing coefficients a_nm: all servers exchange along a graph. Rows and
    columns sum to one.

    `mixing` is one matrix, or several that are used in turn (a_nm may vary with the round,
    Assumption 3).
    """

    mixing: tuple[tuple[tuple[float, ...], ...], ...]
    name: ClassVar[str] = "graph"
    sync: ClassVar[bool] = False

    def __init__(
        self, mixing: Sequence[Sequence[float]] | Sequence[Sequence[Sequence[float]]]
    ) -> None:
        matrices = (
            mixing if mixing and mixing[0] and isinstance(mixing[0][0], Sequence) else [mixing]
        )
        plain = tuple(tuple(tuple(float(a) for a in row) for row in matrix) for matrix in matrices)  # type: ignore[union-attr, arg-type]
        object.__setattr__(self, "mixing", plain)

    def coordinator(self, servers: int, iterations: int) -> Coordinator:
        for matrix in self.mixing:
            widths = [len(row) for row in matrix]
            if widths != [servers] * servers:
                raise ConfigError(
                    f"mixing has rows of {widths} numbers; {servers} servers need {servers} rows of"
                    f" {servers} numbers"
                )
        return AsyncCoordinator(range(servers), servers, iterations, alike=False)

    def weights(self, round_: int, servers: Sequence[int]) -> Weights:
        matrix = self.mixing[round_ % len(self.mixing)]
        return tuple(tuple(matrix[n][k] for k in servers) for n in servers)


Cloud = SyncCloud | AsyncCloud | RigorousCloud | GraphCloud
CLOUDS: dict[str, type[SyncCloud] | type[AsyncCloud] | type[RigorousCloud] | type[GraphCloud]] = {
    kind.name: kind for kind in (SyncCloud, AsyncCloud, RigorousCloud, GraphCloud)
}


def _check_first(first: int, servers: int) -> None:
    if not 1 <= first <= servers:
        raise ConfigError(
            f"first={first} must be between 1 and the {servers} servers; to wait for all, use"
            " SyncCloud()"
        )
