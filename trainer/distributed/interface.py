"""The network interface by which other nodes reach this one.

gloo listens on the address of the host's own name, which many systems resolve to 127.0.1.1: ranks of other nodes wait
there until the timeout.  The way to the meeting place leads out of the right one.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Mapping, MutableMapping, Sequence

from trainer.distributed.environment import Environment

_VARIABLE = "GLOO_SOCKET_IFNAME"
_ELSEWHERE = "192.0.2.1"
"""An address that no host has (RFC 5737): the way there is the default route."""
_SIOCGIFADDR = 0x8915


def choose_interface(env: Environment, variables: MutableMapping[str, str] = os.environ) -> str:
    """Have gloo listen where the other nodes are, unless told otherwise; return the interface's name, empty if gloo is
    to choose.  Before the process group is opened.
    """
    if variables.get(_VARIABLE) or env.local_world_size >= env.world_size:
        return variables.get(_VARIABLE, "")
    name = find_interface([variables.get("MASTER_ADDR", ""), _ELSEWHERE], _own_address, _addresses())
    if name:
        variables[_VARIABLE] = name
    return name


def find_interface(hosts: Sequence[str], own_address: Callable[[str], str], interfaces: Mapping[str, str]) -> str:
    """Return the interface by which the first of `hosts` is reached that is not reached within this machine.

    own_address: the address from which a host would be talked to, empty if there is no way.  interfaces: names by
    their addresses.  Empty if there is none.
    """
    for host in hosts:
        address = own_address(host) if host else ""
        if address and not ipaddress.ip_address(address).is_loopback and address in interfaces:
            return interfaces[address]
    return ""


def _own_address(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting it sends nothing
        try:
            probe.connect((host, 9))
        except OSError:
            return ""
        return str(probe.getsockname()[0])


def _addresses() -> dict[str, str]:
    """Return the names of this machine's interfaces by their IPv4 addresses.  Linux only; empty elsewhere."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            found[socket.inet_ntoa(answer[20:24])] = name
    return found
