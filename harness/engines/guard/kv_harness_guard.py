"""ASGI middleware, named on an engine's command line, that refuses requests without the key to any path but /health.

vLLM's own check of ``VLLM_API_KEY`` guards ``/v1``, ``/v2``, ``/inference`` and ``/cohere`` only (0.32.0,
``entrypoints/serve/middleware/authenticate.py``): /metrics, /pause, /resume, /reset_prefix_cache and /server_info stay
open to whoever reaches the port. This module lies in a folder of its own, which is put on the engine's path, and uses
the standard library only. /health reveals nothing, and routers poll it without a key.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

KEY_VARIABLE = "VLLM_API_KEY"
OPEN_PATHS = frozenset({"/health"})
_BODY = b'{"error": "Unauthorized"}'


class KeyGuard:
    """Refuses requests without the key with 401, before any other part of the server sees them."""

    def __init__(self, app: App) -> None:
        """Wrap ``app``. Raises RuntimeError when the engine was given no key, because it must not start unguarded."""
        key = os.environ.get(KEY_VARIABLE, "")
        if not key:
            raise RuntimeError(f"expected a key in {KEY_VARIABLE}, found none: the guard would refuse every request")
        self._app = app
        self._wanted = hashlib.sha256(key.encode()).digest()

    def _has_key(self, scope: Scope) -> bool:
        given = [value for name, value in scope.get("headers") or () if name.lower() == b"authorization"]
        if len(given) != 1:
            return False
        scheme, _, key = given[0].partition(b" ")
        return bool(scheme.lower() == b"bearer" and secrets.compare_digest(hashlib.sha256(key).digest(), self._wanted))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "lifespan" or (kind == "http" and scope["path"] in OPEN_PATHS) or self._has_key(scope):
            await self._app(scope, receive, send)
        elif kind == "http":
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(_BODY)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": _BODY})
        else:
            await send({"type": "websocket.close", "code": 1008})
