"""A whole fleet without I/O: hosts, candidates, a database and clients, with everything that can go wrong between them.

The oracle knows the promises of a fleet and not its code: it judges what clients were told and what hosts were sent.
"""

from __future__ import annotations

import json
import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpu_worker_pool.core import (
    Cancelled,
    FleetOrder,
    Granted,
    Lease,
    Outcome,
    PoolSettings,
    Released,
    Renewed,
    Request,
    Requested,
    Requirements,
)
from gpu_worker_pool.errors import IllegalEventError
from gpu_worker_pool.fleet import host_side
from gpu_worker_pool.fleet.dispatcher import (
    Dispatcher,
    fleet_settings,
)
from gpu_worker_pool.fleet.host_side import HostSide
from gpu_worker_pool.fleet.message_json import decode, encode
from gpu_worker_pool.fleet.messages import Answer, Ask, End, Place, PollEnded, ReportWanted
from tests.unit.fleet.world_parties import BrokenPromiseError, WorldCandidate, WorldHost
from tests.unit.fleet.world_store import WorldStore

TTL_SECONDS = 20.0


# --- clients ---


@dataclass(eq=False)
class Client:
    request: Request
    began_at: float
    server: str
    poll_id: str = ""
    polled_at: float = -1.0
    is_dead: bool = False
    #: When it was told that it waits, and how often commits had been lost then.
    told_waiting: int | None = None
    told_at: float = 0.0
    first_asked_at: float | None = None
    #: What it holds: the host and the id of the lease there.
    lease: tuple[str, str] | None = None
    renewed_at: float = 0.0
    releases_at: float = 0.0
    end: str = ""

    @property
    def is_waiting(self) -> bool:
        return not self.is_dead and self.lease is None and not self.end


@dataclass(eq=False)
class Program:
    """One that uses `local://` on a host."""

    request: Request
    host: str
    arrived_at: float
    #: When it was told its place in the fleet, and how often commits had been lost then.
    told_at: float = math.inf
    told_waiting: int = 0
    releases_at: float = math.inf
    lease_id: str = ""
    leaves_at: float = math.inf


# --- the world ---


@dataclass(eq=False)
class Link:
    host: str
    candidate: str
    is_up: bool = False
    #: Whether a message was lost since it was opened, which no real link does.
    is_lossy: bool = False
    up: deque[Any] = field(default_factory=deque)
    down: deque[Any] = field(default_factory=deque)


class World:
    def __init__(
        self,
        seed: int,
        *,
        hosts: int = 3,
        faults: bool = True,
        dispatcher: type[Dispatcher] = Dispatcher,
        side: type[HostSide] = HostSide,
        hear_seconds: float = 2.0,
    ) -> None:
        self.random = random.Random(seed)
        self.faults = faults
        self.now = 1000.0
        self.store = WorldStore()
        self.store.now = self.now
        self.dispatcher_type, self.hear_seconds = dispatcher, hear_seconds
        names = [f"h{number}" for number in range(1, hosts + 1)]
        self.candidate_names = names[:2]
        self.hosts = {name: WorldHost(self, name, self.random.randint(1, 3), side) for name in names}
        self.candidates = {name: WorldCandidate(self, name) for name in self.candidate_names}
        self.links = {(host, name): Link(host, name) for host in names for name in self.candidate_names}
        self.clients: dict[str, Client] = {}
        self.programs: dict[str, Program] = {}
        self.log: deque[str] = deque(maxlen=4000)
        self.steps = 0
        self.served = self.served_programs = self.served_by_fleet = 0
        self.numbers = 0
        self.highest_epoch = 0

    # links

    def new_dispatcher(
        self, candidate: WorldCandidate, rows: Mapping[str, Mapping[str, Mapping[str, Any]]]
    ) -> Dispatcher:
        assert candidate.office is not None
        self.highest_epoch = max(self.highest_epoch, candidate.office.epoch)
        candidate.began_at = self.now
        self.say(f"{candidate.name} is dispatcher of epoch {candidate.office.epoch}")
        return self.dispatcher_type(
            candidate.name,
            f"http://{candidate.name}",
            fleet_id="fleet",
            epoch=candidate.office.epoch,
            secret="s" * 20,
            rows=rows,
            settings=fleet_settings(PoolSettings(max_bypass_seconds=20.0)),
            now=self.now,
            hear_seconds=self.hear_seconds,
        )

    def say(self, text: str) -> None:
        self.log.append(f"{self.now:.2f} {text}")

    def post(self, sender: str, to: str, message: Any, *, to_host: bool = False) -> None:
        link = self.links[(to, sender) if to_host else (sender, to)]
        if not link.is_up:
            return
        line = link.down if to_host else link.up
        data = json.loads(json.dumps(encode(message)))
        if self.faults and (chance := self.random.random()) < 0.01:
            if chance < 0.004:
                link.is_lossy = True
                self.say(f"lost {sender} -> {to}: {brief(message)}")
                return
            if chance < 0.007:
                line.append(data)  # twice
            else:
                line.insert(self.random.randint(0, len(line)), data)  # out of order
                return
        line.append(data)

    def open(self, link: Link) -> None:
        host, candidate = self.hosts[link.host], self.candidates[link.candidate]
        if host.is_up and candidate.is_up:
            link.is_up, link.is_lossy = True, False
            self.post(link.host, link.candidate, host.side.join())

    def close(self, link: Link) -> None:
        if link.is_up:
            self.say(f"link {link.host} - {link.candidate} closed")
            link.is_up = False
            link.up.clear()
            link.down.clear()
            host, candidate = self.hosts[link.host], self.candidates[link.candidate]
            if host.is_up:
                host.perform(host.side.link_lost(link.candidate))
            if candidate.is_up:
                candidate.lost(link.host)

    def deliver(self, link: Link) -> None:
        candidate, host = self.candidates[link.candidate], self.hosts[link.host]
        while link.up and candidate.is_up and not candidate.is_frozen:
            message = decode(link.up.popleft())
            self.say(f"{link.host} -> {link.candidate}: {brief(message)}")
            candidate.received(link.host, message)
        while link.down and host.is_up:
            message = decode(link.down.popleft())
            self.say(f"{link.candidate} -> {link.host}: {brief(message)}")
            before = host.epoch
            effects = host.side.received(link.candidate, message, self.now)  # type: ignore[arg-type]
            self.saw_effects(host, before, message, effects)
            host.perform(effects)

    # the oracle

    def saw_effects(
        self, host: WorldHost, before: tuple[int, str], message: Any, effects: Sequence[host_side.HostEffect]
    ) -> None:
        """Whether the host did what a deposed dispatcher said."""
        if isinstance(message, Place | End | PollEnded | ReportWanted):
            is_deposed = message.epoch < before[0] or (message.epoch == before[0] and message.dispatcher != before[1])
            if is_deposed and not all(isinstance(effect, host_side.SendToCandidate) for effect in effects):
                who = f"{message.dispatcher} of epoch {message.epoch}"
                raise BrokenPromiseError(f"{host.name} obeys {who}, but has seen {before}")

    def saw_command(self, host: WorldHost, place: Place) -> None:
        if (place.epoch, place.dispatcher) != host.epoch:
            who = f"{place.dispatcher} of epoch {place.epoch}"
            raise BrokenPromiseError(f"{host.name} obeys {who}, but has seen {host.epoch}")

    def saw_place(self, candidate: WorldCandidate, to: str, place: Place) -> None:
        request_id = place.request.request_id
        client = self.clients.get(request_id)
        if (program := self.programs.get(request_id)) is not None:
            if to != program.host:
                raise BrokenPromiseError(f"{request_id} waits at {program.host}, and is placed at {to}")
            self.saw_turn_of_program(candidate, program)
        if client is None or candidate.dispatcher is None or candidate.dispatcher.epoch < self.highest_epoch:
            return  # a host that has heard of the next one will refuse it
        if client.lease is not None and client.lease[0] != to:
            host = self.hosts[client.lease[0]]
            lease = host.ledger.leases.lookup(client.lease[1])
            link = self.links[host.name, candidate.name]
            known = candidate.dispatcher.hosts.get(host.name)
            must_know = (known is not None and known.is_heard) or self.now < candidate.began_at + 1.9
            if lease is not None and lease.is_live and link.is_up and not link.is_lossy and must_know:
                raise BrokenPromiseError(f"{request_id} holds {client.lease}, and is granted again at {to}")
        placement = candidate.dispatcher._asked[request_id].placement
        if (
            client.lease is not None
            or placement is None
            or placement.is_placed
            or placement.first_sent_at < candidate.dispatcher.pool.now
        ):
            return  # it was granted before
        self.saw_turn(candidate, client.request, to, client.first_asked_at)
        for other in self.clients.values():
            if (
                other.is_waiting
                and other.told_waiting == self.store.losses
                and client.first_asked_at is not None
                and other.told_at < client.first_asked_at
                and other.request.requirements == client.request.requirements
                and self.now - other.polled_at < 25.0
                and self.is_overtaken(candidate, other)
            ):
                raise BrokenPromiseError(f"{request_id} overtakes {other.request.request_id}, which was told its place")

    def saw_turn_of_program(self, candidate: WorldCandidate, program: Program) -> None:
        dispatcher = candidate.dispatcher
        if dispatcher is None or dispatcher.epoch < self.highest_epoch:
            return
        placement = dispatcher._asked[program.request.request_id].placement
        if placement is None or placement.is_placed or placement.first_sent_at < dispatcher.pool.now:
            return
        self.saw_turn(candidate, program.request, program.host, program.arrived_at)
        for other in self.clients.values():
            if (
                other.is_waiting
                and other.told_waiting == self.store.losses
                and other.told_at < program.arrived_at
                and other.request.requirements.count == program.request.requirements.count
                and self.now - other.polled_at < 25.0
                and self.is_overtaken(candidate, other)
            ):
                raise BrokenPromiseError(
                    f"{program.request.request_id} overtakes {other.request.request_id}, which was told its place"
                )

    def saw_turn(self, candidate: WorldCandidate, request: Request, to: str, asked_at: float | None) -> None:
        """Whether a program that waits at this host was told its place before this request was there."""
        for program in self.programs.values():
            if (
                asked_at is not None
                and program.host == to
                and program.told_waiting == self.store.losses
                and program.told_at < asked_at
                and program.request.requirements.count == request.requirements.count
                and self.now - self.hosts[to].linked_at < 20.0
                and self.is_overtaken(candidate, program)
            ):
                raise BrokenPromiseError(f"{request.request_id} overtakes {program.request.request_id}, told its place")

    def saw_local(self, host: WorldHost, lease: Lease, *, by_fleet: bool) -> None:
        """A lease was granted at this host: to a program only by the fleet, while its host follows it."""
        program = self.programs.get(lease.request.request_id)
        if program is None or program.lease_id:
            return
        is_followed = self.now < host.followed_at + host_side.OWN_ORDER_SECONDS
        if not by_fleet and (is_followed or self.is_heard(host)):
            raise BrokenPromiseError(f"{host.name} grants {lease} out of the fleet's order")
        program.lease_id, program.releases_at = lease.lease_id, self.now + self.random.uniform(0.5, 15.0)
        self.served += 1
        self.served_programs += 1
        self.served_by_fleet += by_fleet

    def saw_order(self, host: WorldHost, order: FleetOrder) -> None:
        """What the programs of this host are told of their places."""
        for program in self.programs.values():
            if self.store.lacks_commits:
                continue
            is_told = program.host == host.name and program.request.request_id in order.positions
            if is_told and (program.told_waiting != self.store.losses or program.told_at == math.inf):
                program.told_waiting, program.told_at = self.store.losses, self.now

    def is_overtaken(self, candidate: WorldCandidate, other: Client | Program) -> bool:
        """Whether no GPU is on its way to it."""
        assert candidate.dispatcher is not None
        known = candidate.dispatcher.pool.requests.get(other.request.request_id)
        if isinstance(known, Lease | Outcome):
            return False
        return not any(
            isinstance(host.ledger.requests.get(other.request.request_id), Lease | Outcome)
            for host in self.hosts.values()
        )

    def answered(self, answer: Answer) -> None:
        client = self.clients.get(answer.request_id)
        if client is None or client.is_dead or client.poll_id != answer.poll_id:
            return
        client.poll_id = ""
        if answer.state == "granted":
            lease = answer.host, answer.lease_id
            if client.lease is not None and client.lease != lease:
                raise BrokenPromiseError(f"{answer.request_id} was told of {client.lease}, and then of {lease}")
            found = self.hosts[answer.host].ledger.leases.lookup(answer.lease_id)
            if found is not None and found.is_live and found.request.request_id != answer.request_id:
                raise BrokenPromiseError(f"{answer.request_id} was told of a lease of {found.request.request_id}")
            client.lease, client.renewed_at = lease, self.now
            client.releases_at = self.now + self.random.uniform(0.5, 15.0)
            self.served += 1
        elif answer.state == "waiting":
            # What the dispatcher believes to be stored may be lost with it until it has written it again.
            if client.told_waiting != self.store.losses and not self.store.lacks_commits:
                client.told_waiting, client.told_at = self.store.losses, self.now
        elif answer.state == "ended":
            client.end = answer.error
        elif answer.error != "LedgerUnavailableError":
            raise BrokenPromiseError(f"{answer}")

    # clients

    def new_client(self) -> None:
        self.numbers += 1
        count = 2 if self.random.random() < 0.1 else 1
        biggest = max(len(host.gpu_ids) for host in self.hosts.values())
        name = f"r{self.numbers}"
        request = Request(name, Requirements(count=min(count, biggest)), owner=f"o{name}", ttl_seconds=TTL_SECONDS)
        self.clients[name] = Client(request, self.now, self.random.choice(list(self.hosts)))

    def new_program(self) -> None:
        self.numbers += 1
        host = self.random.choice(list(self.hosts.values()))
        if not host.is_up:
            return
        name = f"program{self.numbers}"
        program = self.programs[name] = Program(Request(name, owner="uid:0", process="1"), host.name, self.now)
        if self.random.random() < 0.1:
            program.leaves_at = self.now + self.random.uniform(0.0, 20.0)
        host.apply(Requested(program.request))
        host.observe(reads=False)

    def run_program(self, program: Program) -> None:
        host, name = self.hosts[program.host], program.request.request_id
        if not host.is_up:
            return
        if program.lease_id and self.now >= program.releases_at:
            host.apply(Released(program.lease_id))
            host.observe(reads=True)
        elif not program.lease_id and self.now >= program.leaves_at:
            host.apply(Cancelled(name))
            host.observe(reads=False)
        if isinstance(known := host.ledger.requests.get(name), Outcome):
            if not program.lease_id and self.now < program.leaves_at:
                raise BrokenPromiseError(f"{name} was ended by the fleet: {known}")
            del self.programs[name]

    def act(self, client: Client) -> None:
        if client.is_dead:
            return
        name = client.request.request_id
        if client.lease is not None:
            host = self.hosts[client.lease[0]]
            if not host.is_up:
                return
            try:
                if self.now >= client.releases_at:
                    if host.ledger.leases.lookup(client.lease[1]) is not None:
                        host.apply(Released(client.lease[1], client.request.owner))
                        host.observe(reads=True)
                    client.lease, client.end = None, "done"
                elif self.now - client.renewed_at > TTL_SECONDS / 3:
                    host.apply(Renewed(client.lease[1], client.request.owner))
                    client.renewed_at = self.now
            except IllegalEventError as error:
                if self.now - client.renewed_at < TTL_SECONDS - 1.0:
                    raise BrokenPromiseError(f"{name} lost {client.lease}, which it had renewed: {error}") from error
                client.lease, client.end = None, "lost"
            return
        if client.end:
            return
        server = self.hosts[client.server]
        if client.poll_id in server.polls and self.now - client.polled_at < 8.0:
            return
        if client.poll_id:
            server.polls.pop(client.poll_id, None)
        if not server.is_up or (client.poll_id and self.random.random() < 0.5):
            client.server = self.random.choice(
                [host.name for host in self.hosts.values() if host.is_up] or [client.server]
            )
            server = self.hosts[client.server]
        if not server.is_up:
            return
        self.numbers += 1
        client.poll_id, client.polled_at = f"p{self.numbers}", self.now
        client.first_asked_at = client.first_asked_at or self.now
        ask = Ask(client.poll_id, client.request, self.random.choice([0.0, 1.0, 5.0]))
        server.polls[ask.poll_id] = ask
        if server.side.dispatcher_link:
            self.post(server.name, server.side.dispatcher_link, ask)

    # time

    def step(self) -> None:
        self.steps += 1
        random = self.random
        self.now += random.choice([0.0, 0.01, 0.05, 0.2, 1.0])
        self.store.now = self.now
        if self.faults and random.random() < 0.04:
            self.fault()
        waiting = sum(not client.end and not client.is_dead for client in self.clients.values())
        if self.faults and waiting < 8 and random.random() < 0.2:
            self.new_client()
        if self.faults and len(self.programs) < 4 and random.random() < 0.05:
            self.new_program()
        self.work()

    def tick(self) -> None:
        for candidate in self.candidates.values():
            if candidate.is_up and not candidate.is_frozen:
                candidate.tick()

    def exchange(self) -> None:
        for link in self.links.values():
            if not link.is_up and self.random.random() < 0.3:
                self.open(link)
            if link.is_up:
                self.deliver(link)

    def work(self) -> None:
        # One that wakes up may hear its hosts before it hears its database.
        for part in (self.tick, self.exchange) if self.random.random() < 0.5 else (self.exchange, self.tick):
            part()
        for host in self.hosts.values():
            if host.is_up:
                host.tick()
                if self.is_heard(host):
                    self.heard(host)
                if host.local and self.random.random() < 0.05:
                    host.apply(Released(host.local.pop().lease_id))
                    host.observe(reads=True)
        for program in list(self.programs.values()):
            self.run_program(program)
        for name, client in list(self.clients.items()):
            self.act(client)
            if (client.is_dead and self.random.random() < 0.02) or client.end:
                del self.clients[name]
        for host in self.hosts.values():
            if host.is_up:
                self.check(host)

    def check(self, host: WorldHost) -> None:
        """No GPU is promised twice, by what clients believe."""
        holders: dict[str, str] = {}
        for client in self.clients.values():
            if client.lease is None or client.lease[0] != host.name or self.now - client.renewed_at > TTL_SECONDS:
                continue
            lease = host.ledger.leases.lookup(client.lease[1])
            for gpu_id in () if lease is None else lease.gpu_ids:
                if gpu_id in holders:
                    raise BrokenPromiseError(
                        f"{host.name} {gpu_id} is held by {holders[gpu_id]} and {client.request.request_id}"
                    )
                holders[gpu_id] = client.request.request_id

    def fault(self) -> None:
        random = self.random
        host, candidate = random.choice(list(self.hosts.values())), random.choice(list(self.candidates.values()))
        match random.randint(0, 9):
            case 0:
                self.close(random.choice(list(self.links.values())))
            case 1:
                self.say(f"{host.name} restarts")
                for link in self.links.values():
                    if link.host == host.name:
                        self.close(link)
                host.restart()
            case 2:
                self.say(f"{candidate.name} (office) is killed")
                for link in self.links.values():
                    if link.candidate == candidate.name:
                        self.close(link)
                candidate.stop()
            case 3:
                candidate.is_frozen = not candidate.is_frozen
                self.say(f"{candidate.name} frozen: {candidate.is_frozen}")
            case 4:
                self.store.is_up = not self.store.is_up
                self.say(f"database up: {self.store.is_up}")
            case 5 if random.random() < 0.5:
                self.say("failover of the database")
                self.store.failover()
            case 6:
                self.numbers += 1
                request = Request(f"local{self.numbers}", ttl_seconds=None)
                effects = host.apply(Requested(request, may_wait=False))
                host.local += [each.lease for each in effects if isinstance(each, Granted)]
            case 7 if self.clients:
                client = random.choice(list(self.clients.values()))
                client.is_dead = client.is_dead or random.random() < 0.3
            case 8 if self.clients:
                client = random.choice(list(self.clients.values()))
                if client.is_waiting:
                    client.server = host.name
            case _:
                candidate.is_frozen = False
                self.store.is_up = True

    def settle(self, seconds: float = 400.0) -> None:
        """Without faults everybody is served, and then all GPUs are free."""
        self.faults = False
        self.store.is_up = True
        for candidate in self.candidates.values():
            candidate.is_frozen = False
        for host in self.hosts.values():
            host.is_up = True
            for lease in host.local:
                host.apply(Released(lease.lease_id))
            host.local.clear()
        for link in self.links.values():
            self.close(link)
        end = self.now + seconds
        while self.now < end and (
            self.programs or any(not each.is_dead for each in self.clients.values()) or not self.is_idle()
        ):
            self.now += 0.25
            self.store.now = self.now
            self.work()
        left = [each for each in self.clients.values() if not each.is_dead]
        if left or self.programs:
            raise BrokenPromiseError(f"forgotten: {left}, {self.programs}")
        if not self.is_idle():
            leases = [lease for host in self.hosts.values() for lease in host.ledger.leases]
            left_over = [
                (each.lease_id, each.request.request_id, each.state)
                for d in self.dispatchers()
                for each in d.pool.leases
            ]
            raise BrokenPromiseError(f"not free at the end: {leases}, {self.dispatchers()}, {left_over}")

    def heard(self, host: WorldHost) -> None:
        """After a long silence its programs have lost their places."""
        if self.now - host.linked_at > 20.0:
            for program in self.programs.values():
                program.told_at = math.inf if program.host == host.name else program.told_at
        host.linked_at = self.now

    def is_heard(self, host: WorldHost) -> bool:
        """Whether the last dispatcher has heard it, over the link that it has now."""
        known = [each.hosts.get(host.name) for each in self.dispatchers() if each.epoch == self.highest_epoch]
        return any(each is not None and each.is_heard for each in known)

    def dispatchers(self) -> list[Dispatcher]:
        return [each.dispatcher for each in self.candidates.values() if each.dispatcher is not None]

    def is_idle(self) -> bool:
        found = self.dispatchers()
        return (
            not any(len(host.ledger.leases) for host in self.hosts.values())
            and len(found) == 1
            and not len(found[0].pool.leases)
            and not found[0].pool.queue.waiting
        )


def brief(message: Any) -> str:
    """One line for the log."""
    row = encode(message)
    for name in ("request", "gpus", "body", "secret"):
        if (value := row.pop(name, None)) and name == "request":
            row["r"] = value["request_id"]
    if "lease" in row:
        row["lease"] = row["lease"]["lease_id"], row["lease"]["request"]["request_id"], row["lease"]["state"]
    for name in ("leases", "ended"):
        if isinstance(row.get(name), list):
            row[name] = [
                (each["lease_id"], each.get("request_id") or each["request"]["request_id"], each["state"])
                for each in row[name]
            ][-6:]
    kind = row.pop("type")
    return f"{kind} {' '.join(f'{name}={value}' for name, value in row.items())}"


def run(seed: int, steps: int, **options: Any) -> World:
    """Raises `BrokenPromiseError`."""
    world = World(seed, **options)
    for _ in range(steps):
        world.step()
    world.settle()
    return world


__all__ = ["BrokenPromiseError", "World", "run"]
