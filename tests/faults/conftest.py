"""What the tests of the drills share."""

from __future__ import annotations

import threading
from http.server import ThreadingHTTPServer

import pytest

from faults.proxy import Proxy
from tests.faults.fake_server import FakeServer


@pytest.fixture
def proxy():
    FakeServer.seen.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeServer)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    with Proxy(f"http://127.0.0.1:{server.server_port}") as made:
        yield made
    server.shutdown()
    server.server_close()
