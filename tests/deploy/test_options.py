"""Settings of a deployment: file, environment, flags; each complaint names the value and the
remedy.
"""

import pytest

from fedbcd.cli import deploy as cli_deploy
from fedbcd.engines.deploy.links.addresses import split_address
from fedbcd.engines.deploy.processes.options import Deploy, merge_options
from fedbcd.errors import ConfigError


def test_flags_go_before_environment_before_file() -> None:
    table = {"folder": "a", "time_scale": 1, "retry_s": [1, 2]}
    environment = {"FEDBCD_FOLDER": "b", "FEDBCD_RETRY_S": "[2.0, 3.0]", "FEDBCD_DATA": "not ours"}
    assert merge_options(table, {}, {}) == Deploy(folder="a", time_scale=1.0, retry_s=(1.0, 2.0))
    assert merge_options(table, environment, {"folder": None}) == Deploy(
        folder="b", time_scale=1.0, retry_s=(2.0, 3.0)
    )
    assert merge_options(table, environment, {"folder": "c"}).folder == "c"


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"coordinator": "somewhere"}, "must be host:port"),
        ({"servers": ["a:1", "b:99999"]}, r"deploy.servers\[1\]"),
        ({"retry_s": [5.0, 1.0]}, "0 < least <= most"),
        ({"lost_s": [0.0, 1.0]}, "0 < least <= most"),
        ({"time_scale": -1.0}, "must be above 0"),
        ({"folders": "x"}, "did you mean 'folder'"),
        ({"plain": "yes"}, "true or false"),
    ],
)
def test_what_cannot_be_is_named(table: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        merge_options(table, {}, {})


def test_an_environment_variable_that_is_no_value_is_named() -> None:
    with pytest.raises(ConfigError, match="FEDBCD_PEER_S=soon is not a TOML value"):
        merge_options({}, {"FEDBCD_PEER_S": "soon"}, {})


def test_addresses() -> None:
    deploy = Deploy(servers=("10.0.0.2:7401", "[::1]:7402"), listen="0.0.0.0:9")
    assert deploy.address_of("server/1") == "[::1]:7402"
    assert deploy.listens_at("server/0") == ("0.0.0.0", 9)
    assert Deploy(servers=("[::1]:7402",)).listens_at("server/0") == ("::1", 7402)
    assert deploy.folder_of("device/7").name == "device-7"
    assert split_address("host:1", "x") == ("host", 1)
    with pytest.raises(ConfigError, match="none for server 2"):
        deploy.address_of("server/2")
    with pytest.raises(ConfigError, match="3 servers"):
        deploy.check_servers(3)


def test_fewer_servers_and_devices_need_no_further_flags() -> None:
    table = cli_deploy._up_table()
    cli_deploy._change(table, {"servers": 2, "devices": 6})
    assert (
        table["federation"]["devices"],
        table["federation"]["active"],
        table["cloud"]["first"],
    ) == (3, 3, 2)
    cli_deploy._change(table, {"servers": 2, "first": 5})
    assert table["cloud"]["first"] == 5  # what a user says is not changed but refused


def test_what_is_beyond_the_norm_is_refused_or_remarked() -> None:
    assert merge_options({"norm_limit": 2.0}, {}, {}).beyond_norm == "refuse"
    assert merge_options({"norm_limit": 2.0, "beyond_norm": "warn"}, {}, {}).beyond_norm == "warn"
    with pytest.raises(ConfigError, match="beyond_norm"):
        merge_options({"beyond_norm": "shrug"}, {}, {})


def test_the_reach_of_uploads_can_be_set_and_switched_off() -> None:
    assert merge_options({}, {}, {}).reach_limit == 2.0**24
    assert merge_options({}, {"FEDBCD_REACH_LIMIT": "inf"}, {}).reach_limit == float("inf")
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(
            ConfigError, match=r"deploy\.reach_limit = .* must be above 0; inf is no bound"
        ):
            merge_options({"reach_limit": wrong}, {}, {})
