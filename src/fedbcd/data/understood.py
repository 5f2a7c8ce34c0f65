"""What people give to a federation, taken where it was reasonable: arrays, frames, lists of
tensors, numbers of any kind; and a sentence for what is none.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset, IterableDataset

from fedbcd.config import nearest, shown
from fedbcd.data.measures import KNOWN, Measure
from fedbcd.errors import ConfigError, DataError

SMALL = (torch.int8, torch.int16, torch.int32)  # of labels, which losses want as int64
LISTED = "give a list with the data of each device, [(inputs, targets), ...]"


def tensor_of(value: Any, what: str) -> Tensor:
    """Numbers as a plain tensor in this machine's memory, without a graph; `what` says of which
    these are, inputs or targets.
    """
    found = _as_tensor(value, what)
    for wrong, says in (
        (found.layout != torch.strided, "are sparse; give .to_dense() of them"),
        (found.is_complex(), "are complex; give torch.view_as_real of them"),
        (found.is_meta, "are on the meta device and have no values; load them"),
        (found.ndim == 0, "are one number; their first axis must count samples"),
    ):
        if wrong:
            raise DataError(f"its {what} {says}")
    here = found.device.type == "cpu" and not found.requires_grad
    return found if here else found.detach().cpu()


def _as_tensor(value: Any, what: str) -> Tensor:
    if hasattr(value, "to_numpy"):  # of pandas and its kin
        value = _of_frame(value, what)
    if isinstance(value, list | tuple) and value:
        if all(isinstance(each, Tensor) for each in value):
            value = torch.stack([each.detach() for each in value])
        elif all(isinstance(each, np.ndarray) for each in value):
            value = np.stack(value)
        elif any(isinstance(each, str) for each in value):
            value = np.array(value)
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc":
            raise DataError(f"its {what} are no numbers ({value.dtype}); number what they mean")
        value = np.require(value, requirements=["C", "W"])  # also backwards, or read-only
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise DataError(
            f"its {what} ({type(value).__name__}) cannot be made a tensor: {reason}; give numbers,"
            " of one shape for each sample"
        ) from None


def _of_frame(frame: Any, what: str) -> Any:
    """Its numbers; truth values beside numbers are 0 and 1."""
    found = frame.to_numpy()
    columns = getattr(frame, "columns", ())
    if found.dtype != object or not len(columns):
        return found
    texts = [name for name in columns if np.asarray(frame[name]).dtype.kind not in "biuf"]
    if texts:
        raise DataError(
            f"its {what} are no numbers in column {texts[0]!r}; number what it means, or leave it"
            " out"
        )
    return np.stack([np.asarray(frame[name], dtype=np.float64) for name in columns], axis=1)


def labels_as_int64(targets: Tensor) -> Tensor:
    """Smaller whole numbers, as arrays of other libraries have them, as losses want labels."""
    return targets.long() if targets.dtype in SMALL else targets


def listed(devices: Any) -> list[Any]:
    """The data of each device, in order."""
    if isinstance(devices, Mapping):
        if {*devices} != {*range(len(devices))}:
            raise DataError(
                f"devices has the keys {', '.join(map(repr, [*devices][:3]))}, ...; devices are"
                " numbered from 0: give list(devices.values())"
            )
        return [devices[number] for number in range(len(devices))]
    if isinstance(devices, str | Path):
        raise DataError(f"devices = {str(devices)!r} is a path; read what is there, and {LISTED}")
    arrays = Tensor, np.ndarray
    pair = isinstance(devices, tuple) and any(isinstance(part, arrays) for part in devices)
    whole = isinstance(devices, (*arrays, Dataset, DataLoader))
    if pair or whole or hasattr(devices, "to_numpy") or _is_loaded(devices):
        raise DataError(
            f"devices is one {type(devices).__name__}, not one for each device; {LISTED}, or split"
            " it (Federation.from_partition)"
        )
    try:
        return [*devices]
    except TypeError:
        raise DataError(f"devices = {shown(devices)} is no list; {LISTED}") from None


def check_kind(data: Any) -> None:
    """Refuse what is not the data of one device."""
    pairs = "give (inputs, targets)"
    if isinstance(data, str | Path):
        raise DataError(f"{data!s:.80} is a path; read it, and {pairs}")
    for wrong, says in (
        (data is None, f"there are none; {pairs}, or leave it out"),
        (
            isinstance(data, Mapping),
            f"it is a mapping with {_first_keys(data)}; {pairs}",
        ),
        (
            isinstance(data, DataLoader),
            "it is a DataLoader, and devices draw their batches themselves; give its .dataset",
        ),
        (isinstance(data, IterableDataset), f"it has no length; read it, and {pairs}"),
        (isinstance(data, Tensor | np.ndarray), f"it is one array, without targets; {pairs}"),
        (_is_loaded(data), "it is a whole data set; give its .train, or its .test"),
        (
            isinstance(data, tuple) and len(data) != 2,
            f"it is a tuple of {_length(data)}; {pairs}, or with own tests ((inputs, targets),"
            " (inputs, targets))",
        ),
    ):
        if wrong:
            raise DataError(says)


def is_pair(data: Any) -> bool:
    """(inputs, targets), also as a list; and not a list of two samples, which are pairs."""
    arrays = isinstance(data, list) and all(isinstance(p, Tensor | np.ndarray) for p in data)
    return len(data) == 2 and (isinstance(data, tuple) or arrays)


def _is_loaded(data: Any) -> bool:
    return all(hasattr(data, name) for name in ("train", "test", "classes"))


def _first_keys(data: Any) -> str:
    return f"keys {', '.join(map(repr, [*data][:4]))}" if isinstance(data, Mapping) else ""


def _length(data: Any) -> int:
    return len(data) if isinstance(data, tuple) else 0


def check_function(what: str, given: Any, example: str, classes: bool = False) -> None:
    """Refuse what cannot be called, and classes where their values are meant."""
    if isinstance(given, type) and not classes:
        name = given.__name__
        raise ConfigError(f"{what} = {name} is a class; give a value of it, {name}(...)")
    if not callable(given):
        raise ConfigError(f"{what} = {shown(given)} is no function; give one, such as {example}")


def checked_metrics(metric: Any, metrics: Any) -> list[Any]:
    """What models are measured by, those that are known by their names too, or a refusal."""
    if isinstance(metric, list | tuple | Mapping):
        raise ConfigError(f"metric = {shown(metric)} is several; give metrics=[...]")
    if not isinstance(metrics, list | tuple):
        raise ConfigError(
            f"metrics = {shown(metrics)} must be a list of fb.Measures and functions of (outputs,"
            " targets)"
        )
    if metric is not None and metrics:
        raise ConfigError("metric=... and metrics=[...] are both given; put all into metrics")
    return [*map(_metric, metrics if metric is None else [metric])]


def _metric(given: Any) -> Any:
    if isinstance(given, str):
        if given not in KNOWN:
            raise ConfigError(
                f"metric = {given!r} is unknown{nearest(given, KNOWN)}; known:"
                f" {', '.join(map(repr, KNOWN))}, or a function of (outputs, targets)"
            )
        return KNOWN[given]
    if not isinstance(given, Measure):
        check_function("metric", given, "fb.accuracy")
    return given


def check_module(what: str, module: Any) -> nn.Module:
    """A module that gradients can be taken of, many at a time."""
    if isinstance(module, type):
        raise ConfigError(f"{what} returned the class {module.__name__}; make a value of it")
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"{what} returned {type(module).__name__}; it must return a torch.nn.Module"
        )
    parallel = nn.DataParallel, nn.parallel.DistributedDataParallel
    weights = [*module.parameters(), *module.buffers()]
    for wrong, says in (
        (hasattr(module, "_orig_mod"), "is compiled by torch.compile; give the module itself"),
        (isinstance(module, parallel), "is wrapped to be parallel; give its .module"),
        (
            any(map(is_lazy, weights)),
            "has lazy layers that have seen no inputs; call it once before you give it",
        ),
        (
            any(weight.is_meta for weight in weights if not is_lazy(weight)),
            "is on the meta device and has no weights; make it on the CPU",
        ),
    ):
        if wrong:
            raise ConfigError(f"{what} {says}")
    return module
