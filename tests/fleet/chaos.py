"""Three servers, PostgreSQL with a replica, eight clients: everything is killed, frozen and cut off at random.

`python -m tests.fleet.chaos SECONDS REQUESTS SEED [--namespaces] [--only ACTION]` prints what was done, and what was
found as JSON. What the clients saw is judged by `promises.py`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from tests.fleet.hosts import API_KEY, FleetServer, FleetServers, address_of, make_fleet_tables
from tests.fleet.network import Network
from tests.fleet.promises import Span, problems, read
from tests.postgres_server import PostgresServer, remove_copies

ROOT = Path(__file__).parents[2]
CLIENTS = 8
#: Short, so that what the killed held comes back within the test.
TTL_SECONDS = 4.0
HOSTS = ("gpu-1", "gpu-2", "gpu-3")
#: After a failover the dispatcher lives for so long, so that it can write again what was lost.
REWRITE_SECONDS = 6.0


class Chaos:
    def __init__(self, folder: Path, seed: str, network: Network | None) -> None:
        self.draw = random.Random(seed)
        self.network = network
        self.histories = folder / "histories"
        self.histories.mkdir(parents=True)
        self.killed_at: dict[int, float] = {}
        self.lost_places: list[Span] = []
        self.done: dict[str, int] = {}
        self.clients: list[subprocess.Popen[bytes]] = []
        self._stack = ExitStack()
        self._dispatcher_is_safe_until = 0.0

        def place(host: str) -> tuple[str, str] | None:
            return None if network is None else network.place(host)

        self.primary = PostgresServer(place=place("db-1"))
        self.databases = [self.primary]
        self.primary.start()
        self.primary.create_database("fleet")
        make_fleet_tables(self.primary.url("fleet"))
        self.replica = self.primary.replica(place=place("db-2"))
        self.databases.append(self.replica)
        self.replica.start()
        url = address_of("fleet", self.primary, self.replica)
        places = [] if network is None else [network.place(host) for host in HOSTS]
        self.fleet = FleetServers(folder / "servers", url, namespaces=places, names=HOSTS)
        self._stack.enter_context(self.fleet)

    def close(self) -> None:
        for client in self.clients:
            client.kill()
            client.wait()
        self._stack.close()
        for database in self.databases:
            database.remove()
        remove_copies()

    # --- clients ---

    def start_client(self) -> None:
        urls = [server.url for server in self.fleet.servers]
        self.draw.shuffle(urls)
        key = "" if self.network is None else API_KEY
        arguments = [",".join(urls), str(self.histories), str(self.draw.random()), key, str(TTL_SECONDS)]
        command = [sys.executable, "-m", "tests.fleet.chaos_client", *arguments]
        self.clients.append(subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT))

    def granted(self) -> int:
        return sum(path.read_bytes().count(b'"granted"') for path in self.histories.glob("client-*.jsonl"))

    def finish_clients(self) -> None:
        for client in self.clients:
            assert client.stdin is not None
            client.stdin.close()
        for client in self.clients:
            assert client.wait(240) == 0

    # --- what is done to them ---

    def kill_client(self) -> None:
        client = self.clients.pop(self.draw.randrange(len(self.clients)))
        self.killed_at[client.pid] = time.monotonic()
        client.kill()
        client.wait()
        self.start_client()

    def freeze_client(self) -> None:
        client = self.draw.choice(self.clients)
        client.send_signal(signal.SIGSTOP)
        time.sleep(self.draw.uniform(0.2, 1.5 * TTL_SECONDS))
        client.send_signal(signal.SIGCONT)

    def a_server(self) -> FleetServer:
        """The dispatcher every other time."""
        self.wait_until_dispatcher_may_die()
        return self.fleet.dispatcher() if self.draw.random() < 0.5 else self.draw.choice(self.fleet.servers)

    def wait_until_dispatcher_may_die(self) -> None:
        while (left := self._dispatcher_is_safe_until - time.monotonic()) > 0:
            time.sleep(min(left, 0.2))

    def kill_server(self) -> None:
        server = self.a_server()
        server.kill()
        time.sleep(self.draw.uniform(0.0, 3.0))
        server.start()

    def freeze_server(self) -> None:
        server = self.a_server()
        server.freeze()
        time.sleep(self.draw.uniform(0.2, 6.0))
        server.thaw()

    def cut_server_off(self) -> None:
        assert self.network is not None
        server = self.a_server()
        self.network.cut(server.name)
        time.sleep(self.draw.uniform(0.2, 8.0))
        self.network.mend(server.name)

    def cut_database_off(self) -> None:
        assert self.network is not None
        host = "db-1" if self.primary.address == self.network.address("db-1") else "db-2"
        self.network.cut(host)
        time.sleep(self.draw.uniform(0.2, 6.0))
        self.network.mend(host)

    def kill_database(self) -> None:
        """And start it again, with all its commits."""
        self.primary.kill()
        time.sleep(self.draw.uniform(0.0, 3.0))
        self.primary.start()

    def freeze_database(self) -> None:
        self.primary.freeze()
        time.sleep(self.draw.uniform(0.2, 5.0))
        self.primary.thaw()

    def fail_over(self) -> None:
        """To the replica, without the last commits; the dispatcher lives, and knows them."""
        self._fail_over()
        self._dispatcher_is_safe_until = time.monotonic() + REWRITE_SECONDS

    def fail_over_and_kill_the_dispatcher(self) -> None:
        self.wait_until_dispatcher_may_die()
        begun_at = time.monotonic()
        dispatcher = self.fleet.dispatcher()
        dispatcher.kill()
        self._fail_over()
        dispatcher.start()
        self.fleet.dispatcher()
        self.lost_places.append(Span(begun_at, time.monotonic() + REWRITE_SECONDS))

    def _fail_over(self) -> None:
        self.replica.wait_until_caught_up(self.primary)
        self.replica.cut_off()
        time.sleep(self.draw.uniform(0.3, 1.0))
        self.primary.kill()
        self.replica.promote()
        gone, self.primary = self.primary, self.replica
        place = None if gone.namespace is None else (gone.namespace, gone.address)
        self.replica = self.primary.replica(place=place, port=gone.port)
        self.databases.append(self.replica)
        gone.remove()
        self.replica.start()

    # --- the whole ---

    def run(self, seconds: float, requests: int, only: str | None = None) -> None:
        actions = {
            self.kill_client: 3,
            self.freeze_client: 2,
            self.kill_server: 3,
            self.freeze_server: 2,
            self.kill_database: 1,
            self.freeze_database: 1,
            self.fail_over: 1,
            self.fail_over_and_kill_the_dispatcher: 1,
        }
        if self.network is not None:
            actions |= {self.cut_server_off: 3, self.cut_database_off: 1}
        if only is not None:
            actions = {action: 1 for action in actions if action.__name__ == only}
        for _ in range(CLIENTS):
            self.start_client()
        begun_at = time.monotonic()
        # Each once, whatever is drawn, as far as there is time; then by chance.
        order = list(actions)
        self.draw.shuffle(order)
        while (time.monotonic() - begun_at < seconds) or self.granted() < requests:
            if time.monotonic() - begun_at < seconds:
                if not order:
                    order = self.draw.choices(list(actions), list(actions.values()), k=5)
                action = order.pop()
                at = time.monotonic() - begun_at
                action()
                self.done[action.__name__] = self.done.get(action.__name__, 0) + 1
                print(f"{at:6.1f} s {action.__name__}; {self.granted()} granted", flush=True)  # noqa: T201
            time.sleep(self.draw.uniform(0.2, 1.5))
            assert time.monotonic() - begun_at < 3 * seconds + 120, f"only {self.granted()} of {requests} granted"
        self.finish_clients()

    def found(self) -> list[str]:
        return problems(read(self.histories, self.killed_at), self.killed_at, self.lost_places)

    def wait_until_all_free(self) -> list[str]:
        try:
            self.fleet.all_free()
        except AssertionError as error:
            return [f"not all is free at the end: {error}"]
        return []


def main() -> None:
    seconds, requests, seed = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if "--inside" not in sys.argv and "--namespaces" in sys.argv:
        with Network([*HOSTS, "db-1", "db-2"]) as network:
            command = ["ip", "netns", "exec", network.hub, sys.executable, "-m", "tests.fleet.chaos", *sys.argv[1:]]
            process = subprocess.Popen([*command, "--inside", str(os.getpid())], cwd=ROOT)
            try:
                sys.exit(process.wait())
            finally:
                with suppress(ProcessLookupError):
                    process.terminate()
                    process.wait()
    folder = Path(tempfile.mkdtemp(prefix="gpu-pool-chaos-"))
    network = None
    if "--inside" in sys.argv:
        network = Network([*HOSTS, "db-1", "db-2"], of=int(sys.argv[sys.argv.index("--inside") + 1]))
    chaos = Chaos(folder, seed, network)
    try:
        chaos.run(seconds, requests, sys.argv[sys.argv.index("--only") + 1] if "--only" in sys.argv else None)
        found = [*chaos.wait_until_all_free(), *chaos.found()]
        result = {"granted": chaos.granted(), "done": chaos.done, "folder": str(folder), "problems": found}
        print(json.dumps(result), flush=True)  # noqa: T201
        if found:
            print(chaos.fleet.logs[-20_000:], file=sys.stderr)  # noqa: T201
    finally:
        chaos.close()
    if not found:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    main()
