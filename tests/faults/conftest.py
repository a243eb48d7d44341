"""What the tests of the drills share."""

from __future__ import annotations

import pytest

from faults.proxy import Proxy
from tests.faults.fake_server import FakeServer
from tests.support.fake_server import serving


@pytest.fixture
def proxy():
    FakeServer.seen.clear()
    with serving(FakeServer) as url, Proxy(url) as made:
        yield made
