"""A deployment over lines that are made bad packet by packet; the long form is `make torture`."""

import pytest

from faultsim.lines import why_not
from faultsim.told import told


def test_after_a_fault_of_the_network_rounds_go_on() -> None:
    """Connections that a firewall has forgotten, hosts with another address: neither end is told,
    and both notice by themselves. How quickly by default is in docs/results/reliability.
    """
    reason = why_not()
    if reason:
        pytest.skip(reason)
    faults = ("--faults", "forgotten", "moved", "--hosts", "coordinator", "devices")
    *came, end = told("faultsim.network", "--peer", "2", *faults, "--within", "60")
    assert [(one["fault"], one["host"]) for one in came] == [
        ("forgotten", "coordinator"),
        ("forgotten", "devices"),
        ("moved", "devices"),
    ]
    assert end["replayed"]
    assert end["restarts"] == 0
    print(came)
