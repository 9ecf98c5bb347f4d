"""Errors as OpenAI's API has them."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizer_utils import brief

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """A request that gets this status and message; `param` is the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None,
                 headers: Mapping[str, str] | None = None):
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, headers

    @property
    def value(self) -> dict[str, Any]:
        """The object that the client gets."""
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": brief(self, 2000), "type": kind, "param": self.param, "code": self.code}}
