"""Dealing a pool out by labels: every device gets exactly so many labels and samples, and every
sample goes to one device at most.

Who owns which labels is drawn like cards from a deck that holds each label as often as its samples
can serve. How many samples of each is a flow from devices to labels, as even as it can be. Whole
numbers only, so a deal is the same on every machine (docs/determinism.md).
"""

import heapq
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fedbcd.algorithm import draws
from fedbcd.errors import DataError

Counts = npt.NDArray[np.int64]
Owned = npt.NDArray[np.bool_]  # (devices, labels)
DECKS = 64  # that are tried before a deal is given up


def deal_counts(
    of_label: Mapping[int, int], devices: int, labels: int, samples: int, seed: int
) -> Counts:
    """How many samples of each label each device gets, (devices, labels), where there are so many
    of each. A deal is found wherever it leaves a sample over; one that must use up labels of one or
    two samples to the last may be missed.
    """
    room = np.array([*of_label.values()], dtype=np.int64)
    _check(room, devices, labels, samples)
    first = _owners(room, devices, labels)
    owners = first.copy()
    for deck in range(DECKS if owners.sum() == devices * labels else 0):
        owned = _drawn(owners, devices, labels, seed, deck)
        found, spare = _as_even_as_can_be(owned, room, labels, samples)
        if found is not None:
            return found
        _move_a_card(owners, room, spare, devices)
    scarce = int(np.argmin(room / np.maximum(first, 1)))
    raise DataError(
        f"{devices} devices cannot get {samples} samples of exactly {labels} labels each without"
        f" sharing any: label {[*of_label][scarce]} runs out, of which there are {room[scarce]}"
        f" samples for {first[scarce]} devices; use fewer devices or samples, another diversity,"
        " or dealt=False, where devices may share samples"
    )


def _check(room: Counts, devices: int, labels: int, samples: int) -> None:
    if samples < labels:
        raise DataError(
            f"samples={samples} are too few for {labels} labels; use samples >= {labels}, one of"
            " each label at least"
        )
    if devices * samples > room.sum():
        raise DataError(
            f"{devices} devices with {samples} samples each need {devices * samples}, but there are"
            f" only {room.sum()} to deal out; use samples <= {room.sum() // devices}, or"
            " dealt=False, where devices may share samples"
        )


def _owners(room: Counts, devices: int, labels: int) -> Counts:
    """How many devices own each label, so that the label with the fewest samples per owner has as
    many as can be (d'Hondt's rule). Their sum is less than devices times labels if it cannot be.
    """
    owners = np.zeros_like(room)
    heap = [(-float(samples), label) for label, samples in enumerate(room.tolist())]
    heapq.heapify(heap)
    for _ in range(devices * labels):
        if not heap:
            break
        _, label = heapq.heappop(heap)
        owners[label] += 1
        if owners[label] < min(devices, room[label]):
            heapq.heappush(heap, (-float(room[label]) / float(owners[label] + 1), label))
    return owners


def _drawn(owners: Counts, devices: int, labels: int, seed: int, deck: int) -> Owned:
    """Who owns which labels: each device draws cards, none twice; a label that all who are left
    must have is taken first.
    """
    left = owners.copy()
    owned = np.zeros((devices, len(owners)), dtype=bool)
    for device in range(devices):
        mine = owned[device]
        mine |= left == devices - device
        for card in range(int(mine.sum()), labels):
            weights = np.cumsum(np.where(mine, 0, left))
            at = draws.below_one(seed, draws.DEAL, int(weights[-1]), deck, device, card)
            mine[int(np.searchsorted(weights, at, side="right"))] = True
        left -= mine
    return owned


def _move_a_card(owners: Counts, room: Counts, spare: Counts, devices: int) -> None:
    """From the scarcest label that ran out to the one that has most left, where it may have more
    owners.
    """
    more = np.where(owners < np.minimum(devices, room), spare, 0)
    fewer = np.where((spare <= 0) & (owners > 0), room / np.maximum(owners, 1), np.inf)
    if more.max() > 0 and fewer.min() < np.inf:
        owners[more.argmax()] += 1
        owners[fewer.argmin()] -= 1


# ------------------------------------------------------------------------------------------------
# the flow
def _as_even_as_can_be(
    owned: Owned, room: Counts, labels: int, samples: int
) -> tuple[Counts | None, Counts]:
    """Counts in the narrowest window around an even share that allows them, and what they leave;
    None: no window does.
    """

    def within(slack: int) -> tuple[Counts | None, Counts]:
        low, high = max(1, samples // labels - slack), -(-samples // labels) + slack
        return _flow(owned, room, samples, low, high)

    found, low, high = within(samples), 0, samples - 1
    while found[0] is not None and low <= high:
        middle = (low + high) // 2
        tried = within(middle)
        if tried[0] is None:
            low = middle + 1
        else:
            found, high = tried, middle - 1
    return found


def _flow(
    owned: Owned, room: Counts, samples: int, low: int, high: int
) -> tuple[Counts | None, Counts]:
    """Counts between low and high where a device owns a label, `samples` for each device, no more
    than there is room of each label, by augmenting paths; and what is left of each label. None: it
    cannot be.
    """
    counts = owned * np.int64(low)
    spare = room - counts.sum(axis=0)
    if (spare < 0).any():
        return None, spare
    for device in range(len(owned)):
        need = samples - int(counts[device].sum())
        while need > 0:
            mine = owned[device] & (counts[device] < high)
            path = _path(mine, spare, owned & (counts > low), owned & (counts < high))
            if path is None:
                return None, spare
            givers = [device, *(giver for giver, _ in path[1:])]
            taken = [label for _, label in path]
            amount = min(need, int(spare[taken[-1]]))
            for k, (giver, label) in enumerate(zip(givers, taken, strict=True)):
                amount = min(amount, high - int(counts[giver, label]))
                if k:
                    amount = min(amount, int(counts[giver, taken[k - 1]]) - low)
            for k, (giver, label) in enumerate(zip(givers, taken, strict=True)):
                counts[giver, label] += amount
                if k:
                    counts[giver, taken[k - 1]] -= amount
            spare[taken[-1]] -= amount
            need -= amount
    return counts, spare


def _path(mine: Owned, spare: Counts, gives: Owned, takes: Owned) -> list[tuple[int, int]] | None:
    """The shortest way from one of `mine` to a label with room: labels, each with the device that
    moves samples to it from the label before.
    """
    if (spare[mine] > 0).any():
        return [(-1, int(np.argmax(np.where(mine, spare, 0))))]
    moves = gives.T.astype(np.float32) @ takes.astype(np.float32) > 0
    before = {int(label): -1 for label in np.flatnonzero(mine)}
    for label in (queue := [*before]):
        if spare[label] > 0:
            path = [label]
            while before[path[0]] >= 0:
                path.insert(0, before[path[0]])
            movers = [int(np.argmax(gives[:, a] & takes[:, b])) for a, b in pairwise(path)]
            return [*zip([-1, *movers], path, strict=True)]
        for other in np.flatnonzero(moves[label]).tolist():
            if other not in before:
                before[other] = label
                queue.append(other)
    return None
