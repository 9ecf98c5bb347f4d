"""HTTP/1.1 as uvicorn and h11 read it, without bodies in masses of small parts.

Each part takes 20 us of the event loop: chunks of one byte would keep it busy for minutes, before the key is checked.
"""
from __future__ import annotations

from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

FREE_PARTS, LEAST_PART = 4096, 256  # parts of any size; then so many bytes for each, on average


class Connection(h11.Connection):
    """h11's, which counts the parts of a body."""
    n_parts = n_bytes = 0

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self.n_parts = self.n_bytes = 0
        elif isinstance(event, h11.Data):
            self.n_parts, self.n_bytes = self.n_parts + 1, self.n_bytes + len(event.data)
            if self.n_parts > FREE_PARTS + self.n_bytes / LEAST_PART:
                raise h11.RemoteProtocolError("the body comes in parts that are too small")
        return event


class Protocol(H11Protocol):
    """uvicorn's with such a connection, for uvicorn.Config(http=...)."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.conn = Connection(h11.SERVER)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response("The request is not valid HTTP, or its body comes in too many small parts.")
        else:  # the response has begun, or was sent
            self.transport.close()
