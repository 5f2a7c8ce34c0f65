"""What came out of a case as plain values, and where two outcomes differ."""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from golden.data import values
from golden.meant import Meant

SHADOWS = 1000  # the key of the directions that models are projected onto


def digest_of(tensor: Tensor) -> str:
    """A hash of its bits, dtype and shape."""
    head = repr((str(tensor.dtype), tuple(tensor.shape))).encode()
    return hashlib.sha256(
        head + tensor.contiguous().view(torch.uint8).numpy().tobytes()
    ).hexdigest()[:16]


def plain(found: Mapping[str, Any]) -> dict[str, Any]:
    """An outcome that can be written down: digests of models, tensor by tensor, instead of
    models.
    """
    models, tensors = found["models"], found["tensors"]
    digests = {
        f"{which} {name}": digest_of(models[which][:, a:b])
        for which in models
        for name, a, b in tensors
    }
    whole = {which: digest_of(models[which]) for which in models}
    rest = {key: value for key, value in found.items() if key not in ("models", "tensors")}
    return {**rest, "models": whole | digests}


def shadows(models: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Each model along a fixed direction of length 1: numbers that are near where models are
    near.
    """
    size = models["z"].shape[1]
    direction = values((size,), SHADOWS).double()
    direction /= direction.norm()
    return {which: (models[which].double() @ direction).tolist() for which in ("x", "z")}


def differences(
    before: Any, after: Any, where: str = "", meant: Sequence[Meant] = ()
) -> Iterator[str]:
    """Where two plain outcomes differ, beyond what is meant. What only the second has is no
    difference: the tree may say more than the wheel did, and where that had an empty list.
    """
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in before:
            place = f"{where}.{key}" if where else str(key)
            if key not in after:
                yield f"{place} is missing"
            else:
                yield from differences(before[key], after[key], place, meant)
    elif isinstance(before, list | tuple) and isinstance(after, list | tuple):
        if before and len(before) != len(after):
            yield f"{where} has {len(after)} entries, not {len(before)}"
        for number, (one, other) in enumerate(zip(before, after, strict=False)):
            yield from differences(one, other, f"{where}[{number}]", meant)
    elif not _same(before, after) and not any(m.covers(where, before, after) for m in meant):
        yield f"{where}: {_short(before)} before, {_short(after)} now"


def apart(before: Any, after: Any, bound: float, where: str = "") -> Iterator[str]:
    """Where numbers of two plain outcomes are farther apart than `bound`."""
    if isinstance(before, Mapping):
        for key in before:
            yield from apart(before[key], after[key], bound, f"{where}.{key}")
    elif isinstance(before, list | tuple):
        if len(before) != len(after):
            yield f"{where} has {len(after)} entries, not {len(before)}"
            return
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from apart(one, other, bound, f"{where}[{number}]")
    elif isinstance(before, float) and isinstance(after, float | int):
        if not _same(before, after) and not abs(before - after) <= bound * max(1.0, abs(before)):
            yield f"{where}: {before!r} before, {after!r} now"
    elif before != after:
        yield f"{where}: {_short(before)} before, {_short(after)} now"


def farthest(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> str:
    """How far models are from each other, for people."""
    found = []
    for which in before:
        one, other = before[which], after[which]
        if one.shape != other.shape or one.dtype != other.dtype:
            found.append(
                f"{which} is {tuple(other.shape)} of {other.dtype}, not {tuple(one.shape)} of"
                f" {one.dtype}"
            )
        else:
            found.append(
                f"{which} by up to {float((one.double() - other.double()).abs().max()):.2g}"
            )
    return "models differ: " + ", ".join(found)


def _same(one: Any, other: Any) -> bool:
    both_nan = (
        isinstance(one, float)
        and isinstance(other, float)
        and math.isnan(one)
        and math.isnan(other)
    )
    return both_nan or (one == other and isinstance(one, bool) == isinstance(other, bool))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else f"{text[:157]}..."
