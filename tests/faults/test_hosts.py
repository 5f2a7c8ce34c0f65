"""A deployment over several hosts, each in a network namespace, with TLS: every link is cut, then
bad; the long form is `make torture`.
"""

import pytest

from faultsim.hosts import HOSTS, why_not
from faultsim.told import told


def test_every_link_is_cut_and_the_run_goes_on() -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    (found,) = told("faultsim.hosts", "--seconds", "1.5")
    assert found["replayed"]
    assert [trouble["host"] for trouble in found["troubles"] if trouble["kind"] == "cut"] == [
        *HOSTS
    ]
    assert any(
        trouble["rounds_during"] > 0
        for trouble in found["troubles"]
        if trouble["host"].startswith("server/")
    )
    assert found["restarts"] == 0
    print(found)
