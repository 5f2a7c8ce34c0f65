"""Addressed draws of plain integers: every random number is a hash of where it is used
(docs/determinism.md). `algorithm.draws` has the same for arrays, and the other streams.
"""

LINKS = 25  # of a graph of servers, that fail

_MASK = (1 << 64) - 1


def _signed(value: int) -> int:
    """The 64-bit two's complement of `value` modulo 2^64."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


GOLDEN = _signed(0x9E3779B97F4A7C15)
FIRST = _signed(0xBF58476D1CE4E5B9)
SECOND = _signed(0x94D049BB133111EB)


def _mix(h: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014) modulo 2^64, in two's
    complement.
    """
    h &= _MASK
    h = ((h ^ (h >> 30)) * FIRST) & _MASK
    h = ((h ^ (h >> 27)) * SECOND) & _MASK
    return _signed(h ^ (h >> 31))


def mixed_seed(seed: int, stream: int) -> int:
    """Where the addresses of a stream begin."""
    return _mix(seed + (stream + 1) * GOLDEN)


def address_one(seed: int, stream: int, *parts: int) -> int:
    """The hash of an address, as an unsigned 64-bit integer."""
    h = mixed_seed(seed, stream)
    for part in parts:
        h = _mix(h + (part + 1) * GOLDEN)
    return h & _MASK


def below_one(seed: int, stream: int, bound: int, *parts: int) -> int:
    """A whole number in 0 .. bound-1; `bound` is at most 2^31."""
    return ((address_one(seed, stream, *parts) >> 32) * bound) >> 32


def unit_one(seed: int, stream: int, *parts: int) -> float:
    """A float64 strictly between 0 and 1."""
    return ((address_one(seed, stream, *parts) >> 12) + 0.5) * 2.0**-52
