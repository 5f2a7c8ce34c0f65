"""Test samples that are no tensors in memory: read in blocks, each once for all models."""

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedbcd.algorithm.trees import Tree, leaves
from fedbcd.data.federation import Key, Transform
from fedbcd.data.samples import Pool

Sums = npt.NDArray[np.float64]
Score = Callable[[Tensor, Tree, Tensor], Sums]  # of a model on a block: sums over its samples


class PreparedBlocks:
    """Those of a pool, as a model wants them; kept, as long as there is room for them."""

    def __init__(self, pool: Pool, transform: Transform, samples: int, keep: int) -> None:
        """`samples` in a block; `keep`: bytes."""
        self._pool, self._transform = pool, transform
        self._samples, self._free = samples, keep
        self._kept: dict[tuple[int, int, torch.dtype], tuple[Tree, Tensor]] = {}

    def sums(
        self,
        models: Mapping[int, Tensor],
        wanted: Mapping[int, Mapping[Key, None]],
        spans: Mapping[Key, tuple[int, int]],
        score: Score,
    ) -> dict[int, dict[Key, Sums]]:
        """Per model (by any key) and kind that is wanted of it: the sums of its scores."""
        sums: dict[int, dict[Key, Sums]] = {key: {} for key in models}
        for kind, (first, end) in spans.items():
            asked = [key for key, kinds in wanted.items() if kind in kinds]
            for start in range(first, end if asked else first, self._samples):
                stop = min(end, start + self._samples)
                inputs, targets = self._block(start, stop, models[asked[0]].dtype)
                for key in asked:
                    found = score(models[key], inputs, targets)
                    sums[key][kind] = sums[key].get(kind, 0.0) + found
        return sums

    def _block(self, start: int, stop: int, dtype: torch.dtype) -> tuple[Tree, Tensor]:
        key = start, stop, dtype
        if key in self._kept:
            return self._kept[key]
        inputs, targets = self._pool.take(torch.arange(start, stop))
        block = self._transform(inputs, dtype), targets
        size = sum(part.nbytes for part in leaves(block))
        if size <= self._free:
            self._kept[key] = block
            self._free -= size
        return block
