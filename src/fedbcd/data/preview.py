"""Data sets and partitions in a few numbers, and as a picture. Pictures need matplotlib, which the
extra `report` brings.
"""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np
import torch
from torch import Tensor

from fedbcd.config import writing_file
from fedbcd.data.manifest import Partition, hash_of_indices
from fedbcd.data.samples import LoadedDataset
from fedbcd.errors import ConfigError

COLOURS = ("#7f7f7f", "#1f5fa8", "#d1495b", "#2e8b57", "#8c6bb1", "#e08e0b")

P = ParamSpec("P")


def summarise(data: LoadedDataset) -> dict[str, Any]:
    return {
        "train": len(data.train),
        "test": len(data.test),
        "input": list(data.train.inputs.shape[1:]),
        "dtype": str(data.train.inputs.dtype).removeprefix("torch."),
        "classes": data.classes,
        "per_class": torch.bincount(data.train.targets, minlength=data.classes).tolist(),
        "columns": sorted(data.columns),
    }


def summarise_partition(partition: Partition) -> dict[str, Any]:
    """How even a partition is: samples and labels per device as least, median and most, and how
    many samples are used and shared.
    """
    sizes = [len(positions) for positions in partition.samples]
    return {
        "devices": len(sizes),
        "samples": _spread(sizes),
        "labels": _spread([len(owned) for owned in partition.labels]),
        "used": len(np.unique(np.concatenate(partition.samples))),
        "in_all": sum(sizes),
        "indices_sha256": hash_of_indices(partition.samples),
    }


def _spread(values: list[int]) -> list[float]:
    return [min(values), float(np.median(values)), max(values)]


# ------------------------------------------------------------------------------------------------
# pictures
def drawn(draw: Callable[P, None]) -> Callable[P, bool]:
    """`draw`, where matplotlib is installed; it returns whether that is so."""

    @wraps(draw)
    def tried(*arguments: P.args, **options: P.kwargs) -> bool:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            return False
        draw(*arguments, **options)
        return True

    return tried


def new_figure(size: tuple[float, float], columns: int = 1, **shared: Any) -> tuple[Any, Any]:
    """A figure of `size` inches, and the axes in it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(1, columns, **shared)


def figure_of(size: tuple[float, float], columns: int = 1, **shared: Any) -> tuple[Any, Any]:
    """The same, asked for by a call that must have it."""
    try:
        return new_figure(size, columns, **shared)
    except ImportError:
        raise ConfigError(
            "a picture needs matplotlib; pip install 'fedbcd[report]' brings it"
        ) from None


def save_figure(figure: Any, path: str | Path) -> None:
    """As a file of the kind that its name ends with."""
    with writing_file(path):
        try:
            figure.savefig(path, dpi=130)
        except ValueError as error:
            raise ConfigError(f"path = {str(path)!r} is no picture: {error}") from None


def tidy(axes: Any) -> None:
    """A grid in the background, and no frame around it."""
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


@drawn
def draw_partition(partition: Partition, targets: Tensor, path: Path, title: str = "") -> None:
    """How many samples of each label each device owns, as a heat map."""
    counts = partition.counts(targets)
    devices, labels = counts.shape
    size = (min(16.0, 3.5 + 0.08 * devices), min(12.0, 1.6 + 0.24 * labels))
    figure, axes = new_figure(size)
    image = axes.imshow(
        counts.T, aspect="auto", interpolation="nearest", cmap="Blues", origin="lower", vmin=0
    )
    axes.set(xlabel="device", ylabel="label")
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    axes.set_title(title or f"{devices} devices", fontsize=11)
    figure.colorbar(image, ax=axes, label="samples")
    figure.savefig(path, dpi=130)
