"""The legal moves of a request and of a lease, each in one table; the diagrams in the documentation come from them."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class State(StrEnum):
    # An enum's own hash is a Python function, and states are looked up for every request.
    __hash__ = str.__hash__


class RequestState(State):
    WAITING = "waiting"
    GRANTED = "granted"
    TIMED_OUT = "timed_out"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    GIVEN_UP = "given_up"
    STOPPED = "stopped"


class LeaseState(State):
    #: Granted while its client was between two polls; the client does not know of it yet.
    OFFERED = "offered"
    HELD = "held"
    #: No longer its holder's, and not yet free.
    QUARANTINED = "quarantined"
    RELEASED = "released"
    RECLAIMED = "reclaimed"
    LOST = "lost"


#: For each state the next ones, and what leads there. A state without a next one is final.
REQUEST_MOVES: Mapping[RequestState, Mapping[RequestState, str]] = {
    RequestState.WAITING: {
        RequestState.GRANTED: "enough eligible GPUs are free",
        RequestState.TIMED_OUT: "its deadline passed",
        RequestState.CANCELLED: "its client cancelled it",
        RequestState.REJECTED: "no endpoint, or not the lease around it, can ever serve it",
        RequestState.GIVEN_UP: "its client stopped polling",
        RequestState.STOPPED: "the pool stopped",
    },
    RequestState.GRANTED: {},
    RequestState.TIMED_OUT: {},
    RequestState.CANCELLED: {},
    RequestState.REJECTED: {},
    RequestState.GIVEN_UP: {},
    RequestState.STOPPED: {},
}

LEASE_MOVES: Mapping[LeaseState, Mapping[LeaseState, str]] = {
    LeaseState.OFFERED: {
        LeaseState.HELD: "its client polled again",
        LeaseState.RELEASED: "its client cancelled",
        LeaseState.RECLAIMED: "it was not claimed in time, or its client is gone",
        LeaseState.LOST: "all its GPUs are gone, or the lease around it",
    },
    LeaseState.HELD: {
        LeaseState.OFFERED: "the answer did not reach its client",
        LeaseState.RELEASED: "its holder released it, or cancelled at that instant",
        LeaseState.QUARANTINED: "it expired, or its holder or a GPU is gone, or released with leases held inside it",
        LeaseState.RECLAIMED: "inside another lease: it expired, or its holder is gone",
        LeaseState.LOST: "all its GPUs are gone, or the lease around it",
    },
    LeaseState.QUARANTINED: {
        LeaseState.RECLAIMED: "nothing is held inside it and readings show the GPU empty, or an administrator says so",
        LeaseState.LOST: "all its GPUs are gone, or the lease around it",
    },
    LeaseState.RELEASED: {},
    LeaseState.RECLAIMED: {},
    LeaseState.LOST: {},
}

LIVE_LEASE_STATES = frozenset({LeaseState.OFFERED, LeaseState.HELD})


class IllegalMoveError(AssertionError):
    """The core tried a move that its table does not have: a bug in the core, never in its user."""
