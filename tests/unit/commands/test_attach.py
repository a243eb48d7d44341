"""A profile is made of what servers tell that run already. Stand-ins tell what vLLM 0.32.0 does."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.cli.run import ServerOptions
from harness.commands.attach.compose import Wanted
from harness.commands.attach.write import Attachment, attach
from harness.engines.attached import AttachedExecutor, Server, look_at, look_at_router
from harness.errors import HarnessError, UsageError
from harness.profiles.cells import all_cells
from harness.profiles.load import load_profile
from harness.profiles.model import Profile
from harness.workload.prepare import prepare
from tests.support.fake_attached import DRAFTER, TARGET, TOKENIZER, attached_server
from tests.support.program import harness, run

Servers = dict[str, Server]
TELL = "start it with VLLM_SERVER_DEV_MODE=1"


@contextmanager
def running(**roles: dict[str, Any]) -> Iterator[Servers]:
    """Servers by role, each with its changes."""
    with ExitStack() as stack:
        yield {
            role: look_at(role, stack.enter_context(attached_server(role, **changes)), None)
            for role, changes in roles.items()
        }


def wanted(folder: Path, **said: str) -> Wanted:
    return Wanted(**{**dict.fromkeys(Wanted._fields), "out": folder / "mine.yaml", **said})


def made(servers: Servers, folder: Path, **said: str) -> tuple[Attachment, Profile]:
    """What is written, and the profile that it is."""
    found = attach(servers, None, wanted(folder, **said))
    assert list(folder.iterdir()) == [], "a draft was left behind"
    (folder / "mine.yaml").write_text(found.text)
    return found, load_profile(str(folder / "mine.yaml"))


def test_a_pair_as_in_the_profile_needs_no_other_setting(tmp_path: Path):
    with running(prefill={}, decode={}) as servers:
        found, profile = made(servers, tmp_path)
        prepared = prepare(str(tmp_path / "mine.yaml"), [])
        AttachedExecutor(servers).require_fit(prepared.plan, prepared.profile, prepared.works)
    ours = load_profile("cpu")
    assert profile.engine == ours.engine and profile.baselines == ours.baselines and profile.scenarios == ours.scenarios
    assert [c.id for c in all_cells(profile)] == ["pd-eagle3", "single-eagle3"]
    assert found.left_out == {} and found.notes == ()
    assert found.trust == (f"taken on trust: that the weights in {TARGET} are those that the servers loaded",)
    assert ("side channel", "127.0.0.1:5600", "127.0.0.1:5700") in found.rows


def test_all_three_servers_answer_their_cells_and_the_router_its_own(tmp_path: Path):
    with running(prefill={}, decode={}, single={}) as servers, attached_server("decode") as url:
        router = look_at_router(url, None, [servers["prefill"], servers["decode"]])
        found = attach(servers, router, wanted(tmp_path))
    (tmp_path / "mine.yaml").write_text(found.text)
    cells = [c.id for c in all_cells(load_profile(str(tmp_path / "mine.yaml")))]
    assert sorted(cells) == ["pd-eagle3", "pd-eagle3-router", "single-eagle3", "single-none"]
    assert found.options[-2:] == ("--router", url) and found.options[:1] == ("--prefill",)


SETTINGS = {
    "cache_config__block_size": (64, "block_size", 64),
    "model_config__dtype": ("torch.bfloat16", "dtype", "bfloat16"),
    "cache_config__cache_dtype": ("fp8", "kv_cache_dtype", "fp8"),
    "model_config__max_model_len": (1024, "max_model_len", 1024),
    "model_config__enforce_eager": (False, "enforce_eager", False),
    "scheduler_config__max_num_batched_tokens": (256, "max_num_batched_tokens", 256),
    "scheduler_config__max_num_seqs": (8, "max_num_seqs", 8),
    "cache_config__num_gpu_blocks": (100, "kv_blocks", 100),
    "kv_transfer_config__kv_load_failure_policy": ("fail", "kv_load_failure_policy", "fail"),
    "kv_transfer_config__kv_connector_extra_config": ({"kv_lease_duration": 90}, "kv_lease_s", 90),
    "kv_transfer_config__kv_connector": ("NixlPushConnector", "kv_transfer", "push"),
}


@pytest.mark.parametrize("path", SETTINGS)
def test_each_setting_of_the_servers_is_in_the_profile(path, tmp_path: Path):
    said, name, value = SETTINGS[path]
    with running(prefill={path: said}, decode={path: said}) as servers:
        _, profile = made(servers, tmp_path)
    assert getattr(profile.engine, name) == value
    assert profile.baselines == tmp_path / "baselines/cpu-attached"
    assert yaml.safe_load((tmp_path / "mine.yaml").read_text())["engine"] == {name: value}


def test_p_and_d_may_draft_and_be_spread_differently(tmp_path: Path):
    on_p = {"speculative_config__num_speculative_tokens": 1, "parallel_config__tensor_parallel_size": 2}
    roles = [{"kv_transfer_config__kv_role": role} for role in ("kv_producer", "kv_consumer")]
    with running(prefill={**on_p, **roles[0]}, decode=roles[1]) as servers:
        _, profile = made(servers, tmp_path)
    (method,) = [m for m in profile.methods if m.kind == "eagle3"]
    assert (method.on_prefill.draft_tokens, method.draft_tokens) == (1, 3) and str(method.drafter_path) == DRAFTER
    assert profile.engine.tensor_parallel.model_dump() == {"prefill": 2, "decode": 1}
    assert profile.engine.kv_roles == "split"


def test_every_reason_against_a_pair_is_named_at_once(tmp_path: Path):
    on_p = {"cache_config__block_size": 64, "model_config__dtype": "torch.float16", "version": "0.31.0"}
    with (
        running(prefill={**on_p, "kv_transfer_config": None}, decode={"ids": False}) as servers,
        pytest.raises(UsageError) as refused,
    ):
        made(servers, tmp_path)
    p, d = servers["prefill"].url, servers["decode"].url
    assert str(refused.value).splitlines() == [
        "these servers cannot be judged together:",
        f"  expected one vLLM, found 0.31.0 (--prefill {p}), 0.32.0 (--decode {d})",
        f"  dtype: --prefill {p} has float16, --decode {d} float32",
        f"  block_size: --prefill {p} has 64, --decode {d} 32",
        f"  --prefill {p} has no KV connector; start it with --kv-transfer-config",
        f"  --decode {d} does not return token ids (return_token_ids), by which answers are judged",
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prefill": {"speculative_config": None}}, "drafts 0 tokens a step.*both must speculate, or neither"),
        ({"prefill": {"kv_transfer_config__kv_role": "kv_consumer"}}, "is kv_consumer and .* kv_both; start both as"),
        ({"single": {"cache_config__block_size": 16}}, r"block_size: --single \S+ has 16, --decode \S+ 32"),
        (
            {"single": {"speculative_config": {"method": "eagle3", "num_speculative_tokens": 3}}},
            "give the plain engine",
        ),
    ],
)
def test_what_cannot_be_one_run_is_refused(changes, words, tmp_path: Path):
    roles = {"prefill": {}, "decode": {}, **({"single": {}} if "single" in changes else {})}
    with running(**{**roles, **changes}) as servers, pytest.raises(UsageError, match=words):
        made(servers, tmp_path)


def test_what_a_server_does_not_tell_is_taken_on_trust_by_its_name(tmp_path: Path):
    with running(prefill={"dev": False}, decode={}) as servers:
        found, _ = made(servers, tmp_path)
    first = found.trust[0]
    assert first.startswith(
        f"--prefill {servers['prefill'].url}: taken on trust, since the server does not tell them: "
    )
    assert "engine.dtype" in first and "engine.block_size" not in first and "num_speculative_tokens" not in first
    assert first.endswith(TELL)
    assert f"# {first}" in found.text
    assert set(found.left_out) >= {"chunked-prefill", "concurrent", "pressure"} and "prefix-hit" not in found.left_out


def test_a_pair_that_tells_little_needs_a_profile_and_a_method(tmp_path: Path):
    with running(prefill={"dev": False}, decode={"dev": False}) as servers:
        with pytest.raises(UsageError, match="no server tells what it runs on, so name the profile to extend"):
            made(servers, tmp_path)
        with pytest.raises(
            UsageError, match=r"--decode \S+ does not tell its speculation method; .*\(eagle3, dflash or"
        ):
            made(servers, tmp_path, extends="cpu")
        found, profile = made(servers, tmp_path, extends="cpu", method="eagle3")
    assert [c.id for c in all_cells(profile)] == ["pd-eagle3", "single-eagle3"]
    assert len([words for words in found.trust if "taken on trust, since" in words]) == 2


@pytest.mark.parametrize(
    ("changes", "scenarios", "why"),
    [
        (
            {"cache_config__enable_prefix_caching": False},
            {"prefix-hit", "shared-block"},
            "prefix caching, found it off",
        ),
        ({"cache_config__num_gpu_blocks": 512}, {"pressure", "refill"}, "found 512"),
        ({"scheduler_config__max_num_batched_tokens": 2048}, {"chunked-prefill"}, "2048"),
        ({"scheduler_config__max_num_seqs": 2}, {"pressure"}, "max_num_seqs"),
    ],
)
def test_states_that_the_servers_cannot_be_put_into_are_left_out_with_the_reason(changes, scenarios, why, tmp_path):
    with running(prefill=changes, decode=changes) as servers:
        found, profile = made(servers, tmp_path)
    assert scenarios <= set(found.left_out) and all(why in found.left_out[s] for s in scenarios)
    assert not scenarios & {s.id for s in profile.scenarios}
    assert "sampled" in {s.id for s in profile.scenarios}


def test_other_settings_have_no_baseline_and_a_place_for_one(tmp_path: Path):
    changes = {"model_config__dtype": "torch.bfloat16"}
    with running(prefill=changes, decode=changes) as servers:
        found, _ = made(servers, tmp_path)
    assert found.notes == (
        "no baseline of eagle3 with these settings; `harness baseline record -p FILE -c single-eagle3 --single URL` "
        "records one from an engine alone",
    )


def test_acceptance_that_is_not_told_per_request_is_said(tmp_path: Path):
    with running(prefill={}, decode={"per_request": False}) as servers:
        found, _ = made(servers, tmp_path)
    assert "acceptance is compared in total; start the server with --per-request-spec-decode" in found.notes[0]


def test_other_models_get_prompts_of_their_own(tmp_path: Path):
    folder = tmp_path / "models"
    other = shutil.copytree(TARGET, folder / "other")
    (other / "config.json").write_text((other / "config.json").read_text().rstrip()[:-1] + ', "mine": 1}')
    changes = {"model_config__model": str(other), "root": str(other)}
    home = tmp_path / "home"
    home.mkdir()
    with running(prefill=changes, decode=changes) as servers:
        found, profile = made(servers, home)
    assert profile.target_folder == other and str(profile.tokenizer_folder) == TOKENIZER
    assert profile.scenarios == () and profile.judging.tier == "auto" and profile.workload.recipe is not None
    assert profile.workload.prompts == home / "prompts/other.jsonl" and profile.baselines == home / "baselines/other"
    assert [m.kind for m in profile.methods] == ["none", "eagle3"] and profile.known_defects is None
    assert "harness run --prepare" in found.notes[-1]


def test_a_model_of_another_machine_is_named_or_taken_on_trust(tmp_path: Path):
    away = {"model_config__model": "/data/target", "root": "/data/target"}
    with running(prefill=away, decode=away) as servers:
        with pytest.raises(UsageError, match=r"loaded /data/target, which is no folder .*--target.*--extends"):
            made(servers, tmp_path)
        found, profile = made(servers, tmp_path, extends="cpu")
        assert str(profile.target_folder) == TARGET
        assert any("/data/target on the machine of the servers is the model of profile cpu" in t for t in found.trust)
        (tmp_path / "mine.yaml").unlink()
        _, named = made(servers, tmp_path, target=TARGET)
    assert str(named.target_folder) == TARGET


@pytest.mark.parametrize(
    ("extends", "changes", "words"),
    [
        ("nightly", {}, "has axes"),
        ("gpu", {}, "its engines run on gpu, the servers on cpu"),
        ("cpu", {"model_config__max_model_len": 200}, "max_model_len"),
    ],
)
def test_a_profile_that_does_not_fit_is_refused(extends, changes, words, tmp_path: Path):
    with running(prefill=changes, decode=changes) as servers, pytest.raises(HarnessError, match=words):
        made(servers, tmp_path, extends=extends)
    assert list(tmp_path.iterdir()) == []


def test_the_command_prints_what_it_found_and_what_comes_next(tmp_path: Path):
    out = tmp_path / "mine.yaml"
    with attached_server("prefill") as p, attached_server("decode") as d:
        servers = ("--prefill", p, "--decode", d)
        done = harness("attach", *servers, "--out", str(out))
        assert done.code == 0, done.output
        assert done.output.splitlines()[-1].endswith(f"next: harness run -p {out} {' '.join(servers)}")
        again = harness("attach", *servers, "--out", str(out))
        assert again.code == 64 and "exists already" in again.output
        printed = harness("attach", *servers, "--name", "yours")
    assert (
        printed.stdout.startswith("# yours: written by `harness attach`") and "what the servers tell" in printed.stderr
    )
    assert yaml.safe_load(printed.stdout)["extends"] == "cpu"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "name the servers"),
        (["--prefill", "http://x"], "give both"),
        (["--single", "http://x", "--extends", "cpuu"], "did you mean cpu"),
        (["--single", "http://x", "--out", "/nowhere/x.yaml"], "there is no folder /nowhere"),
        (["--single", "http://x", "--router", "http://y"], "--router"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(given, words):
    done = harness("attach", *given)
    assert done.code == 64 and words in done.output and "Traceback" not in done.output


def test_an_empty_address_is_no_leave_to_start_engines():
    """As an unset variable of a script gives it."""
    assert ServerOptions(single="").urls == {"single": ""}
    refused = run("attach", "--single", "")
    assert refused == (64, "harness: --single : expected the address of a server, such as http://10.0.0.7:8000")
