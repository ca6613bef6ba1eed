"""A TCP proxy between a client and a real server that loses, delays or refuses what a test says, in threads."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self

LONGEST_SECONDS = 60.0


class TCPProxy:
    """Use as a context manager. `mode` may be exchanged at any time, and counts from the next bytes on.

    `forward`: as if it were not there. `lose replies`: requests arrive, and instead of an answer the connection ends.
    `hang`: nothing is forwarded either way. `refuse`: connections end at once.
    """

    def __init__(self, port: int) -> None:
        self._to = ("127.0.0.1", port)
        self.mode = "forward"
        #: How many answers were lost.
        self.lost = 0
        #: Only requests that begin so are treated in another way than `forward`.
        self.only = b""

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._open: set[socket.socket] = set()
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for it in [self._listener, *list(self._open)]:
            with contextlib.suppress(OSError):
                it.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(LONGEST_SECONDS)
            assert not thread.is_alive(), "a connection does not end"
        self._listener.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cut(self) -> None:
        """End all connections there are."""
        for it in list(self._open):
            with contextlib.suppress(OSError):
                it.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            if self.mode == "refuse" and not self.only:
                connection.close()
                continue
            thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client, socket.create_connection(self._to, timeout=10) as server:
            server.settimeout(LONGEST_SECONDS)
            self._open |= {client, server}
            #: Whether the last request is one of those.
            is_marked = threading.Event()
            back = threading.Thread(target=self._pass_back, args=(server, client, is_marked), daemon=True)
            back.start()
            try:
                while data := client.recv(65536):
                    (is_marked.set if data.startswith(self.only) else is_marked.clear)()
                    self._wait_while_hanging(is_marked)
                    if self.mode == "refuse" and is_marked.is_set():
                        break
                    server.sendall(data)
            finally:
                for it in (client, server):
                    with contextlib.suppress(OSError):
                        it.shutdown(socket.SHUT_RDWR)
                back.join(LONGEST_SECONDS)
                self._open -= {client, server}

    def _pass_back(self, server: socket.socket, client: socket.socket, is_marked: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                self._wait_while_hanging(is_marked)
                if self.mode == "lose replies" and is_marked.is_set():
                    self.lost += 1
                    break
                client.sendall(data)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)

    def _wait_while_hanging(self, is_marked: threading.Event) -> None:
        while self.mode == "hang" and is_marked.is_set() and not self._stopping.wait(0.02):
            pass
