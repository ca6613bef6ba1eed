"""The requests and calls of a server's clients to its fleet, repeated until they are answered. Part of `FleetAgent`."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpu_worker_pool.errors import ServiceUnavailableError
from gpu_worker_pool.fleet.messages import Answer, Ask, AskAbandoned, CallAnswer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from gpu_worker_pool.core.events import Request
    from gpu_worker_pool.fleet.links import Link
    from gpu_worker_pool.fleet.messages import Message

#: How much longer than its client a call waits for a dispatcher.
NO_DISPATCHER_SECONDS: Final = 5.0
#: How long an answer may take that need not wait for a GPU.
CALL_SECONDS: Final = 5.0


class FleetUnavailableError(Exception):
    """No dispatcher answers, so it is unknown whether the call had an effect. The text is for clients."""


class CallRefusedError(Exception):
    """A host or the dispatcher refused: `error` is the name of a class of `errors.py`, the text is its message."""

    def __init__(self, error: str, text: str) -> None:
        super().__init__(text)
        self.error = error


class _Question(NamedTuple):
    """An `Ask` of a client of this server that waits for its answer."""

    ask: Ask
    answer: asyncio.Future[Answer]
    #: When the client stops listening, on the loop's clock.
    listens_until: float


class _Call(NamedTuple):
    candidate: str
    answer: asyncio.Future[CallAnswer | None]


class Questions:
    """The links of a host, and the unanswered calls."""

    def __init__(self) -> None:
        #: Open links, by the candidate's own URL; and why an address has none.
        self._links: dict[str, Link] = {}
        self.troubles: dict[str, str] = {}
        #: The candidate over whose link the dispatcher is reached; empty: it is not known.
        self._dispatcher = ""
        #: Set when a call may be tried over another link.
        self._has_link = asyncio.Event()
        #: The polls of this server's clients, by id.
        self._questions: dict[str, _Question] = {}
        self._calls: dict[str, _Call] = {}
        self._is_stopping = False

    def _send(self, candidate: str, message: Message) -> None:
        raise NotImplementedError

    def stop_waiting(self) -> None:
        self._is_stopping = True
        for question in list(self._questions.values()):
            if not question.answer.done():
                self._tell_dispatcher(
                    AskAbandoned(question.ask.request.request_id, question.ask.poll_id, is_gone=False)
                )
                question.answer.set_exception(FleetUnavailableError("the server is stopping; ask again"))

    @property
    def dispatcher(self) -> str:
        return self._dispatcher

    @property
    def link_count(self) -> int:
        return len(self._links)

    def _wake_calls(self) -> None:
        self._has_link.set()
        self._has_link = asyncio.Event()

    def has_link(self, candidate: str) -> bool:
        return candidate in self._links

    def _follow(self, candidate: str) -> None:
        """There is a dispatcher now: send again what is unanswered."""
        before, self._dispatcher = self._dispatcher, candidate
        if before and before != candidate:
            self._call_again(before)
        if not candidate:
            return
        self._wake_calls()
        now = asyncio.get_running_loop().time()
        for question in list(self._questions.values()):
            self._send(candidate, replace(question.ask, wait_seconds=max(question.listens_until - now, 0.0)))

    def _tell_dispatcher(self, message: Message) -> None:
        if self._dispatcher:
            self._send(self._dispatcher, message)

    async def ask(self, request: Request, *, wait_seconds: float, may_reserve: bool, poll_id: str) -> Answer:
        """The answer of this dispatcher or its successor. Raises a `FleetUnavailableError`."""
        if self._is_stopping:
            raise FleetUnavailableError("the server is stopping; ask again")
        loop = asyncio.get_running_loop()
        ask = Ask(poll_id, request, wait_seconds, may_reserve)
        question = self._questions[poll_id] = _Question(ask, loop.create_future(), loop.time() + wait_seconds)
        self._tell_dispatcher(ask)
        try:
            async with asyncio.timeout(wait_seconds + NO_DISPATCHER_SECONDS):
                return await question.answer
        except TimeoutError:
            self._tell_dispatcher(AskAbandoned(request.request_id, poll_id, is_gone=False))
            raise FleetUnavailableError(self.why_silent()) from None
        except asyncio.CancelledError:
            self._tell_dispatcher(AskAbandoned(request.request_id, poll_id))
            raise
        finally:
            self._questions.pop(poll_id, None)

    def abandoned(self, request_id: str, poll_id: str, *, is_gone: bool = True) -> None:
        """The answer came, but the client was gone."""
        self._tell_dispatcher(AskAbandoned(request_id, poll_id, is_gone))

    def why_silent(self) -> str:
        if not self._links:
            problems = "; ".join(list(self.troubles.values())[:3])
            return f"this server has no link to its fleet ({problems or 'it has just started'}); trying again helps"
        if not self._dispatcher:
            return "the fleet has no dispatcher at the moment; one is elected within seconds: try again"
        return f"the fleet's dispatcher ({self._dispatcher}) does not answer; try again"

    async def call(self, make: Callable[[str], Message], *, may_be_any: bool = False) -> dict[str, Any]:
        """The body of the answer to the message that `make` makes of an id; `may_be_any`: any candidate passes it on.

        Raises `CallRefusedError` or `FleetUnavailableError`.
        """
        found: CallAnswer | None = None
        tried: set[str] = set()
        try:
            async with asyncio.timeout(CALL_SECONDS):
                while found is None:
                    while not (candidate := self._candidate_for_call(tried, may_be_any=may_be_any)):
                        await self._has_link.wait()
                    # If the link is lost, over another one: all of these calls may be repeated.
                    found = await self._call_over(candidate, make)
                    if found is not None and found.error == ServiceUnavailableError.__name__:
                        tried.add(candidate)
                        if self._candidate_for_call(tried, may_be_any=may_be_any):
                            found = None  # the host may have a link to that one
        except TimeoutError:
            raise FleetUnavailableError(self.why_silent()) from None
        if found.error:
            raise CallRefusedError(found.error, found.text)
        return dict(found.body)

    def _candidate_for_call(self, tried: Collection[str], *, may_be_any: bool) -> str:
        """The dispatcher if there is a link to it. Empty: there is no link."""
        if not may_be_any:
            return "" if self._dispatcher in tried else self._dispatcher
        return next((each for each in (self._dispatcher, *self._links) if each and each not in tried), "")

    async def _call_over(self, candidate: str, make: Callable[[str], Message]) -> CallAnswer | None:
        """None: the link is lost, or there is another dispatcher."""
        call_id = secrets.token_hex(8)
        answer: asyncio.Future[CallAnswer | None] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = _Call(candidate, answer)
        try:
            self._send(candidate, make(call_id))
            return await answer
        finally:
            del self._calls[call_id]

    def _call_again(self, candidate: str) -> None:
        for call in list(self._calls.values()):
            if call.candidate == candidate and not call.answer.done():
                call.answer.set_result(None)

    def _settle(self, message: Message) -> None:
        if isinstance(message, Answer):
            question = self._questions.get(message.poll_id)
            if question is not None and not question.answer.done():
                question.answer.set_result(message)
            elif message.state == "granted":
                self._tell_dispatcher(AskAbandoned(message.request_id, message.poll_id))
        elif isinstance(message, CallAnswer):
            call = self._calls.get(message.call_id)
            if call is not None and not call.answer.done():
                call.answer.set_result(message)
