"""A GPU server of which each route does what a test says, for what a real one does only in bad times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.fakes.http_server import Behaviour, Conversation, HostileServer, answer_json, gpu_row, summary

HOME = {"message": "GPU Statistics Server", "endpoints": {}, "features": ["leases"]}
UUID = "GPU-aaaa0000-0000-4000-8000-00000000000{}"


class LeaseServer(HostileServer):
    """`routes`: by the beginning of the request, such as `POST_leases`; the longest that fits counts."""

    def __init__(self, *, gpus: int = 2, features: list[str] | None = None, **routes: Behaviour) -> None:
        rows = [gpu_row(index, uuid=UUID.format(index), process_count=0) for index in range(gpus)]
        home = {**HOME, "features": ["leases"] if features is None else features}
        self.routes: dict[str, Behaviour] = {
            "GET / ": answer_json(home),
            "GET /gpu/summary ": answer_json(summary(*rows)),
            **{name.replace("_", " /", 1): behaviour for name, behaviour in routes.items()},
        }
        super().__init__(self._answer)

    def _answer(self, talk: Conversation) -> None:
        # A body that came before is still in front of what is read next.
        start = talk.request[max(talk.request.rfind(verb) for verb in (b"GET ", b"POST ", b"DELETE ")) :].decode()
        fitting = [name for name in self.routes if start.startswith(name)]
        behaviour = self.routes[max(fitting, key=len)] if fitting else answer_json({"detail": "there is none"}, 404)
        behaviour(talk)

    def asked(self, start: str) -> int:
        """How often something that begins so was asked."""
        return sum(start.encode() in request for request in self.requests)


def refusing(status: int, error: str, detail: str = "because", **more: Any) -> Behaviour:
    return answer_json({"detail": detail, "error": error, **more}, status)


Route = Callable[[Conversation], object]
