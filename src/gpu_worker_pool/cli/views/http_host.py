"""A GPU server, to be looked at over HTTP. What it answers is believed as far as it has the documented shape."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from gpu_worker_pool.api.http_client import exchange, make_session, status_error, under
from gpu_worker_pool.api.replies import parse_json
from gpu_worker_pool.cli.keys import Tokens, admin_key, bearer
from gpu_worker_pool.config import MultiEndpointConfigurationManager, is_loopback_url
from gpu_worker_pool.errors import NotYourLeaseError, ServiceRefusedError, ServiceRetryableError
from gpu_worker_pool.leases.http import requirements_body
from gpu_worker_pool.leases.replies import read_problem

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import aiohttp

    from gpu_worker_pool.api.http_client import Answer
    from gpu_worker_pool.cli.views.queries import Body
    from gpu_worker_pool.config import EndpointConfig
    from gpu_worker_pool.core.requirements import Requirements

TIMEOUT_SECONDS: Final = 5.0
NO_LEASES: Final = "this server gives no leases: it is an older one, or not one of ours"

CANNOT_EXPLAIN: Final = "cannot explain wishes: it is an older server; update it, or ask with --request ID"


@asynccontextmanager
async def open_http_host(endpoint: EndpointConfig) -> AsyncIterator[HTTPHost]:
    async with make_session() as session:
        yield HTTPHost(endpoint, session)


class HTTPHost:
    def __init__(self, endpoint: EndpointConfig, session: aiohttp.ClientSession) -> None:
        self.endpoint = endpoint
        self._session = session

    # --- looking: open to all ---

    async def stats(self) -> Body:
        return await self._get("/gpu/stats", "gpus")

    async def leases(self) -> Body:
        return await self._get("/leases", "leases")

    async def queue(self) -> Body:
        return await self._get("/queue", "queue")

    async def explain_request(self, request_id: str) -> Body | None:
        path = f"/queue/{quote(request_id, safe='')}"
        answer = await self._send("GET", path)
        if answer.status == 404:
            return None
        return self._read("GET", path, answer, "gpus")

    async def explain_requirements(self, requirements: Requirements) -> Body:
        body = json.dumps(requirements_body(requirements)).encode()
        answer = await self._send("POST", "/explain", {"Content-Type": "application/json"}, body)
        if answer.status in (404, 405):
            raise ServiceRefusedError(f"{self.endpoint.url} {CANNOT_EXPLAIN}", status=answer.status)
        return self._read("POST", "/explain", answer, "gpus")

    # --- intervening: with the token of one's own request, or an administrator's key ---

    async def release(self, lease_id: str) -> bool:
        leases = (await self.leases())["leases"]
        row = next((row for row in leases if row.get("lease_id") == lease_id), None)
        if row is None:
            return False
        path, request_id = f"/leases/{quote(lease_id, safe='')}", str(row.get("request_id"))
        return await self._delete(path, request_id, f"lease {lease_id}")

    async def cancel(self, request_id: str) -> bool:
        return await self._delete(f"/queue/{quote(request_id, safe='')}", request_id, f"request {request_id}")

    async def _delete(self, path: str, request_id: str, what: str) -> bool:
        headers = {}
        if (token := Tokens().of(request_id)) is not None:
            headers["X-Lease-Token"] = token
        key, is_needed = admin_key(), True
        if key is None:
            key, is_needed = MultiEndpointConfigurationManager().get_api_key(), not is_loopback_url(self.endpoint.url)
        if key is not None and is_needed:
            headers["Authorization"] = bearer(key, self.endpoint.url)
        answer = await self._send("DELETE", path, headers)
        if answer.status == 401 and key is not None and not is_needed:
            answer = await self._send("DELETE", path, headers | {"Authorization": bearer(key, self.endpoint.url)})
        if answer.status == 404:
            return False
        if answer.status == 403 and _problem(answer).error in ("token_needed", "not_yours"):
            raise NotYourLeaseError(
                f"{what} is not one that you asked for with gpu-pool here: its holder can release it, or an "
                "administrator, with one of the server's GPU_POOL_ADMIN_KEYS in GPU_POOL_ADMIN_KEY"
            )
        self._read("DELETE", path, answer, None)
        return True

    # --- HTTP ---

    async def _get(self, path: str, wanted: str) -> Body:
        return self._read("GET", path, await self._send("GET", path), wanted)

    async def _send(
        self, method: str, path: str, headers: dict[str, str] | None = None, body: bytes | None = None
    ) -> Answer:
        url = under(self.endpoint.url, path)
        return await exchange(self._session, method, url, timeout_seconds=TIMEOUT_SECONDS, headers=headers, body=body)

    def _read(self, method: str, path: str, answer: Answer, wanted: str | None) -> Body:
        """`wanted`: the list that it must have."""
        url = under(self.endpoint.url, path)
        if answer.status != 200 or answer.body is None:
            is_lease_route = path.startswith(("/leases", "/queue"))
            raise status_error(method, url, answer, NO_LEASES if is_lease_route and answer.status == 404 else "")
        try:
            body = parse_json(answer.body)
        except ServiceRetryableError as error:
            raise ServiceRetryableError(f"{method} {url} was answered, but {error}") from None
        if not isinstance(body, dict) or (wanted is not None and not isinstance(body.get(wanted), list)):
            raise ServiceRetryableError(f"{method} {url} was answered, but not as a GPU server does")
        return body


def _problem(answer: Answer) -> Any:
    try:
        return read_problem(None if answer.body is None else parse_json(answer.body))
    except ServiceRetryableError:
        return read_problem(None)
