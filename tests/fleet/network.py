"""Network namespaces as hosts of their own, which can be cut off from each other. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Self

IP = shutil.which("ip") or "/usr/sbin/ip"
#: Of the hub, to which all others are connected.
HUB = 254


class UnavailableNetworkError(Exception):
    """No network namespaces can be made here; the message says why."""


def _ip(*arguments: str) -> None:
    done = subprocess.run([IP, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnavailableNetworkError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


class Network:
    """`with Network(["gpu-1", "db"]) as network:`; the first host is 10.77.0.1, and so on.

    All hosts and the hub, from which tests look at them, see each other, and nothing else.
    """

    def __init__(self, hosts: Sequence[str], of: int | None = None) -> None:
        """`of`: the process that has made it already."""
        self._prefix = f"gp{of or os.getpid()}-"
        self.hosts = list(hosts)
        self.hub = f"{self._prefix}hub"

    def __enter__(self) -> Self:
        if os.geteuid() != 0:
            raise UnavailableNetworkError("network namespaces need root")
        if shutil.which(IP) is None:
            raise UnavailableNetworkError("network namespaces need ip, of iproute2")
        try:
            _ip("netns", "add", self.hub)
            _ip("-n", self.hub, "link", "set", "lo", "up")
            _ip("-n", self.hub, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self.hub, "addr", "add", f"10.77.0.{HUB}/24", "dev", "bridge")
            _ip("-n", self.hub, "link", "set", "bridge", "up")
            for number, host in enumerate(self.hosts, 1):
                namespace, port = self.namespace(host), self._port(host)
                _ip("netns", "add", namespace)
                _ip("-n", self.hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace)
                _ip("-n", self.hub, "link", "set", port, "master", "bridge", "up")
                _ip("-n", namespace, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
                _ip("-n", namespace, "link", "set", "eth0", "up")
                _ip("-n", namespace, "link", "set", "lo", "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*map(self.namespace, self.hosts), self.hub):
            subprocess.run([IP, "netns", "delete", name], capture_output=True, check=False)

    def namespace(self, host: str) -> str:
        return f"{self._prefix}{host}"

    def address(self, host: str) -> str:
        return f"10.77.0.{self.hosts.index(host) + 1}"

    def place(self, host: str) -> tuple[str, str]:
        return self.namespace(host), self.address(host)

    def _port(self, host: str) -> str:
        return f"p{self.hosts.index(host) + 1}"

    def cut(self, host: str) -> None:
        """It stays as it is and hears nothing, nor is it heard: nobody is told so."""
        _ip("-n", self.hub, "link", "set", self._port(host), "down")

    def mend(self, host: str) -> None:
        _ip("-n", self.hub, "link", "set", self._port(host), "up")
