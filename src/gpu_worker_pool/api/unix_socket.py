"""Connects to the GPU server of this host over its Unix socket, and sends nothing to a server that must not be trusted.

Any user can listen on some socket; what counts is who may write to the folder that this one is in.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

import aiohttp
from aiohttp.client_exceptions import UnixClientConnectorError

from gpu_worker_pool.errors import ServiceRefusedError
from gpu_worker_pool.host_socket import peer_credentials

if TYPE_CHECKING:
    from aiohttp import ClientRequest, ClientTimeout
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.tracing import Trace

#: How URLs and messages name the server at the other end. No name is looked up.
SOCKET_URL: Final = "http://gpu-pool.sock"


class TrustedUnixConnector(aiohttp.UnixConnector):
    """Raises a `ServiceRefusedError` where the server is not that of root or of the owner of the socket's folder."""

    async def _create_connection(
        self, req: ClientRequest, traces: list[Trace], timeout: ClientTimeout
    ) -> ResponseHandler:
        try:
            owner = _trusted_owner(self.path)
        except OSError as error:
            raise UnixClientConnectorError(self.path, req.connection_key, error) from None
        protocol = await super()._create_connection(req, traces, timeout)
        assert protocol.transport is not None  # it is connected
        uid = peer_credentials(protocol.transport.get_extra_info("socket")).uid
        if uid not in (0, owner):
            protocol.close()
            raise ServiceRefusedError(
                f"the server on {self.path} is refused: it runs as user {uid}, but its folder is that of user {owner}"
            )
        return protocol


def _trusted_owner(path: str) -> int:
    """The user that may replace the socket, besides root."""
    folder = Path(path).parent
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        is_for_all = found.st_mode & stat.S_ISVTX  # one like /tmp must stay so
        advice = "let the server listen in a folder of its own" if is_for_all else f"sudo chmod go-w {folder}"
        raise ServiceRefusedError(
            f"the server on {path} is refused: other users can write to {folder}, and replace the socket; {advice}"
        )
    return found.st_uid
