"""How pools are shared out (docs/determinism.md): addressed choices, whole numbers in proportion,
Dirichlet proportions; and dealing a pool out by labels, where every device gets exactly the
labels and samples asked for, and every sample goes to one device at most.

Who then owns which labels is drawn like cards from a deck that holds each label as often as its
samples can serve. How many samples of each is a flow from devices to labels, as even as it can be.
Whole numbers only, so a deal is the same on every machine.
"""

import heapq
import math
from collections.abc import Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fedbcd.algorithm import draws
from fedbcd.errors import DataError

Counts = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Owned = npt.NDArray[np.bool_]  # (devices, labels)
DECKS = 64  # that are tried before a deal is given up
ATTEMPTS = 100  # each is accepted with a probability above 0.95, so 100 in a row are not refused


def smallest(stream: int, seed: int, device: int, items: Counts, count: int) -> Counts:
    """The `count` items with the smallest addressed draws, in ascending order."""
    items = items.astype(np.int64)
    keys = draws.unit(draws.address(seed, stream, np.array([device]), items))
    return np.sort(items[np.argsort(keys, kind="stable")[:count]])


def shuffled(seed: int, items: Counts) -> Counts:
    return items[np.argsort(draws.unit(draws.address(seed, draws.SHUFFLE, items)), kind="stable")]


def parts(weights: Floats, total: int) -> Counts:
    """Whole numbers that sum to `total`, in proportion to `weights`."""
    bounds = np.rint(np.cumsum(weights) / weights.sum() * total).astype(np.int64)
    bounds[-1] = total
    return np.asarray(np.diff(bounds, prepend=0))


def cut(items: Counts, weights: Floats) -> list[Counts]:
    """The items in consecutive pieces, in proportion to `weights`."""
    return np.split(items, np.cumsum(parts(weights, len(items)))[:-1])


def fill(weights: Floats, total: int, room: Counts) -> Counts:
    """`parts`, but none above its `room`; what does not fit goes to the others in proportion."""
    counts = np.zeros_like(room)
    while (left := total - int(counts.sum())) > 0:
        free = counts < room
        still = np.where(free, weights, 0.0)
        counts += np.minimum(
            parts(still if still.sum() > 0 else free.astype(np.float64), left), room - counts
        )
    return counts


def proportions(seed: int, alpha: float, rows: int, columns: int) -> Floats:
    """`rows` independent draws of Dirichlet(alpha, ..., alpha) over `columns` parts; each row sums
    to 1.
    """
    logs = _log_gamma(seed, alpha, rows, columns)
    weights = np.exp(
        logs - logs.max(axis=1, keepdims=True)
    )  # by logarithms, for at a small alpha the variates themselves are 0
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))


def _log_gamma(seed: int, alpha: float, rows: int, columns: int) -> Floats:
    """Logarithms of Gamma(alpha) variates by Marsaglia and Tsang (2000): propose d v, v = (1 + c
    x)^3 with x normal, until accepted.

    Below alpha = 1, Gamma(alpha) is Gamma(alpha + 1) times u^(1 / alpha), u uniform.
    """
    row, column = (
        part.ravel() for part in np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
    )
    d = (alpha if alpha >= 1 else alpha + 1) - 1 / 3
    c = 1 / math.sqrt(9 * d)
    logs = np.empty(rows * columns)
    pending = np.arange(rows * columns)
    for attempt in range(ATTEMPTS):
        u, angle, accept = (
            _units(seed, row[pending], column[pending], attempt, part) for part in range(3)
        )
        x = np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * angle)
        v = np.maximum(1 + c * x, 1e-300) ** 3
        taken = (1 + c * x > 0) & (
            np.log(accept) < x**2 / 2 + d - d * v + d * np.log(np.maximum(v, 1e-300))
        )
        logs[pending[taken]] = np.log(d * v[taken])
        pending = pending[~taken]
        if not len(pending):
            break
    else:
        raise DataError(
            f"no Gamma variate of alpha={alpha} after {ATTEMPTS} attempts; use another seed"
        )
    if alpha < 1:
        logs += np.log(_units(seed, row, column, 0, 3)) / alpha
    return logs.reshape(rows, columns)


def _units(seed: int, row: Counts, column: Counts, attempt: int, part: int) -> Floats:
    return draws.unit(
        draws.address(seed, draws.GAMMA, row, column, np.array([attempt]), np.array([part]))
    )


# ------------------------------------------------------------------------------------------------
# by labels
def deal_counts(
    of_label: Mapping[int, int], devices: int, labels: int, samples: int, seed: int
) -> Counts:
    """How many samples of each label each device gets, (devices, labels), from a pool with
    `of_label` samples of each label. A deal is found wherever it leaves a sample over; one that
    must use up labels of one or two samples to the last may be missed.
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
    if first.sum() < devices * labels:  # not even one sample of a label for each who needs it
        scarce = int(np.argmin(room))
        why = f"{room[scarce]} samples, so that at most {room[scarce]} devices can own it"
    else:
        scarce = int(np.argmin(room / np.maximum(first, 1)))
        why = f"{room[scarce]} samples for {first[scarce]} devices"
    raise DataError(
        f"{devices} devices cannot get {samples} samples of exactly {labels} labels each without"
        f" sharing any: label {[*of_label][scarce]} runs out, of which there are {why}; use"
        " fewer devices or samples, another diversity,"
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
