"""Turn refusals and failures into errors of OpenAI's shape, with what its client needs to decide about a retry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tritium.serve.engine import Cancelled, Failed, Refused

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


@dataclass(eq=False)
class Fault(Exception):
    """An error response: `{"error": {message, type, param, code}}`.

    OpenAI's client repeats a request twice on 408, 409, 429 and from 500 on, unless `x-should-retry` says otherwise: a fault
    with `retry` of False sends it, so that a request that must fail again is not computed three times.
    """

    status: int
    message: str
    code: str
    param: str | None = None
    retry: bool | None = None
    retry_after: float | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def all_headers(self) -> dict[str, str]:
        headers = dict(self.headers)
        if self.retry is not None:
            headers["x-should-retry"] = "true" if self.retry else "false"
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, round(self.retry_after + 0.499)))
            headers["retry-after-ms"] = str(max(1, round(self.retry_after * 1000)))
        return headers


def invalid(message: str, param: str | None, code: str = "invalid_value") -> Fault:
    """Return the error of a request that can never work."""
    return Fault(400, message, code, param, retry=False)


def of_refusal(refused: Refused) -> Fault:
    """Return the error of a job that was not taken."""
    message = str(refused)
    if refused.code in ("draining", "not_ready"):
        return Fault(503, message, refused.code, retry=True, retry_after=refused.retry_after)
    param = "n" if refused.code == "queue_full" else "timeout"
    if refused.retry_after is None:
        return invalid(message, param, refused.code)
    return Fault(429, message, refused.code, retry=True, retry_after=refused.retry_after)


def of_failure(event: Failed | Cancelled) -> Fault:
    """Return the error of a job that ended without a result."""
    if isinstance(event, Failed):
        if event.code == "invalid_job":
            return invalid(event.message, None, event.code)
        return Fault(503 if event.code == "worker_died" else 500, event.message, event.code, retry=event.retry)
    if event.why == "shutdown":
        return Fault(503, "the server shut down before the job was done", "shutdown", retry=True)
    if event.why == "deadline":
        return Fault(504, "the job was stopped at its deadline: allow more time", "deadline", "timeout", retry=False)
    return Fault(409, f"the job was cancelled ({event.why})", "cancelled", retry=False)
