"""Failures that no response causes: what a verifier asks cannot be reached, or will not serve."""

import http.client
import socket
import ssl
from urllib.error import HTTPError, URLError

from mindrlhf.errors import Unavailable

# Of client libraries, by the first part of the module's name; further classes by inheritance.
_UNREACHED = {
    ("requests", "ConnectionError"), ("requests", "Timeout"), ("httpx", "TransportError"),
    ("aiohttp", "ClientConnectionError"), ("urllib3", "NewConnectionError"), ("urllib3", "MaxRetryError"),
    ("urllib3", "TimeoutError"), ("urllib3", "ProtocolError"), ("openai", "APIConnectionError"),
    ("openai", "InternalServerError"), ("anthropic", "APIConnectionError"), ("anthropic", "InternalServerError"),
}  # fmt: skip
_CLIENTS = {"requests", "httpx", "aiohttp", "urllib", "openai", "anthropic"}
# Who asks is refused, or the server is busy, broken or not there; others (400, 413, 422) may be a response's doing.
_UNSERVED = {401, 403, 404, 407, 408, 409, 425, 429}


def is_unserved(status: int) -> bool:
    """Return True if an HTTP status says that the server, or a proxy before it, answers nobody now."""
    return status in _UNSERVED or status >= 500


def is_unavailable(error: BaseException | None) -> bool:
    """Return True if an exception, or what it was raised from, says that something could not be reached."""
    while error is not None:
        if isinstance(error, (Unavailable, ConnectionError, socket.gaierror, ssl.SSLError, http.client.BadStatusLine)):
            # A pipe breaks where a program that the response wrote has ended.
            return not isinstance(error, BrokenPipeError)
        if isinstance(error, URLError) and not isinstance(error, HTTPError):
            return True
        classes = [(one.__module__.partition(".")[0], one.__name__) for one in type(error).__mro__]
        if not _UNREACHED.isdisjoint(classes):
            return True
        status = _status(error) if any(module in _CLIENTS for module, _ in classes) else None
        if status is not None and is_unserved(status):
            return True
        error = error.__cause__
    return False


def _status(error: BaseException) -> int | None:
    """Return the HTTP status that a client library's error carries."""
    carriers = (error, getattr(error, "response", None))
    found = [getattr(one, name, None) for one in carriers for name in ("code", "status", "status_code")]
    return next((status for status in found if type(status) is int), None)
