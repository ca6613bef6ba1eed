"""Builds a server's part in its fleet from its settings: the host's side, and the office of a candidate."""

from __future__ import annotations

import asyncio
import logging
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpu_worker_pool._version import __version__
from gpu_worker_pool.core.remembered import Outcome
from gpu_worker_pool.errors import GPUWorkerPoolError
from gpu_worker_pool.fleet.agent import FleetAgent, Seen
from gpu_worker_pool.fleet.dispatcher import fleet_settings
from gpu_worker_pool.fleet.epoch_file import EpochFile
from gpu_worker_pool.fleet.host_side import HostSide
from gpu_worker_pool.fleet.keys import FleetKeys, read_keys
from gpu_worker_pool.fleet.links import pair
from gpu_worker_pool.fleet.messages import GPURow
from gpu_worker_pool.fleet.office import FleetOffice
from gpu_worker_pool.fleet.store import StoreUnavailable
from gpu_worker_pool.hardware.leasable import readings_of
from gpu_worker_pool.hardware.origin import host_name
from gpu_worker_pool.hardware.readers.choose import hardware_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpu_worker_pool.broker.broker import Change, LeaseBroker
    from gpu_worker_pool.core.readings import Reading
    from gpu_worker_pool.core.settings import PoolSettings
    from gpu_worker_pool.fleet.store import FleetState, FleetStore, Office
    from gpu_worker_pool.gpu_server.host_view import HostView
    from gpu_worker_pool.gpu_server.settings import ServerSettings

logger: logging.Logger = logging.getLogger(__name__)

#: How often a ledger that cannot be opened is looked at again.
RETRY_SECONDS: Final = 0.5
LONGEST_NAME: Final = 40
#: The limits per caller are those of a host times this.
HOSTS_OF_A_FLEET: Final = 20
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9._-]+")
_EVERYWHERE: Final = ("0.0.0.0", "::", "")  # noqa: S104  # compared, not bound


def check_settings(settings: ServerSettings) -> None:
    """Raises a `ValueError` that says what a server of a fleet lacks, before it starts."""
    if settings.gpu_pool_fleet_key_file is None:
        raise ValueError(
            "a fleet needs a key, the same on all its hosts: gpu-pool fleet key rotate FILE makes one; "
            "give it as --fleet-key-file FILE, or GPU_POOL_FLEET_KEY_FILE"
        )
    read_keys(settings.gpu_pool_fleet_key_file)
    if settings.workers > 1 or settings.reload:
        raise ValueError("a server of a fleet is one process: unset WORKERS and RELOAD, or leave out --workers")


def check_database(settings: ServerSettings) -> None:
    """Raises a `StoreMismatch` if the database can never be used as it is; one that is down may come back."""
    if settings.gpu_pool_fleet_database is None:
        return
    store = _open_store(settings.gpu_pool_fleet_database)
    try:
        store.look()
    except StoreUnavailable as error:
        logger.warning("the fleet's database does not answer yet: %s", error)
    finally:
        store.close()


def own_name(settings: ServerSettings) -> str:
    """Of this host in its fleet."""
    name = settings.gpu_pool_host_name or _NO_NAME.sub("-", host_name())[:LONGEST_NAME]
    return name.strip("-") or "host"


def own_url(settings: ServerSettings) -> str:
    """Where other hosts reach this server, as far as the settings say."""
    if settings.gpu_pool_url is not None:
        return settings.gpu_pool_url
    host = host_name() if settings.host in _EVERYWHERE else settings.host
    scheme = "https" if settings.gpu_pool_tls_cert else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.port}{settings.api_prefix}"


class FleetParts:
    """From the start of a server to its end. `agent` is None until the ledger can be opened."""

    def __init__(
        self,
        settings: ServerSettings,
        broker: LeaseBroker,
        view: HostView,
        pool_settings: PoolSettings,
        want_reading: Callable[[float], object],
        state_dir: str,
    ) -> None:
        """Raises a `ValueError` that says which file cannot be used."""
        check_settings(settings)
        assert settings.gpu_pool_fleet_key_file is not None  # it was checked
        self.name: str = own_name(settings)
        self.url: str = own_url(settings)
        self.agent: FleetAgent | None = None
        self.office: FleetOffice | None = None
        self._settings = settings
        self.broker = broker
        self.view = view
        self._want_reading = want_reading
        self._keys = FleetKeys(settings.gpu_pool_fleet_key_file)
        self._epochs = EpochFile(Path(state_dir) / f"fleet-{hardware_name(settings.backend)}.json")
        self._is_simulated = settings.backend.startswith("simulated")
        self._seen: tuple[object, Seen] | None = None
        self._starting: asyncio.Task[None] | None = None
        if (database := settings.gpu_pool_fleet_database) is not None:
            self.office = FleetOffice(
                self.name,
                self.url,
                self._keys,
                lambda: _open_store(database),
                _settings_of_fleet(settings, pool_settings),
                policy=lambda: broker.policy.policy,
                migrate=_migrate,
                hears=lambda url: self.agent is not None and self.agent.has_link(url),
            )

    async def start(self) -> None:
        if self.office is not None:
            await self.office.start()
        self._starting = asyncio.get_running_loop().create_task(self._join())

    async def _join(self) -> None:
        """Called as soon as the ledger says which host this is."""
        while True:
            with suppress(GPUWorkerPoolError):
                ledger_id = self.broker.ledger_id
                await self.broker.held()
                break
            await asyncio.sleep(RETRY_SECONDS)
        self._epochs.of_ledger(ledger_id)
        side = HostSide(
            self.name,
            ledger_id,
            self.url,
            __version__,
            is_candidate=self.office is not None,
            epoch=self._epochs.epoch,
            epoch_owner=self._epochs.epoch_owner,
        )
        agent = FleetAgent(
            side,
            self.broker,
            self._keys,
            self._epochs,
            own_url=self.url,
            join=self._settings.gpu_pool_fleet_join,
            is_insecure=self._settings.gpu_pool_fleet_insecure,
            see=self._see,
            want_reading=self._want_reading,
        )
        if self.office is not None:
            own, other = pair()
            self.office.attach(other)
            agent.attach_own(own)
        await agent.start()
        self.agent = agent
        agent.changed()

    async def stop(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        if self.agent is not None:
            await self.agent.stop()
        if self.office is not None:
            await self.office.stop()

    def stop_waiting(self) -> None:
        if self.agent is not None:
            self.agent.stop_waiting()

    # --- what happens at this host ---

    def took(self) -> None:
        """A reading was taken."""
        if self.agent is not None:
            self.agent.changed()

    def changed(self, change: Change) -> None:
        """The ledger has committed a change."""
        if self.agent is None:
            return
        if isinstance(change.after, Outcome) and change.after.lease is not None:
            self.agent.ended(change.after)
        else:
            self.agent.changed()

    def _see(self) -> Seen | None:
        shown = self.view.shown
        if shown is None:
            return None
        if self._seen is None or self._seen[0] is not shown:
            rows = tuple(self._row(reading) for reading in readings_of(shown.visibility.gpus))
            self._seen = (shown, Seen(rows, shown.sample.begun_at))
        return self._seen[1]

    def _row(self, reading: Reading) -> GPURow:
        processes = None if reading.processes is None else len(reading.processes)
        if processes and any(reading.gpu_id in lease.gpu_ids for lease in self.broker.leases.values()):
            processes = 0  # the changes that the fleet needs to know
        return GPURow(
            reading.gpu_id,
            reading.index,
            reading.name,
            reading.uuid,
            reading.memory_total_mb,
            reading.memory_used_mb,
            reading.memory_usage_percent,
            reading.utilization_percent,
            reports_utilization=reading.reports_utilization,
            fault=reading.fault,
            foreign_processes=processes,
            reports_processes=reading.reports_processes,
            has_unified_memory=reading.has_unified_memory,
            is_mig_device=reading.is_mig_device,
            is_simulated=self._is_simulated,
        )


def _settings_of_fleet(settings: ServerSettings, of_host: PoolSettings) -> PoolSettings:
    """The limits of a host, scaled to a fleet."""
    return replace(
        fleet_settings(of_host),
        strategy=settings.gpu_pool_fleet_strategy,
        tells_accounts_apart=True,
        most_waiting_of_an_account=settings.gpu_pool_most_waiting * HOSTS_OF_A_FLEET,
        most_leases_of_an_account=settings.gpu_pool_most_leases_of_a_caller * HOSTS_OF_A_FLEET,
        most_leases=settings.gpu_pool_most_leases * HOSTS_OF_A_FLEET,
    )


def _open_store(database: str) -> FleetStore:
    # The only import of a database driver, in a server that has a database.
    from gpu_worker_pool.fleet.postgres import PostgresStore

    return PostgresStore(database)


def _migrate(store: FleetStore, term: Office, state: FleetState) -> None:
    """The dispatcher that was just elected migrates tables of an older version."""
    from gpu_worker_pool.fleet.database_care import make_tables
    from gpu_worker_pool.fleet.postgres import PostgresStore
    from gpu_worker_pool.fleet.schema import VERSION

    if state.schema_version < VERSION and isinstance(store, PostgresStore):
        make_tables(store, term)
