"""Finds the network interface on which other nodes can reach this one.

gloo listens on the address that the host name resolves to, which is 127.0.1.1 on many systems, so that ranks on other
nodes cannot connect and time out.  The route to the rendezvous address shows the right interface.
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
"""An address that no host has (RFC 5737), so that the route to it is the default route."""
_SIOCGIFADDR = 0x8915


def choose_interface(env: Environment, variables: MutableMapping[str, str] = os.environ) -> str:
    """Make gloo listen on the interface that other nodes can reach, unless the user chose one.

    Returns the interface's name, or an empty string if gloo chooses.  Call before opening the process group.
    """
    if variables.get(_VARIABLE) or env.local_world_size >= env.world_size:
        return variables.get(_VARIABLE, "")
    name = find_interface([variables.get("MASTER_ADDR", ""), _ELSEWHERE], _own_address, _addresses())
    if name:
        variables[_VARIABLE] = name
    return name


def find_interface(hosts: Sequence[str], own_address: Callable[[str], str], interfaces: Mapping[str, str]) -> str:
    """Return the interface of the route to the first of `hosts` that is not on this machine; empty if there is none.

    own_address: returns the source address of the route to a host, or an empty string if there is no route.
    interfaces: interface names by address.
    """
    for host in hosts:
        address = own_address(host) if host else ""
        if address and not ipaddress.ip_address(address).is_loopback and address in interfaces:
            return interfaces[address]
    return ""


def _own_address(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a UDP socket sends nothing
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
            except OSError:  # the interface has no address
                continue
            found[socket.inet_ntoa(answer[20:24])] = name
    return found
