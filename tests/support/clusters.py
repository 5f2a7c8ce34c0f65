"""What the tests of the cluster engine share."""

import pytest

import fedbcd as fb

TWO = fb.Cluster(actors=2, cpus=0.25)
QUIET = (
    pytest.mark.filterwarnings(  # sockets and processes that Ray leaves to the garbage collector
        "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
    )
)
