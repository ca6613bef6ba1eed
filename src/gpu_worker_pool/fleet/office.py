"""A candidate's office: stands for election, runs the dispatcher while it is elected, and takes the links of all hosts.

What the dispatcher decides is stored by a thread of its own: the event loop never waits for the database. All changes
that came about while one commit was under way share the next.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from gpu_worker_pool.fleet import dispatcher as events
from gpu_worker_pool.fleet.dispatcher import Dispatcher, Received, Send, StepDown
from gpu_worker_pool.fleet.links import take_link
from gpu_worker_pool.fleet.message_json import MessageError, decode, encode
from gpu_worker_pool.fleet.messages import Answer, Call, CallAnswer, Join, PlaceRefused, Query, TurnedAway, Welcome
from gpu_worker_pool.fleet.store import CommitsLost, Deposed, StoreMismatch, StoreUnavailable
from gpu_worker_pool.fleet.store import Office as Term

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from gpu_worker_pool.core.policy import Policy
    from gpu_worker_pool.core.settings import PoolSettings
    from gpu_worker_pool.fleet.dispatcher import Effect, Event
    from gpu_worker_pool.fleet.keys import FleetKeys
    from gpu_worker_pool.fleet.links import AcceptedLink, Link
    from gpu_worker_pool.fleet.messages import Message
    from gpu_worker_pool.fleet.store import FleetState, FleetStore

    Rows = Mapping[str, Mapping[str, Mapping[str, Any]]]

logger: logging.Logger = logging.getLogger(__name__)

T = TypeVar("T")
#: The length of a dispatcher's term, and how often it is renewed.
OFFICE_SECONDS: Final = 2.0
RENEW_SECONDS: Final = 0.5
#: How often a candidate checks whether there is a dispatcher.
LOOK_SECONDS: Final = 0.5
#: How much longer it waits for one whose link is open: its database may just be slow.
HEARD_SECONDS: Final = 4.0
#: After this time without an answer, the database counts as down.
SLOW_SECONDS: Final = 3.0
#: How long a call that is passed on to a host waits for its answer.
CALL_SECONDS: Final = 10.0
MOST_CALLS: Final = 20_000


class _Routed(NamedTuple):
    """A call that was passed on, and where its answer goes."""

    asker: str
    call_id: str
    timer: asyncio.TimerHandle


class FleetOffice:
    """Belongs to one event loop; only its own thread touches the store."""

    def __init__(
        self,
        name: str,
        url: str,
        keys: FleetKeys,
        open_store: Callable[[], FleetStore],
        settings: PoolSettings,
        *,
        policy: Callable[[], Policy],
        hears: Callable[[str], bool] = lambda _: False,
        migrate: Callable[[FleetStore, Term, FleetState], object] | None = None,
        office_seconds: float = OFFICE_SECONDS,
    ) -> None:
        """`hears`: whether this host has a link to the candidate with this URL. `migrate`: of older tables."""
        self.name = name
        self.url = url
        self._keys = keys
        self._open_store = open_store
        self._settings = settings
        self._policy = policy
        self._known_policy: Policy | None = None
        self._hears = hears
        self._office_seconds = office_seconds
        self._migrate = migrate
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fleet-store")
        self._store: FleetStore | None = None
        self._links: dict[str, Link] = {}
        self._unnamed: set[Link] = set()
        self._joins: dict[str, Join] = {}
        self._routed: dict[str, _Routed] = {}
        #: Queries about the fleet; their answers include the state of the database.
        self._fleet_queries: set[tuple[str, str]] = set()
        self._dispatcher: Dispatcher | None = None
        self._term: Term | None = None
        self._renewed_at = 0.0
        self._offset = 0.0
        self._lowest_epoch = 0
        self._timer: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._said: Welcome | None = None
        #: The last dispatcher that was another one, and when the database last said so.
        self._heard_url, self._heard_at = "", -HEARD_SECONDS
        self._state: FleetState | None = None
        #: Whether the database answers; None before it was asked.
        self._problem: str | None = "it has not answered yet"
        self._problem_since = time.monotonic()
        #: How often this candidate was elected, what it granted and which hosts refused, and how long its last commit
        #: took.
        self.takeovers: int = 0
        self.grants: int = 0
        self.refusals: int = 0
        self.commit_seconds: float | None = None

    # --- life ---

    async def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Another candidate can be elected at once."""
        term, self._term = self._term, None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._drop()
        for link in (*self._links.values(), *self._unnamed):
            link.close("the server stops")
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await asyncio.get_running_loop().run_in_executor(self._thread, self._close, term)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _close(self, term: Term | None) -> None:
        """In the store's thread."""
        if self._store is not None:
            with suppress(Exception):
                if term is not None:
                    self._store.concede(term)
            with suppress(Exception):
                self._store.close()

    @property
    def is_in_office(self) -> bool:
        return self._dispatcher is not None

    @property
    def database(self) -> dict[str, Any]:
        """As `GET /fleet` shows it."""
        seconds = round(time.monotonic() - self._problem_since, 3)
        if self._problem is None:
            return {"state": "up", "seconds": seconds, "commit_seconds": self.commit_seconds}
        return {"state": "away", "seconds": seconds, "problem": self._problem}

    # --- links ---

    def take_link(self) -> AcceptedLink:
        """For a connection that asks for one."""
        return take_link(self._keys, self.url, self.attach)

    def attach(self, link: Link) -> None:
        """A host's link; its first message says which host it is."""
        self._unnamed.add(link)
        link.on_message = self._received
        link.on_closed = self._lost

    def _lost(self, link: Link, _reason: str) -> None:
        self._unnamed.discard(link)
        if self._links.get(link.name) is link:
            del self._links[link.name]
            del self._joins[link.name]
            self._apply(events.LinkLost(link.name))

    def _received(self, link: Link, row: dict[str, Any]) -> None:
        try:
            message: Any = decode(row)
        except MessageError as error:
            logger.warning("%s sent a message that is not understood: %s", link.name or "a host", error)
            return
        if isinstance(message, Join):
            self._joined(link, message)
        elif not link.name:
            link.close("the first message must say who the host is")
        elif isinstance(message, Call):
            self._pass_on(link, message)
        elif isinstance(message, CallAnswer):
            self._pass_back(message)
        else:
            if isinstance(message, Query) and message.what == "fleet" and self._dispatcher is not None:
                self._fleet_queries.add((link.name, message.call_id))
            if isinstance(message, PlaceRefused):
                self.refusals += 1
            self._apply(Received(link.name, message))

    def _joined(self, link: Link, join: Join) -> None:
        self._lowest_epoch = max(self._lowest_epoch, join.epoch)
        before, known = self._links.get(join.name), self._joins.get(join.name)
        if before is not None and known is not None and before is not link:
            if known.ledger_id != join.ledger_id and before.is_open:
                reason = (
                    f"another host is called {join.name} and has another ledger: give one of them another "
                    "GPU_POOL_HOST_NAME"
                )
                link.send(encode(TurnedAway(reason)))
                return
            # The same host has come back before the old connection was known to be broken.
            self._apply(events.LinkLost(join.name))
            before.on_closed = lambda _link, _reason: None
            before.close("the host has a new link")
        self._unnamed.discard(link)
        link.name = join.name
        self._links[join.name], self._joins[join.name] = link, join
        if self._dispatcher is not None:
            self._apply(Received(join.name, join))
        elif (welcome := self._welcome()) is not None:
            link.send(encode(welcome))

    def _welcome(self) -> Welcome | None:
        """Who is dispatcher, as the database said last; None where it was never heard."""
        state = self._state
        if state is None:
            return None
        name, url = ("", "") if state.dispatcher is None else state.dispatcher
        if name == self.name and self._dispatcher is None:
            name, url = "", ""  # not any more, or not yet
        candidates = [join.url for join in self._joins.values() if join.is_candidate]
        epoch = state.epoch if name else 0
        known = tuple(dict.fromkeys([self.url, *([url] if url else []), *candidates]))
        is_own = self._dispatcher is not None
        return Welcome(state.fleet_id, epoch, name, url, known, secret=state.secret, is_own=is_own)

    def _tell_all(self) -> None:
        """Tell all links when there is a new dispatcher."""
        welcome = self._welcome()
        if welcome is not None and welcome != self._said:
            self._said = welcome
            for link in list(self._links.values()):
                link.send(encode(welcome))

    # --- calls to one host ---

    def _pass_on(self, link: Link, call: Call) -> None:
        target = self._links.get(call.host)
        if target is None or len(self._routed) >= MOST_CALLS:
            text = f"the host {call.host[:40]} has no link to its fleet now; try again"
            link.send(encode(CallAnswer(call.call_id, error="ServiceUnavailableError", text=text)))
            return
        number = secrets.token_hex(8)
        timer = asyncio.get_running_loop().call_later(CALL_SECONDS, self._routed.pop, number, None)
        self._routed[number] = _Routed(link.name, call.call_id, timer)
        target.send(encode(Call(number, call.host, call.what, call.arguments)))

    def _pass_back(self, answer: CallAnswer) -> None:
        routed = self._routed.pop(answer.call_id, None)
        if routed is not None:
            routed.timer.cancel()
            if (link := self._links.get(routed.asker)) is not None:
                link.send(encode(CallAnswer(routed.call_id, answer.body, answer.error, answer.text)))

    # --- the dispatcher ---

    def _now(self) -> float:
        return time.monotonic() + self._offset

    def _apply(self, event: Event) -> None:
        if self._dispatcher is None:
            return
        self._perform(self._dispatcher.apply(event, self._now()))
        self._wake.set()
        self._set_timer()

    def _perform(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect.to, effect.message)
            elif isinstance(effect, StepDown):
                logger.warning("%s is dispatcher in epoch %d: stepping down", effect.epoch_owner, effect.epoch)
                self._lowest_epoch = max(self._lowest_epoch, effect.epoch)
                self._drop()

    def _send(self, to: str, message: Message) -> None:
        if isinstance(message, Answer) and message.state == "granted":
            self.grants += 1
        elif isinstance(message, CallAnswer) and (to, message.call_id) in self._fleet_queries:
            self._fleet_queries.discard((to, message.call_id))
            body = {**message.body, "database": self.database}
            message = CallAnswer(message.call_id, body, message.error, message.text)
        if (link := self._links.get(to)) is not None:
            link.send(encode(message))

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._dispatcher is not None and (due := self._dispatcher.next_due()) < float("inf"):
            seconds = max(due - self._now(), 0.0)
            self._timer = asyncio.get_running_loop().call_later(seconds, self._apply, events.TimePassed())

    def _drop(self) -> None:
        """It is no longer dispatcher, or its term cannot be confirmed now."""
        self._dispatcher = None
        self._fleet_queries.clear()
        self._wake.set()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- the database ---

    async def _in_thread(self, work: Callable[[FleetStore], T]) -> T:
        """It may take long, but blocks nothing else. If it takes too long, the database counts as down."""

        def run() -> T:
            if self._store is None:
                self._store = self._open_store()
            return work(self._store)

        done = asyncio.get_running_loop().run_in_executor(self._thread, run)
        began_at = time.monotonic()
        is_slow = False
        try:
            while not done.done():
                await asyncio.wait({done}, timeout=SLOW_SECONDS)
                if not done.done() and not is_slow:
                    is_slow = True
                    self._database_lost(f"it does not answer within {SLOW_SECONDS:g} s")
            found = done.result()
        except (StoreUnavailable, StoreMismatch) as error:
            self._database_lost(str(error))
            raise
        self.commit_seconds = round(time.monotonic() - began_at, 6)
        self._database_back()
        return found

    def _database_lost(self, problem: str) -> None:
        if self._problem is None or (self._state is None and problem != self._problem):
            logger.error("the fleet's database cannot be used: %s", problem)
        if self._problem is None:
            self._problem_since = time.monotonic()
        self._problem = problem
        self._apply(events.StoreLost(problem))

    def _database_back(self) -> None:
        if self._problem is not None:
            self._problem, self._problem_since = None, time.monotonic()
            self._heard_at = time.monotonic()  # a dispatcher that is still there may renew its term first
            logger.info("the fleet's database answers")
            self._apply(events.StoreBack())

    async def _run(self) -> None:
        while True:
            try:
                if self._dispatcher is None:
                    await self._be_candidate()
                else:
                    await self._be_dispatcher()
            except (StoreUnavailable, StoreMismatch):
                await asyncio.sleep(LOOK_SECONDS * (0.5 + random.random()))  # noqa: S311
            except Deposed as error:
                if self._dispatcher is not None:
                    logger.warning("another dispatcher is in office (epoch %d)", error.epoch)
                self._lowest_epoch = max(self._lowest_epoch, error.epoch)
                self._drop()
            except Exception:
                logger.exception("the fleet's office failed; starting it again")
                self._drop()
                await asyncio.sleep(1.0)

    async def _be_candidate(self) -> None:
        state = self._state = await self._in_thread(lambda store: store.look())
        self._tell_all()
        now = time.monotonic()
        if state.dispatcher is not None and state.dispatcher[0] != self.name:
            self._heard_url, self._heard_at = state.dispatcher[1], now
            until_end = min(max(state.remaining_seconds, 0.05), LOOK_SECONDS)
            await asyncio.sleep(until_end + random.random() * 0.1)  # noqa: S311
        elif now - max(self._heard_at, self._problem_since) < HEARD_SECONDS and self._hears(self._heard_url):
            await asyncio.sleep(LOOK_SECONDS)  # it still runs; its database is slow, or has just come back
        else:
            await self._stand(None)

    async def _stand(self, rows: Rows | None) -> None:
        """`rows`: what must be written again because the database lost it."""
        lowest = self._lowest_epoch
        term = await self._in_thread(lambda store: store.stand(self.name, self.url, lowest, self._office_seconds))
        self._renewed_at = time.monotonic()
        if term is None:
            await asyncio.sleep(0.1 + random.random() * 0.2)  # noqa: S311
            return
        elected = term
        if rows is None:
            found = await self._in_thread(lambda store: store.load(elected))
        else:
            found = lost = rows
            term = await self._in_thread(lambda store: store.rewrite(elected, lost))
        state = self._state = await self._in_thread(lambda store: store.look())
        if self._migrate is not None:
            migrate, elected = self._migrate, term
            await self._in_thread(lambda store: migrate(store, elected, state))
        if state.epoch != term.epoch:
            raise Deposed(epoch=state.epoch)
        self._offset = state.database_time - time.monotonic()
        self._term, self._lowest_epoch = term, max(self._lowest_epoch, term.epoch)
        self.takeovers += 1
        logger.info("this server is the fleet's dispatcher now, in epoch %d", term.epoch)
        self._dispatcher = Dispatcher(
            self.name,
            self.url,
            fleet_id=state.fleet_id,
            epoch=term.epoch,
            secret=state.secret,
            rows=found,
            settings=self._settings,
            now=self._now(),
        )
        self._known_policy = None
        self._said = self._welcome()
        self._apply_policy()
        for join in list(self._joins.values()):
            self._apply(Received(join.name, join))
        self._set_timer()

    def _apply_policy(self) -> None:
        if (policy := self._policy()) != self._known_policy:
            self._known_policy = policy
            self._apply(events.NewPolicy(policy))

    async def _be_dispatcher(self) -> None:
        """One commit or one renewal of the term; a short pause if neither is due."""
        term, running = self._term, self._dispatcher
        assert term is not None  # it is in office
        assert running is not None
        if self._problem is not None:
            await self._settle(term)
            return
        if time.monotonic() - self._renewed_at >= RENEW_SECONDS:
            began_at = time.monotonic()
            await self._in_thread(lambda store: store.renew(term, self.name, self._office_seconds))
            self._renewed_at = began_at
            self._apply_policy()
        self._wake.clear()
        batch, changes = running.take_changes()
        if changes:
            try:
                self._term = await self._in_thread(lambda store: store.write(term, changes))
            except CommitsLost:
                await self._write_all_again(term)
                return
            if self._dispatcher is running:
                self._apply(events.Stored(batch))
            return
        left = self._renewed_at + RENEW_SECONDS - time.monotonic()
        if left > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._wake.wait()

    async def _settle(self, term: Term) -> None:
        """The connection was lost, perhaps during a commit: the revision shows whether the commit took place."""
        state = await self._in_thread(lambda store: store.look())
        owner = self.name if state.dispatcher is None else state.dispatcher[0]  # a term that has ended can be renewed
        if state.epoch > term.epoch or (state.epoch == term.epoch and owner != self.name):
            raise Deposed(epoch=state.epoch)
        if state.epoch < term.epoch or state.revision < term.revision:
            await self._write_all_again(term)
        else:
            # A commit whose outcome was not known, and which took place, is written once more: that changes nothing.
            self._term = Term(term.epoch, state.revision)
        self._renewed_at = 0.0

    async def _write_all_again(self, term: Term) -> None:
        """A failover of the database has lost commits, perhaps even the election."""
        running = self._dispatcher
        if running is None:
            return
        logger.warning("the fleet's database has lost commits: writing them again")
        batch, rows = running.everything()
        try:
            self._term = await self._in_thread(lambda store: store.rewrite(term, rows))
        except Deposed as error:
            if error.epoch >= term.epoch:
                raise
            self._drop()
            await self._stand(rows)
            return
        if self._dispatcher is running:
            self._apply(events.Stored(batch))
