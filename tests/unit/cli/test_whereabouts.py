"""Where a command runs: an endpoint is this host by its addresses alone, and another host is refused."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket

import pytest

from gpu_worker_pool.cli.running.lease_spec import LeaseSpec
from gpu_worker_pool.cli.running.ssh import check_target
from gpu_worker_pool.cli.running.whereabouts import CommandPlace, check_places, endpoints_of_jobs, place_of
from gpu_worker_pool.config import parse_endpoints
from gpu_worker_pool.leases import this_host
from gpu_worker_pool.leases.own_addresses import Address, addresses_of_this_host
from gpu_worker_pool.leases.this_host import is_this_host

OWN = {"10.0.0.5", "fd00::5", "fe80::1"}
NAMES = {
    "me": ["10.0.0.5", "fd00::5"],
    "mixed": ["10.0.0.5", "10.0.0.6"],
    "other": ["10.0.0.6"],
    "loop": ["::1", "127.0.0.1"],
    "mapped": ["::ffff:10.0.0.5"],
    "mapped-other": ["::ffff:10.0.0.6"],
    "scoped": ["fe80::1%eth0"],
    "any": ["0.0.0.0"],
    "empty": [],
}


async def resolve(name: str) -> list[str]:
    if name not in NAMES:
        raise socket.gaierror(-2, "Name or service not known")
    return NAMES[name]


def own() -> set[Address]:
    return {ipaddress.ip_address(text) for text in OWN}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("me", True),
        ("mixed", False),
        ("other", False),
        ("loop", True),
        ("mapped", True),
        ("mapped-other", False),
        ("scoped", True),
        ("any", True),
        ("empty", None),
        ("unknown", None),
    ],
)
async def test_all_its_addresses_are_ours(name: str, expected: bool | None) -> None:
    assert await is_this_host(name, resolve=resolve, own_addresses=own) is expected


async def test_a_name_server_that_hangs_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(*_: object, **__: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(this_host, "RESOLVE_SECONDS", 0.01)
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", hang)
    assert await is_this_host("name") is None


async def test_the_addresses_of_this_host() -> None:
    ours = addresses_of_this_host()
    assert ipaddress.ip_address("127.0.0.1") in ours
    # What the kernel would send from is one of them; connecting a UDP socket sends nothing.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("198.51.100.7", 9))
        except OSError:
            return  # no network at all
        assert ipaddress.ip_address(probe.getsockname()[0]) in ours
        assert await is_this_host(probe.getsockname()[0]) is True


def spec(**more: object) -> LeaseSpec:
    return LeaseSpec({}, [], None, False, None, None, **more)  # type: ignore[arg-type]


OTHERS = "http://198.51.100.7:8000", "http://198.51.100.8"


async def test_another_host_is_refused_with_what_to_do() -> None:
    here, there = parse_endpoints(["http://127.0.0.1:8000", OTHERS[0]])
    await check_places([here], spec())
    with pytest.raises(
        ValueError, match=r"^http://198\.51\.100\.7:8000 is another host, .* --ssh .* --here "
    ) as refused:
        await check_places([here, there], spec())
    assert "127.0.0.1" not in str(refused.value)
    with pytest.raises(ValueError, match=r"^http://198.*:8000, http://198\.51\.100\.8 are other hosts"):
        await check_places(parse_endpoints(OTHERS), spec())
    with pytest.raises(ValueError, match=r"is another host, and this shell .* --here") as refused:
        await check_places([there], spec(for_pid=1))
    assert "--ssh" not in str(refused.value)
    await check_places([there], spec(is_here=True))
    await check_places(parse_endpoints(OTHERS), spec(ssh_target=""))


async def test_jobs_of_a_map_run_here_and_other_hosts_are_left_out() -> None:
    here, there = parse_endpoints(["http://127.0.0.1:8000", OTHERS[0]])
    assert await endpoints_of_jobs([there, here], spec(most_leases=2)) == [here]
    assert await endpoints_of_jobs([there, here], spec(most_leases=2, is_here=True)) == [there, here]
    assert await endpoints_of_jobs([there], spec(most_leases=2)) == [there]
    with pytest.raises(ValueError, match=r"^http.* is another host, and jobs run here: .* or add --here ") as refused:
        await check_places([there], spec(most_leases=2))
    assert "--ssh" not in str(refused.value), "it has no such option"


async def test_a_host_that_could_not_be_resolved_is_refused_when_it_grants() -> None:
    (unknown,) = parse_endpoints(["http://no-such-host.invalid:8000"])
    await check_places([unknown], spec())
    with pytest.raises(ValueError, match="is another host"):
        await place_of(unknown, spec())


async def test_where_the_command_runs() -> None:
    local, here, there = parse_endpoints(["local://", "http://127.0.0.1:8000", "http://198.51.100.7:8000"])
    name = os.uname().nodename
    assert await place_of(local, spec()) == CommandPlace(name, None)
    assert await place_of(here, spec(ssh_target="")) == CommandPlace(name, None)
    assert await place_of(there, spec(is_here=True)) == CommandPlace(name, None)
    assert await place_of(there, spec(ssh_target="")) == CommandPlace("198.51.100.7", "198.51.100.7")
    # A host that the user names is used, whatever the address: it may be behind a tunnel.
    assert await place_of(here, spec(ssh_target="ana@gpu-1")) == CommandPlace("gpu-1", "ana@gpu-1")
    (six,) = parse_endpoints(["http://[2001:db8::7]:8000"])
    assert await place_of(six, spec(ssh_target="")) == CommandPlace("2001:db8::7", "2001:db8::7")


async def test_one_host_for_several_endpoints_is_refused() -> None:
    with pytest.raises(ValueError, match="several endpoints: give --ssh without a host"):
        await check_places(parse_endpoints(OTHERS), spec(ssh_target="gpu-1"))
    with pytest.raises(ValueError, match="local:// is this host"):
        await check_places(parse_endpoints(["local://"]), spec(ssh_target="gpu-1"))


@pytest.mark.parametrize("target", ["gpu-1", "ana@gpu-1", "ana.b_c@gpu-1.lab.example", "ana@::1", "10.0.0.1", "a+b@h"])
def test_what_ssh_may_connect_to(target: str) -> None:
    assert check_target(target) == target


@pytest.mark.parametrize(
    "target",
    [
        "-oProxyCommand=touch x",
        "-l",
        "ana@-x",
        "-ana@host",
        "host name",
        "host;ls",
        "host\n",
        "$(id)",
        "a@b@c",
        "@host",
        "ana@",
        "ssh://host",
        "höst",
        "h%h",
        "",
        "x" * 400,
    ],
)
def test_what_it_may_not(target: str) -> None:
    with pytest.raises(ValueError, match="must be a host, or user@host"):
        check_target(target)
