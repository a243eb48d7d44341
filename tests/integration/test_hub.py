"""Models named on the hub: references, the cache, and every failure in words. The hub is a fake on loopback."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError

from harness.baselines.build import new_baselines
from harness.baselines.published import Band, matching
from harness.errors import EnvironmentFault, ModelUnavailableError, ProfileError
from harness.history.identity import identity_of
from harness.history.verdict import Verdict
from harness.judging.power import lookups_now
from harness.profiles.availability import localise, references_of, unavailable
from harness.profiles.cells import Plan
from harness.profiles.hub import GIB, Hub, damaged_files
from harness.profiles.load import load_profile, read_profile
from harness.profiles.model import Profile
from harness.profiles.model_reference import ModelReference, lacking
from harness.profiles.model_survey import survey
from harness.profiles.recorded_profile import RecordedProfile
from harness.prompts.probe_task import WEIGHTS
from harness.reports.judge_run import judge_and_report
from harness.runner.options import DEFAULTS
from harness.runner.run import new_folder, record_into
from harness.util.files import model_hash, sha256_file, sha256_files
from harness.util.progress import Reporter
from harness.workload.prepare import prepare
from tests.support.builders import changed_profile, with_run
from tests.support.fake_hub import FakeRepository, fake_hub
from tests.support.program import run as cli

A, B = "a" * 40, "b" * 40
TOKEN = "hf_fakefakefakefakefakefake"
TARGET, DRAFTER, GATED = "fake/target", "fake/drafter-eagle3", "fake/gated"
CONFIG = b'{"architectures": ["Fake"]}'
CODED = "fake/coded"
GONE = b'{"architectures": ["Fake"], "auto_map": {"AutoModel": "modeling_gone.Fake"}}'
CODE = {
    "config.json": b'{"architectures": ["Fake"], "auto_map": {"AutoModel": "modeling_fake.Fake"}}',
    "modeling_fake.py": b"class Fake: ...",
}


def files_of(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in folder.iterdir() if f.is_file()}


def repositories() -> dict[str, FakeRepository]:
    target = files_of(WEIGHTS / "target") | files_of(WEIGHTS / "tokenizer")
    extra = {"README.md": b"words", "original/consolidated.safetensors": b"x" * 5000, "weights.bin": b"y" * 700}
    small = {"config.json": CONFIG, "model.safetensors": b"weights", "tokenizer_config.json": b"{}"}
    return {
        TARGET: FakeRepository({A: target | extra, B: target}, {"main": A, "v1": A}),
        DRAFTER: FakeRepository({A: files_of(WEIGHTS / "eagle3")}, {"main": A}),
        CODED: FakeRepository({A: small | CODE, B: small | {"config.json": GONE}}, {"main": A}),
        GATED: FakeRepository({A: small}, {"main": A}, gated=True, granted={TOKEN}),
    }


@pytest.fixture
def served(monkeypatch, tmp_path):
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    with fake_hub(repositories()) as server:
        yield server


@pytest.fixture
def hub(served, tmp_path) -> Hub:
    return Hub(served.url, tmp_path / "hub")


def reference(repo: str = TARGET, revision: str = "main", commit: str | None = None) -> ModelReference:
    return ModelReference(repo=repo, revision=revision, commit=commit)


# --- references -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ({"repo": TARGET}, "revision"),
        ({"revision": "main"}, "repo"),
        ({"repo": "target", "revision": "main"}, "ORGANISATION/NAME"),
        ({"repo": "../../etc", "revision": "main"}, "ORGANISATION/NAME"),
        ({"repo": TARGET, "revision": "../main"}, "tag or a branch"),
        ({"repo": TARGET, "revision": ""}, "tag or a branch"),
        ({"repo": TARGET, "revision": "0e9e39f"}, "all 40 lower-case hex digits of the commit, found 7"),
        ({"repo": TARGET, "revision": "A" * 40}, "all 40 lower-case"),
        ({"repo": TARGET, "revision": "main", "commit": "b" * 39}, "40 lower-case hex digits"),
        ({"repo": TARGET, "revision": A, "commit": B}, "the commit that revision names"),
        ({"repo": TARGET, "revision": "main", "sha": A}, "sha"),
    ],
)
def test_bad_references_are_refused(raw, sentence):
    with pytest.raises(ValidationError, match=sentence):
        ModelReference.model_validate(raw)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda r: r.update(target={"repo": TARGET}), "target.hub.revision: expected this key, found none"),
        (lambda r: r.update(target={"repo": TARGET, "revision": "abcdef12"}), "target.hub.revision: .*40 lower-case"),
        (lambda r: r["methods"][1].update(drafter={"repo": "x", "revision": "main"}), "drafter.hub.repo"),
        (lambda r: r.update(target=3), "target.path"),
        (lambda r: r.update(sources={"target": {"repo": TARGET, "revision": "main", "commit": A}}), "sources: unknown"),
    ],
)
def test_bad_references_in_profiles_say_where(tmp_path, change, sentence):
    with pytest.raises(ProfileError, match=sentence):
        load_profile(changed_profile(tmp_path, change))


def test_only_a_commit_pins():
    assert reference(revision=A).pinned == A
    assert reference(commit=A).pinned == A
    assert reference().pinned is None


# --- the cache and the hub ------------------------------------------------------------------------------------------


def test_download_takes_what_vllm_needs_and_is_found_again_without_the_hub(hub, served):
    assert hub.cached(reference(), "target") is None
    remote = hub.look(reference(), "target")
    wanted = files_of(WEIGHTS / "target") | files_of(WEIGHTS / "tokenizer")
    assert (remote.commit, remote.gated) == (A, False)
    assert remote.size == remote.missing == sum(map(len, wanted.values()))
    snapshot = hub.download(reference(), "target")
    assert snapshot.name == A
    assert {f.name for f in snapshot.rglob("*") if f.is_file()} == set(wanted)
    assert hub.look(reference(), "target").missing == 0
    served.requests.clear()
    for name in ("main", A):
        assert hub.cached(reference(revision=name), "target") == snapshot
    assert served.requests == []
    assert not any("original" in r or "weights.bin" in r for r in served.requests)


def test_only_the_tokenizer_is_fetched_for_a_tokenizer(hub):
    snapshot = hub.download(reference(), "tokenizer")
    assert not list(snapshot.glob("*.safetensors"))
    assert hub.cached(reference(), "tokenizer") == snapshot
    assert hub.cached(reference(), "target") is None


def test_code_is_fetched_only_of_a_model_whose_code_may_run(hub):
    plain = reference(CODED)
    trusted = plain.model_copy(update={"trust_remote_code": True})
    assert not list(hub.download(plain, "target").glob("*.py"))
    # What was fetched without its code is not complete for an engine that is to run it.
    assert hub.cached(plain, "target") is not None and hub.cached(trusted, "target") is None
    assert [f.name for f in hub.download(trusted, "target").glob("*.py")] == ["modeling_fake.py"]
    assert hub.cached(trusted, "target") is not None


def test_trusted_code_that_its_repository_lacks_is_said_once_and_for_all(hub):
    with pytest.raises(ProfileError, match=r"expected modeling_gone\.py beside the config .* found none in its repos"):
        hub.download(reference(CODED, B).model_copy(update={"trust_remote_code": True}), "target")


def test_snapshot_with_a_lost_file_is_none(hub):
    snapshot = hub.download(reference(), "target")
    (snapshot / "model.safetensors").resolve().unlink()
    assert hub.cached(reference(), "target") is None
    assert hub.download(reference(), "target") == snapshot


def test_moved_branch_is_refused_with_both_commits_with_and_without_the_hub(hub, served):
    pinned = reference(commit=A)
    assert hub.download(pinned, "target").name == A
    served.repositories[TARGET].names["main"] = B
    for action in (hub.look, hub.download):
        with pytest.raises(ProfileError, match=f"'main' is now {B}, not {A}"):
            action(pinned, "target")
    # The cache does not know yet, and still has what was asked for.
    assert hub.cached(pinned, "target").name == A and hub.download(reference(), "target").name == B
    with pytest.raises(ProfileError, match=f"now {B}, not {A}"):
        hub.cached(pinned, "target")
    assert hub.cached(reference(revision=A), "target").name == A


@pytest.mark.parametrize(
    ("asked", "kind", "sentence"),
    [
        (
            reference("fake/nothing"),
            ProfileError,
            "expected a repository at .*/fake/nothing, found none without a token",
        ),
        (reference(revision="v9"), ProfileError, "expected a commit, tag or branch 'v9'"),
        (reference(revision=B.replace("b", "c")), ProfileError, "expected a commit, tag or branch 'c+'"),
    ],
)
def test_names_that_do_not_exist(hub, asked, kind, sentence):
    with pytest.raises(kind, match=sentence) as caught:
        hub.download(asked, "target")
    assert caught.value.exit_code == 64


def test_gated_model_without_token_with_another_and_with_the_right_one(hub, served, monkeypatch):
    page = f"ask for access at {served.url}/{GATED} and set HF_TOKEN"
    assert hub.look(reference(GATED), "target").gated
    with pytest.raises(EnvironmentFault, match="found no token") as caught:
        hub.download(reference(GATED), "target")
    assert page in str(caught.value) and caught.value.exit_code == 2
    monkeypatch.setenv("HF_TOKEN", "hf_anotherfaketoken")
    with pytest.raises(EnvironmentFault, match="found a token that was not granted access") as caught:
        hub.download(reference(GATED), "target")
    assert "hf_another" not in str(caught.value)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert hub.has_token and hub.download(reference(GATED), "target").name == A
    assert TOKEN in served.tokens


def test_hub_that_cannot_be_reached(tmp_path):
    nowhere = Hub("http://127.0.0.1:1", tmp_path / "hub")
    with pytest.raises(EnvironmentFault, match=r"not in the cache .* expected an answer from http://127.0.0.1:1"):
        nowhere.look(reference(), "target")


def test_hub_that_answers_nonsense(hub, served):
    served.broken = True
    with pytest.raises(EnvironmentFault, match="status 500"):
        hub.look(reference(), "target")


def test_offline_mode_is_named(hub, monkeypatch):
    from huggingface_hub import errors

    def refuse(*_: object, **__: object) -> None:
        raise errors.OfflineModeIsEnabled("offline")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refuse)
    with pytest.raises(EnvironmentFault, match="HF_HUB_OFFLINE is set"):
        hub.look(reference(), "target")


def test_token_in_a_library_message_is_not_repeated(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)

    def tell(*_: object, **__: object) -> None:
        raise RuntimeError(f"cannot send Bearer {TOKEN}")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", tell)
    with pytest.raises(EnvironmentFault, match="Bearer <redacted>") as caught:
        hub.look(reference(), "target")
    assert TOKEN not in str(caught.value)


def test_small_disk_is_refused_before_the_download(hub, served, monkeypatch):
    monkeypatch.setattr(Hub, "free", lambda _: 1000)
    with pytest.raises(EnvironmentFault, match=r"expected 0\.0 GiB of free disk .* found 0\.0 GiB"):
        hub.download(reference(), "target")
    assert not any("resolve" in r for r in served.requests)
    monkeypatch.undo()
    assert hub.free() > GIB


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: [p.unlink() for p in f.glob("*.safetensors")], "no *.safetensors"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{"), "a damaged model.safetensors.index.json"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one", "b": "two"}}'),
            "2 of 2 weight files missing",
        ),
    ],
)
def test_what_a_folder_lacks(tmp_path, damage, words):
    folder = tmp_path / "model"
    shutil.copytree(WEIGHTS / "target", folder)
    assert lacking(folder, "target") is None
    damage(folder)
    assert lacking(folder, "target") == words


# --- hashes ---------------------------------------------------------------------------------------------------------


def test_snapshot_of_links_hashes_like_plain_copies(hub, tmp_path, monkeypatch):
    snapshot = hub.download(reference(), "target")
    weights = snapshot / "model.safetensors"
    assert weights.is_symlink() and weights.resolve().name == sha256_file(weights)
    plain = tmp_path / "plain"
    shutil.copytree(snapshot, plain, symlinks=False)
    assert not any(f.is_symlink() for f in plain.iterdir())
    assert model_hash(snapshot) == model_hash(plain) == model_hash(WEIGHTS / "target")
    read: list[str] = []
    monkeypatch.setattr("harness.util.files.sha256_file", lambda p: read.append(p.name) or sha256_file(p))
    model_hash(snapshot)
    assert read == ["config.json"]


def test_links_that_are_no_blobs_are_read(tmp_path):
    """Only the cache's own naming is trusted: other links, and names that are no SHA-256, are read."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "elsewhere").mkdir()
    for place, name in (("elsewhere", "f" * 64), ("blobs", "f" * 40)):
        (tmp_path / place / name).write_bytes(b"weights")
        link = tmp_path / f"{place}.safetensors"
        link.symlink_to(tmp_path / place / name)
        (tmp_path / "copy").mkdir(exist_ok=True)
        (tmp_path / "copy" / link.name).write_bytes(b"weights")
        assert sha256_files(tmp_path, [link.name]) == sha256_files(tmp_path / "copy", [link.name])


def test_verify_finds_a_damaged_blob(hub):
    folder = hub.download(reference(), "target")
    assert damaged_files(folder) == []
    weights = (folder / "model.safetensors").resolve()
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    assert damaged_files(folder) == ["model.safetensors"]


# --- profiles -------------------------------------------------------------------------------------------------------


def hub_profile(tmp_path: Path, **changes: object) -> str:
    def change(raw: dict) -> None:
        raw["target"] = {"repo": TARGET, "revision": "main"}
        del raw["tokenizer"]
        raw["methods"][1]["drafter"] = {"repo": DRAFTER, "revision": "main", "commit": A}
        raw.update(changes)

    return changed_profile(tmp_path, change)


def fetched(path: str, hub: Hub) -> Profile:
    profile = read_profile(path)
    assert all(m.error is None for m in survey(profile, hub, download=True))
    return localise(profile, path, hub)


def test_localised_profile_has_folders_and_says_where_they_came_from(hub, tmp_path):
    profile = fetched(hub_profile(tmp_path), hub)
    assert references_of(profile) == {}
    assert profile.target_folder == profile.tokenizer_folder == hub.snapshot_folder(TARGET, A)
    assert profile.methods[1].drafter_path == hub.snapshot_folder(DRAFTER, A)
    assert {r: (s.repo, s.revision, s.commit) for r, s in profile.sources.items()} == {
        "target": (TARGET, "main", A),
        "eagle3": (DRAFTER, "main", A),
    }
    # What a run records can be loaded again, and is the same model as the folders of the repository.
    assert Profile.model_validate(profile.model_dump(mode="json")) == profile
    cpu = load_profile("cpu")
    ours, theirs = (identity_of(p, p.methods[1], "p") for p in (profile, cpu))
    assert (ours.target_sha256, ours.drafter_sha256) == (theirs.target_sha256, theirs.drafter_sha256)
    assert localise(cpu, "cpu", hub) is cpu


def test_one_missing_model_costs_its_own_method_only(hub, tmp_path):
    profile = read_profile(hub_profile(tmp_path))
    hub.download(reference(), "target")
    local = localise(profile, "nightly", hub)
    assert set(unavailable(local)) == {"eagle3"} and local.target_folder.is_dir()
    assert [m.kind for m in local.methods if m.kind != "eagle3" and m.drafter_path] == ["dflash", "mtp"]
    with pytest.raises(
        ModelUnavailableError, match=r"drafter of eagle3: .*harness models --profile nightly --download"
    ) as caught:
        _ = local.methods[1].drafter_path
    assert caught.value.exit_code == 2
    # A recorded profile keeps the reference, and not the reason of that day.
    dumped = local.model_dump(mode="json")
    assert dumped["methods"][1]["drafter"] == {
        **{"repo": DRAFTER, "revision": "main", "commit": A},
        "trust_remote_code": False,
    }
    again = Profile.model_validate(dumped)
    with pytest.raises(ModelUnavailableError, match="was not looked up"):
        _ = again.methods[1].drafter_path


def test_target_without_a_tokenizer_is_named(hub, served, tmp_path):
    served.repositories[TARGET].commits[A].pop("tokenizer_config.json")
    hub.download(reference(), "target")
    local = localise(read_profile(hub_profile(tmp_path)), "nightly", hub)
    assert "found no tokenizer_config.json" in unavailable(local)["target"]


def test_survey_tells_all_failures_at_once(hub, served, tmp_path):
    def change(raw: dict) -> None:
        raw["target"] = {"repo": GATED, "revision": "main"}
        raw["methods"][1]["drafter"] = {"repo": DRAFTER, "revision": "main", "commit": B}
        raw["methods"][2]["drafter"] = {"repo": "fake/nothing", "revision": "main"}
        raw["methods"][3]["drafter"] = {"repo": TARGET, "revision": "v1"}

    found = {m.role: m for m in survey(read_profile(changed_profile(tmp_path, change)), hub, download=True)}
    assert list(found) == ["target", "eagle3", "dflash", "mtp"]
    assert "found no token" in str(found["target"].error) and found["target"].gated is True
    assert "is now" in str(found["eagle3"].error)
    assert "found none without a token" in str(found["dflash"].error)
    assert found["mtp"].error is None and found["mtp"].cached and found["mtp"].commit == A


def test_cached_models_need_no_hub(hub, served, tmp_path):
    path = hub_profile(tmp_path)
    fetched(path, hub)
    served.broken = True
    assert [(m.cached, m.error) for m in survey(read_profile(path), hub)] == [(True, None)] * 2


def test_published_figures_are_found_by_the_names_on_the_hub():
    band = Band(
        target=TARGET, drafter=DRAFTER, method="eagle3", k=3, rates=(0.5, 0.4, 0.3), tolerance=0.1, origin="test"
    )
    raw = {
        "target": f"/cache/snapshots/{A}",
        "methods": [{"kind": "eagle3", "drafter": f"/cache/snapshots/{A}", "num_speculative_tokens": 3}],
        "sources": {
            "target": {"repo": TARGET, "revision": "main", "commit": A},
            "eagle3": {"repo": DRAFTER, "revision": "main", "commit": A},
        },
    }
    assert matching([band], RecordedProfile(raw), "eagle3") == [band]
    assert matching([band], RecordedProfile(raw | {"sources": {}}), "eagle3") == []


# --- command line ---------------------------------------------------------------------------------------------------


def run(served, tmp_path: Path, *arguments: str, **variables: str) -> tuple[int, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    env |= {"HF_ENDPOINT": served.url, "HF_HOME": str(tmp_path / "home"), **variables}
    return cli(*arguments, env=env)


def test_models_command_shows_fetches_and_verifies(served, tmp_path):
    path = hub_profile(tmp_path)
    code, output = run(served, tmp_path, "models", "-p", path)
    assert code == 0 and f"{A[:20]}" in output and " no " in output
    assert not (tmp_path / "home" / "hub" / "models--fake--target" / "snapshots").exists()
    code, output = run(served, tmp_path, "plan", "-p", path)
    assert code == 2
    assert (
        f"target: expected {TARGET}@main in the cache" in output
        and f"harness models --profile {path} --download" in output
    )
    code, output = run(served, tmp_path, "models", "-p", path, "--download", "--verify", HF_TOKEN=TOKEN)
    assert code == 0 and "token: found" in output and TOKEN not in output
    code, output = run(served, tmp_path, "plan", "-p", path)
    assert code == 0 and "pd-eagle3" in output
    weights = tmp_path / "home" / "hub" / "models--fake--target" / "snapshots" / A / "model.safetensors"
    weights.resolve().write_bytes(b"damaged")
    code, output = run(served, tmp_path, "models", "-p", path, "--verify")
    assert code == 2 and "does not match its checksum" in output


@pytest.mark.parametrize(
    ("target", "code", "sentence"),
    [
        ({"repo": GATED, "revision": "main"}, 2, "found no token; ask for access at"),
        ({"repo": TARGET, "revision": "main", "commit": B}, 64, f"'main' is now {A}, not {B}"),
        ({"repo": TARGET}, 64, "expected this key, found none"),
    ],
)
def test_models_command_says_what_is_wrong(served, tmp_path, target, code, sentence):
    found, output = run(served, tmp_path, "models", "-p", hub_profile(tmp_path, target=target), "--download")
    assert (found, sentence in output) == (code, True), output


def test_models_command_without_a_hub(tmp_path, served):
    code, output = run(served, tmp_path, "models", "-p", hub_profile(tmp_path), HF_ENDPOINT="http://127.0.0.1:1")
    assert code == 2 and "expected an answer from http://127.0.0.1:1" in output
    assert run(served, tmp_path, "models", "-p", "cpu")[0] == 0


def look_up_now(path: str) -> dict:
    return lookups_now(prepare(path, []), None)


def test_missing_drafter_makes_its_own_cells_unknown(tmp_path, monkeypatch):
    """Plan and identities are made without the model that is not here; its cells say why they are UNKNOWN."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))

    def change(raw: dict) -> None:
        raw["methods"][1]["drafter"] = {"repo": DRAFTER, "revision": "main"}

    path = changed_profile(tmp_path, change)
    prepared = prepare(path, ["single-none", "single-eagle3"])
    assert [c.id for c in prepared.plan.cells] == ["single-none"]
    assert list(prepared.lacking) == ["single-eagle3"]
    assert look_up_now(path)["eagle3"].reason.startswith(f"expected {DRAFTER}@main in the cache")
    with Reporter(1.0) as reporter:
        nothing_started = prepared._replace(plan=Plan((), ()))
        history = record_into(new_folder(tmp_path / "runs", prepared.profile), nothing_started, reporter, DEFAULTS)
    assert set(history.run.identities) == {"none", "dflash", "mtp"}
    cell = history.cell("single-eagle3")
    assert cell.state == "failed" and "harness models" in cell.reason and "--download" in cell.reason
    summary = judge_and_report(history)
    assert (summary.verdict, summary.verdict.exit_code) == (Verdict.UNKNOWN, 2)
    # The command may be cut: the folder of the cache, which is named before it, has a long name here.
    assert f"expected {DRAFTER}" in (history.folder / "summary.md").read_text()
    made = new_baselines(with_run(history, cells=(cell,)), None, prepared.sets, tmp_path / "baselines")
    assert made.recorded == () and made.left_out["single-eagle3"].startswith("expected fake")
