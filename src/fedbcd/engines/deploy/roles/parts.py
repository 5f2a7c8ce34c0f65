"""Element-wise work on long vectors, a part at a time: what is computed on the way takes the memory
of a part, not of several models.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

# values; a power of two, so that every value is computed by the same instructions as in one piece
PART_VALUES = 1 << 20


def parts(size: int) -> Iterator[slice]:
    """Slices of at most `PART_VALUES` values that cover a vector of `size` values."""
    for start in range(0, size, PART_VALUES):
        yield slice(start, min(start + PART_VALUES, size))


def in_parts(size: int, dtype: torch.dtype, compute: Callable[[slice], Tensor]) -> Tensor:
    """The vector whose parts `compute` gives."""
    whole = torch.empty(size, dtype=dtype)
    for part in parts(size):
        whole[part] = compute(part)
    return whole


def several_in_parts(
    size: int, compute: Callable[[slice], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """The same for several vectors by name."""
    whole: dict[str, Tensor] = {}
    for part in parts(size):
        for name, values in compute(part).items():
            whole.setdefault(name, torch.empty(size, dtype=values.dtype))[part] = values
    return whole
