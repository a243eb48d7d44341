"""Real NIXL is asked whether it moves bytes: plugins that lie there say nothing."""

import sys

import pytest

from harness.commands.doctor.transport import transport_items
from harness.engines.environment import inspect_environment
from harness.profiles.load import load_profile
from tests.support.builders import changed_profile

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(("tls", "works"), [("tcp,sm,self", True), ("ib", False)])
def test_nixl_moves_bytes_between_two_processes_or_says_why_not(tmp_path, tls, works):
    profile = load_profile(changed_profile(tmp_path, lambda raw: raw["engine"].update(env={"UCX_TLS": tls})))
    (item,) = transport_items(profile, inspect_environment(sys.executable))
    assert item.what == "NIXL transfer" and item.ok is works and item.needed
    assert item.found.endswith("works") if works else "NIXL_ERR_BACKEND" in item.found
