"""P that is set up unlike D, and P that writes."""

from __future__ import annotations

import json

import pytest

from harness.engines.command import build_command
from harness.engines.counters import credited
from harness.errors import ProfileError
from harness.history.identity import identity_of
from harness.profiles.cells import make_plan, select_cells
from harness.profiles.load import load_profile
from tests.support.builders import changed_profile
from tests.support.engines import ENVIRONMENT


def settings(profile, role: str, option: str, kind: str = "eagle3"):
    plan = make_plan(profile, select_cells(profile, [f"pd-{kind}"]))
    argv = build_command(profile, plan.groups[0].method_of(role), role, ENVIRONMENT, 1000, 1001).argv
    return json.loads(argv[argv.index(option) + 1])


@pytest.mark.parametrize(
    ("name", "drafts", "roles"),
    [("cpu", (3, 3), ("kv_both", "kv_both")), ("cpu-unlike", (1, 3), ("kv_producer", "kv_consumer"))],
)
def test_engines_are_started_as_the_profile_says(name, drafts, roles):
    profile = load_profile(name)
    for role, drafted, kv_role in zip(("prefill", "decode"), drafts, roles, strict=True):
        assert settings(profile, role, "--speculative-config")["num_speculative_tokens"] == drafted
        assert settings(profile, role, "--kv-transfer-config")["kv_role"] == kv_role


def test_baselines_are_those_of_equal_engines():
    """What D answers does not depend on how P drafts."""
    like, unlike = load_profile("cpu"), load_profile("cpu-unlike")
    for ours, theirs in zip(like.methods, unlike.methods, strict=True):
        assert identity_of(like, ours, "0") == identity_of(unlike, theirs, "0")
        assert (ours.draft_tokens, ours.lookahead) == (theirs.draft_tokens, theirs.lookahead)


def test_what_vllm_would_ignore_is_refused(tmp_path):
    profile = changed_profile(tmp_path, lambda raw: raw["engine"].update(extra_args=["--async-scheduling"]))
    with pytest.raises(ProfileError, match="--async-scheduling has no effect with device cpu"):
        load_profile(profile)


def test_a_p_that_writes_has_the_same_baselines_and_scenarios_but_three():
    pull, push = load_profile("cpu"), load_profile("cpu-push")
    for role in ("prefill", "decode"):
        assert settings(pull, role, "--kv-transfer-config")["kv_connector"] == "NixlConnector"
        assert settings(push, role, "--kv-transfer-config")["kv_connector"] == "NixlPushConnector"
    for ours, theirs in zip(pull.methods, push.methods, strict=True):
        assert identity_of(pull, ours, "0") == identity_of(push, theirs, "0")
    # There D waits for what P writes, whatever its parameters say; and no single engine says what is right.
    apart = [s.id for s in pull.scenarios if s not in push.scenarios]
    assert apart == ["recovery", "hand-off-mistakes", "parameters"]


def test_what_p_wrote_is_counted_for_the_hand_off():
    written = {"nixl_bytes": 64.0, "nixl_transfers": 1.0, "nixl_expired": 2.0, "finished_requests": 1.0}
    p, d = credited(written, {"finished_requests": 1.0})
    assert p == {"nixl_expired": 2.0, "finished_requests": 1.0}
    assert d == {"nixl_bytes": 64.0, "nixl_transfers": 1.0, "finished_requests": 1.0}


def test_a_router_hides_what_a_p_that_writes_counts(tmp_path):
    profile = changed_profile(tmp_path, lambda raw: raw["engine"].update(kv_transfer="push"))
    with pytest.raises(ProfileError, match=r"expected client alone with engine\.kv_transfer push"):
        load_profile(profile)
