"""Reads the addresses of this host's interfaces, which the standard library cannot."""

from __future__ import annotations

import ctypes
import ipaddress
import socket

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class _InterfaceAddress(ctypes.Structure):
    """`struct ifaddrs`, up to the address."""


_InterfaceAddress._fields_ = [
    ("next", ctypes.POINTER(_InterfaceAddress)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def addresses_of_this_host() -> set[Address]:
    """Those of all interfaces in this network namespace. To bind to an address would prove nothing: some hosts may
    bind to any (`ip_nonlocal_bind`)."""
    libc = ctypes.CDLL(None, use_errno=True)
    first = ctypes.POINTER(_InterfaceAddress)()
    if libc.getifaddrs(ctypes.byref(first)) != 0:
        raise OSError(ctypes.get_errno(), "the addresses of this host cannot be read")
    found: set[Address] = set()
    try:
        entry = first
        while bool(entry):  # not the null pointer
            if location := entry.contents.address:
                family = ctypes.c_ushort.from_address(location).value
                if family == socket.AF_INET:
                    found.add(ipaddress.IPv4Address(ctypes.string_at(location + 4, 4)))
                elif family == socket.AF_INET6:
                    found.add(ipaddress.IPv6Address(ctypes.string_at(location + 8, 16)))
            entry = entry.contents.next
    finally:
        libc.freeifaddrs(first)
    return found
