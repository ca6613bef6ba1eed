"""Where programs of this host acquire GPUs for themselves: at endpoints of this host alone."""

from __future__ import annotations

import pytest
from tests.fakes.lease_service import FakeLeaseService, new_request

from gpu_worker_pool.config import MultiEndpointConfigurationManager, parse_endpoints
from gpu_worker_pool.leases.acquisition import Acquisition
from gpu_worker_pool.leases.engine import LeaseEngine
from gpu_worker_pool.leases.places import LeasePlace, candidates_at, checked, places_here

ANOTHER = "http://198.51.100.7:8000"
UNKNOWN = "http://no-such-host.invalid:8000"


async def test_other_hosts_are_left_out_unless_there_are_no_others() -> None:
    engine, environment = LeaseEngine(lambda *_: None, lambda *_: None), MultiEndpointConfigurationManager({})
    places = await places_here(engine, [ANOTHER, "http://127.0.0.1:8000", UNKNOWN, "local://"], environment)
    assert [(place.config.url, place.is_known) for place in places] == [
        ("http://127.0.0.1:8000", True),
        (UNKNOWN, False),
        ("local://", True),
    ]
    for given in ([ANOTHER], [ANOTHER, "http://198.51.100.8"]):
        with pytest.raises(ValueError, match=r"(is another host|are other hosts), and a worker process runs where its"):
            await places_here(engine, given, environment)
    await engine.stop(1.0)


async def test_a_grant_of_a_host_that_could_not_be_resolved_before_is_given_back() -> None:
    engine, service = LeaseEngine(lambda *_: None, lambda *_: None), FakeLeaseService()
    (unknown,), (here,) = parse_endpoints([UNKNOWN]), parse_endpoints(["http://127.0.0.1:8000"])
    for config, is_here in ((here, True), (unknown, False)):
        places = [LeasePlace(config, engine.endpoint(service), is_known=False)]
        lease = await Acquisition(engine, candidates_at(places, new_request(60.0))).run()
        if is_here:
            assert await checked(lease, places, engine) is lease
            await engine.release(lease)
        else:
            with pytest.raises(ValueError, match="is another host, and a worker process runs where its GPU is"):
                await checked(lease, places, engine)
        assert service.held == {}
    await engine.stop(1.0)
