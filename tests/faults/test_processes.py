"""Real processes: killed at named steps, and under chaos with TLS. The long forms are `make
torture`.
"""

from faultsim.told import told
from fedbcd.engines.deploy.processes.exit_codes import ExitCode


def test_each_role_dies_at_a_step_and_the_models_are_the_same() -> None:
    calm, *killed = told("faultsim.killing")
    assert [run["role"] for run in killed] == ["coordinator", "server/0", "device/0"]
    assert all(
        run["good"] and run["digest"] == calm["digest"] and run["restarts"] == 1 for run in killed
    )


def test_chaos() -> None:
    """A few seconds of it: every kind of trouble once or more, TLS, the log through the reference
    model and a replay.
    """
    (found,) = told("faultsim.chaos", "--seconds", "12", "--seed", "1")
    assert found["replayed"]
    assert found["rounds"] > 2
    assert sum(found["troubles"].values()) >= 2
    print(found)


def test_stores_that_are_lost_or_old_take_no_models_with_them() -> None:
    """Of a server with its coordinator down, of the coordinator, of a device; each says so in its
    log and status.
    """
    server, old, coordinator, device, again, rebuilt = told("faultsim.lost")
    assert (server["code"], server["untouched"]) == (
        ExitCode.NO_STORE,
        True,
    )  # as a supervisor starts it
    assert server["kept"], "the devices have lost their models"
    assert server["with_coordinator"] == old["with_coordinator"] == ExitCode.REFUSED
    assert "lost" in server["errors"]["coordinator"]
    assert old["kept"], "the devices have lost their models"
    assert "behind" in old["errors"]["coordinator"]
    for scene in (server, old):
        assert "ahead" in scene["errors"]["server/0"]
        assert scene["errors"]["device/0"] == scene["errors"]["device/1"] == ["by peer: ahead"]
    assert coordinator["code"] == ExitCode.NO_STORE
    assert "by peer: ahead" in coordinator["errors"]["server/0"]
    assert coordinator["restored"] == [[], []]
    assert device["restored"][0] == []
    (given,) = {*device["restored"][1]}  # its last contribution; a letter may come twice
    assert given.startswith("x/1/")
    assert device["replayed"]
    assert not any(device["errors"].values())
    assert "as generation 1, and counts each device once it has contributed again" in again["said"]
    assert again["again"] == ExitCode.RECORD  # a store is there, which may be all there is
    assert (again["generation"], again["went_on"], again["replayed"]) == (1, [3, 3], True)
    assert f"coordinator has {3 + 8} rounds, of which its servers knew" in rebuilt["said"]
    assert rebuilt["replayed"]
    assert not any(rebuilt["errors"].values())


def test_one_bad_device_harms_nobody() -> None:
    """1e30 in every upload of one device, one loss that is no number at another: both are told why
    and go on, the others notice nothing.
    """
    (found,) = told("faultsim.spoiling")
    assert found["dismissed"]
    assert found["replayed"]
    assert max(found["largest"].values()) < 5, found["largest"]
    assert 'fedbcd_refused_inputs_total{reason="far"}' in found["metrics"]["server-0"]
    assert 'fedbcd_undone_total{reason="far"}' in found["metrics"]["device-0"]
    assert 'fedbcd_undone_total{reason="finite"} 1.0' in found["metrics"]["device-3"]
    assert "server/0 has refused the upload" in found["status"]["device-0"]["trouble"]
    assert "the loss of device 3 is nan" in found["status"]["device-3"]["trouble"]
    assert "undone" not in found["status"]["device-1"]
    assert any(
        what == "refused_by_peer" and "deploy.reach_limit" in sentence
        for what, sentence in found["said"]
    )
    assert any(what == "undone" for what, _ in found["said"])
    events = found["events"]
    assert events["device/0 Declined"] >= 1
    assert events["device/0 Restored"] >= 1  # a letter may come twice
    assert events["device/0 Acknowledged"] >= 1  # once it was repaired, and admitted again
    assert events["device/3 Failed"] == 1
    assert events["server/1 Withdrawn"] >= 1
