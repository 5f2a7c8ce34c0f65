"""A model of 64 MB with TLS; `make torture` has one of 1 GB."""

from faultsim.told import told


def test_a_large_model_takes_a_few_times_its_size() -> None:
    """What a process has beside the model is about three times 64 MB."""
    (found,) = told("faultsim.big", "--megabytes", "64", "--rounds", "1")
    assert found["replayed"]
    assert found["restarts"] == 0
    assert found["bytes_over_least"] < 0.01
    assert max(found["most_memory_in_models"].values()) < 14
    print(found)
