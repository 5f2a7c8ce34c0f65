"""What the tests of the cluster engine share."""

import pytest

import fedbcd as fb

ONE, TWO = (fb.Cluster(actors=actors, cpus=0.25) for actors in (1, 2))
QUIET = (
    pytest.mark.filterwarnings(  # sockets and processes that Ray leaves to the garbage collector
        "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
    )
)
