"""A server with light clients for a few seconds; `make torture` has a thousand of them, and an
hour.
"""

from faultsim.told import told


def test_light_clients_are_served_and_nothing_grows() -> None:
    (found,) = told(
        "faultsim.load",
        "--servers",
        "2",
        "--devices",
        "10",
        "--active",
        "3",
        "--seconds",
        "6",
        "--tls",
    )
    assert found["uploads_per_s"] > 0
    assert found["rounds"] >= 1
    assert abs(found["threads_per_minute"]) < 60
    assert found["server_mib"] < 1000
    print(found)
