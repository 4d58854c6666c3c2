"""Errors in OpenAI's form: what the HTTP edge answers when something goes wrong.

The HTTP twin of the boundary in `core.rpc`, for the same exceptions:

    InvalidRequestError    400, `param` names the field      OverloadedError    429, Retry-After
    UnknownModelError      404                               UnavailableError   503
    UnauthenticatedError   401                               ConfigError        501, not set up so
    HTTPException          its own status                    other ForerunError 500, its message
    anything else          500, a random id                  CancelledError     503, at the end

Knows nothing of requests and streams.
"""

import asyncio
import math
import secrets
from dataclasses import dataclass, field
from typing import Any

import structlog
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from core.errors import (
    ConfigError,
    ForerunError,
    InvalidRequestError,
    OverloadedError,
    UnauthenticatedError,
    UnavailableError,
)

_log = structlog.get_logger(__name__)


class UnknownModelError(InvalidRequestError):
    """A request names a model that is not served here."""

    def __init__(self, model: str, served: str) -> None:
        super().__init__("model", f"there is no model {model!r} here; {served!r} is served")


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as a client sees it: a status, the fields of its body, headers."""

    status: int
    message: str
    kind: str = "server_error"
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        """`{"error": {...}}`."""
        names = {"message": self.message, "type": self.kind}
        return {"error": {**names, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """For a request that has no answer yet."""
        return JSONResponse(self.body, self.status, self.headers)


def problem_of(error: BaseException) -> Problem:
    """What to tell the client. An unforeseen error is logged under the id that the client gets."""
    match error:
        case asyncio.CancelledError():
            return Problem(503, "the orchestrator is shutting down", code="unavailable")
        case UnknownModelError():
            return _refusal(error, 404, "model_not_found")
        case InvalidRequestError():
            return _refusal(error, 400, None)
        case UnauthenticatedError():
            headers = {"WWW-Authenticate": "Bearer"}
            kind, code = "invalid_request_error", "invalid_api_key"
            return Problem(401, str(error), kind, code=code, headers=headers)
        case OverloadedError():
            wait_s = error.retry_after_s
            headers = {
                "Retry-After": str(math.ceil(wait_s)),
                "Retry-After-Ms": str(round(wait_s * 1000)),
            }
            return Problem(429, str(error), "overloaded_error", code="overloaded", headers=headers)
        case UnavailableError():
            return Problem(503, str(error), code="unavailable")
        case ConfigError():
            return Problem(501, str(error))
        case ForerunError():
            return Problem(500, str(error))
        case HTTPException():
            kind = "invalid_request_error" if error.status_code < 500 else "server_error"
            return Problem(error.status_code, error.detail, kind, headers=dict(error.headers or {}))
    error_id = secrets.token_hex(8)
    _log.error("http_request_failed", error_id=error_id, exc_info=error)
    return Problem(500, f"internal error {error_id}; see the log")


def _refusal(error: InvalidRequestError, status: int, code: str | None) -> Problem:
    message = str(error)
    return Problem(status, message, "invalid_request_error", error.field or None, code)
