"""Decides where the command of a lease runs: here, or on another host by ssh.

A command must run where its GPU is, so this is decided before anything is asked, and by nothing that a server says.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, NamedTuple

from gpu_worker_pool.config import host_of
from gpu_worker_pool.leases.endpoint_choice import is_local
from gpu_worker_pool.leases.places import named, others_of
from gpu_worker_pool.leases.this_host import is_this_host

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpu_worker_pool.cli.running.lease_spec import LeaseSpec
    from gpu_worker_pool.config import EndpointConfig


class CommandPlace(NamedTuple):
    """Where the command of a lease runs."""

    #: For `GPU_POOL_HOST`.
    host: str
    #: What `ssh` connects to; None: the command runs here.
    ssh_target: str | None = None


async def check_places(endpoints: Sequence[EndpointConfig], spec: LeaseSpec) -> None:
    """Raises a `ValueError` that says what to do, if an endpoint is another host.

    A name that cannot be resolved yet is decided when it has granted something (`place_of`).
    """
    if spec.ssh_target:
        _check_one_target(endpoints, spec.ssh_target)
        return
    if spec.is_here:
        return
    elsewhere = await others_of(endpoints)
    if spec.ssh_target is None and elsewhere:
        raise ValueError(refusal(elsewhere, spec))
    for each in elsewhere:
        ssh_target_of(each.url)


async def place_of(endpoint: EndpointConfig, spec: LeaseSpec) -> CommandPlace:
    """Of the endpoint that granted the lease. Raises a `ValueError` as `check_places` does."""
    here = CommandPlace(os.uname().nodename)
    if is_local(endpoint) or spec.is_here:
        return here
    if spec.ssh_target:
        return CommandPlace(spec.ssh_target.rpartition("@")[2], spec.ssh_target)
    if await is_this_host(host_of(endpoint.url)):
        return here
    if spec.ssh_target is None:
        raise ValueError(refusal([endpoint], spec))
    return CommandPlace(host_of(endpoint.url), ssh_target_of(endpoint.url))


async def endpoints_of_jobs(endpoints: Sequence[EndpointConfig], spec: LeaseSpec) -> list[EndpointConfig]:
    """Of `map`, whose jobs run here: other hosts are left out, such as those of a fleet, unless there are no others."""
    elsewhere = [] if spec.is_here else await others_of(endpoints)
    return [each for each in endpoints if each not in elsewhere or len(elsewhere) == len(endpoints)]


def refusal(others: Sequence[EndpointConfig], spec: LeaseSpec) -> str:
    here = "--here if those GPUs are this host's, as behind a tunnel"
    if spec.for_pid is not None:
        return f"{named(others)}, and this shell could not use a GPU there: add {here}"
    if spec.most_leases is not None:  # `map`, which has no --ssh
        return f"{named(others)}, and jobs run here: name the endpoint of this host, or add {here}"
    return f"{named(others)}, and a command runs where its GPU is: add --ssh to start it there, or {here}"


def _check_one_target(endpoints: Sequence[EndpointConfig], target: str) -> None:
    if len(endpoints) > 1:
        raise ValueError(f"--ssh={target} is one host, but there are several endpoints: give --ssh without a host")
    if is_local(endpoints[0]):
        raise ValueError(f"--ssh={target} needs the GPU server of that host: -e URL; local:// is this host")


def ssh_target_of(url: str) -> str:
    from gpu_worker_pool.cli.running.ssh import check_target

    return check_target(host_of(url), f"the host of {url}")
