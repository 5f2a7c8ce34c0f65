"""Real processes: killed at named steps, and under chaos with TLS. The long forms are `make torture`."""

from faultsim.told import told


def test_each_role_dies_at_a_step_and_the_models_are_the_same() -> None:
    calm, *killed = told("faultsim.killing")
    assert [run["role"] for run in killed] == ["coordinator", "server/0", "device/0"]
    assert all(run["good"] and run["digest"] == calm["digest"] and run["restarts"] == 1 for run in killed)


def test_chaos() -> None:
    """A few seconds of it: every kind of trouble once or more, TLS, the log through the reference model and a replay."""
    (found,) = told("faultsim.chaos", "--seconds", "12", "--seed", "1")
    assert found["replayed"]
    assert found["rounds"] > 2
    assert sum(found["troubles"].values()) >= 2
    print(found)
