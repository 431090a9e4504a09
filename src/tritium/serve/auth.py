"""Check API keys in constant time, and derive from them who owns a job."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from urllib.parse import urlsplit

from tritium.serve.faults import Fault
from tritium.serve.settings import Settings


def owner(settings: Settings, headers: Mapping[str, str]) -> str:
    """Return a digest of the request's API key, "" if the server has none; raise a `Fault` if the key is wrong."""
    if not settings.api_keys:
        return ""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    sent = key.strip().encode() if scheme.lower() == "bearer" else b""
    # Every key is compared in full: the time does not depend on which one matches, or where they differ.
    matches = [hmac.compare_digest(_digest(sent), _digest(known.encode())) for known in settings.api_keys]
    if not any(matches):
        what = "the API key is wrong" if sent else "there is no API key: send the header `Authorization: Bearer KEY`"
        raise Fault(401, what, "invalid_api_key", retry=False, headers={"www-authenticate": "Bearer"})
    return hashlib.sha256(sent).hexdigest()[:32]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def share(settings: Settings, owned: str, identifier: str | None, address: str) -> str:
    """Return the key between which the queue is fair: the API key if there are several, else the end user's identifier."""
    if len(settings.api_keys) > 1:
        return owned
    return hashlib.sha256(f"{owned}\0{identifier or address}".encode()).hexdigest()[:32]


def check_origin(settings: Settings, headers: Mapping[str, str]) -> None:
    """Raise a `Fault` for requests of foreign web pages, which could otherwise use a server on the user's machine."""
    host = headers.get("host", "")
    if settings.hosts and _name(f"//{host}") not in settings.hosts:
        raise Fault(403, f"this server does not answer for host {host[:100]!r}", "wrong_host", retry=False)
    origin = headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != host:
        raise Fault(403, f"requests of pages from {origin[:100]!r} are not accepted", "wrong_origin", retry=False)


def _name(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""
