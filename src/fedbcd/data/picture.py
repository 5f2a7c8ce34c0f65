"""A picture of a partition: devices by labels. Needs matplotlib, which the extra `report`
brings.
"""

from pathlib import Path
from typing import Any

from torch import Tensor

from fedbcd.data.ownership import Partition


def find_pyplot() -> Any:
    """matplotlib, drawing into files; None where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_partition(partition: Partition, targets: Tensor, path: Path, title: str = "") -> bool:
    """How many samples of each label each device owns, as a heat map. False: matplotlib is not
    installed.
    """
    pyplot = find_pyplot()
    if pyplot is None:
        return False
    counts = partition.counts(targets)
    devices, labels = counts.shape
    size = (min(16.0, 3.5 + 0.08 * devices), min(12.0, 1.6 + 0.24 * labels))
    figure, axes = pyplot.subplots(figsize=size, layout="constrained")
    image = axes.imshow(
        counts.T, aspect="auto", interpolation="nearest", cmap="Blues", origin="lower", vmin=0
    )
    axes.set_xlabel("device")
    axes.set_ylabel("label")
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True)
    axes.set_title(title or f"{devices} devices", fontsize=11)
    figure.colorbar(image, ax=axes, label="samples")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return True
