"""The network interface on which a rank listens if there are several nodes."""

from __future__ import annotations

import pytest

from trainer.distributed.environment import Environment, choose_interface, find_interface

INTERFACES = {"127.0.0.1": "lo", "10.0.0.7": "eth0", "192.168.1.7": "ib0"}


@pytest.mark.parametrize(
    ("ways", "expected"),
    [
        ({"head": "10.0.0.7"}, "eth0"),
        ({"head": "192.168.1.7"}, "ib0"),
        ({"head": "127.0.0.1", "away": "10.0.0.7"}, "eth0"),  # on the first node, whose name is 127.0.1.1 there
        ({"head": "", "away": "192.168.1.7"}, "ib0"),
        ({"head": "127.0.0.1", "away": ""}, ""),
        ({"head": "172.16.0.1"}, ""),  # of an interface that no longer exists
    ],
)
def test_interface_that_leads_to_the_other_nodes(ways: dict[str, str], expected: str) -> None:
    assert find_interface([*ways], ways.__getitem__, INTERFACES) == expected


def test_user_settings_are_kept_and_one_node_needs_none() -> None:
    two_nodes = Environment("torchrun", 0, 8, 0, 4)
    variables = {"GLOO_SOCKET_IFNAME": "ib1", "MASTER_ADDR": "127.0.0.1"}
    assert choose_interface(two_nodes, variables) == "ib1"
    one_node: dict[str, str] = {"MASTER_ADDR": "127.0.0.1"}
    assert choose_interface(Environment("torchrun", 0, 4, 0, 4), one_node) == ""
    assert one_node == {"MASTER_ADDR": "127.0.0.1"}
