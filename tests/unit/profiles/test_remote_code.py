"""Models as numbers alone; code of a model only where the profile says so for that model, and never without a word."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.engines.command import build_command
from harness.errors import EnvironmentFault, ProfileError, UsageError
from harness.profiles.availability import references_of
from harness.profiles.load import load_profile
from harness.profiles.model import Profile
from harness.profiles.model_reference import ModelFolder, ModelReference, folder_of
from harness.profiles.remote_code import require_trusted, said, trusted_models
from harness.reports.html import render_html
from harness.reports.judge_run import assess
from harness.reports.markdown import render_markdown
from harness.util.files import model_hash
from tests.support.builders import changed_profile, extending, history, observation, with_run
from tests.support.engines import ENVIRONMENT


def model(folder: Path, weights: str = "model.safetensors", code: bool = False) -> str:
    folder.mkdir()
    config = {"model_type": "llama", **({"auto_map": {"AutoModel": "evil.Model"}} if code else {})}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / weights).write_bytes(b"")
    if code:
        (folder / "evil.py").write_text("class Model: ...")
    return str(folder)


def argv(profile: Profile, method: int = 0) -> list[str]:
    return build_command(profile, profile.methods[method], "single", ENVIRONMENT, 1, None).argv


def test_weights_are_safetensors_and_no_code_runs_unless_told():
    words = argv(load_profile("cpu"), 1)
    assert words[words.index("--load-format") + 1] == "safetensors"
    assert "--trust-remote-code" not in words


@pytest.mark.parametrize("weights", ["pytorch_model.bin", "model.pt", "x.pth", "x.ckpt"])
def test_pickled_weights_are_refused(weights, tmp_path):
    target = model(tmp_path / "m", weights)
    with pytest.raises(ProfileError, match=f"expected weights as .*safetensors.* found only {weights}"):
        load_profile(changed_profile(tmp_path, lambda r: r.update(target=target)))


def test_code_of_a_model_runs_where_the_profile_says_so(tmp_path):
    target = {"path": model(tmp_path / "m", code=True), "trust_remote_code": True}
    profile = load_profile(changed_profile(tmp_path, lambda r: r.update(target=target)))
    assert profile.target_folder == tmp_path / "m" and "--trust-remote-code" in argv(profile)
    assert said(profile.model_dump(mode="json")) == f"remote code: target {tmp_path / 'm'}"


def test_code_of_a_model_does_not_run_where_nothing_is_said(tmp_path):
    target = model(tmp_path / "m", code=True)
    profile = load_profile(changed_profile(tmp_path, lambda r: r.update(target={"path": target})))
    assert "--trust-remote-code" not in argv(profile) and said(profile.model_dump(mode="json")) == ""


def test_code_that_may_run_but_is_not_there_is_named(tmp_path):
    folder = Path(model(tmp_path / "m", code=True))
    (folder / "evil.py").unlink()
    target = {"path": str(folder), "trust_remote_code": True}
    with pytest.raises(ProfileError, match=r"target: expected evil\.py in .*, found none"):
        load_profile(changed_profile(tmp_path, lambda r: r.update(target=target)))


def test_code_of_another_repository_is_never_run(tmp_path):
    """It would be fetched from the hub when the engine starts, at whatever commit it has then."""
    folder = Path(model(tmp_path / "m", code=True))
    config = {"model_type": "llama", "auto_map": {"AutoTokenizer": ["other/code--evil.Slow", None]}}
    (folder / "config.json").write_text(json.dumps(config))
    target = {"path": str(folder), "trust_remote_code": True}
    with pytest.raises(ProfileError, match="to contain its own code, found code of other/code"):
        load_profile(changed_profile(tmp_path, lambda r: r.update(target=target)))


def test_code_is_part_of_a_models_identity(tmp_path):
    folder = Path(model(tmp_path / "m", code=True))
    before = model_hash(folder)
    (folder / "evil.py").write_text("class Model: worse = True")
    assert model_hash(folder) != before


def test_permission_for_one_model_is_none_for_another(tmp_path):
    drafter = model(tmp_path / "d", code=True)

    def change(raw: dict, trusted: bool) -> None:
        raw["methods"][1]["drafter"] = {"path": drafter, "trust_remote_code": trusted}
        raw["target"] = {"path": raw["target"], "trust_remote_code": True}

    with pytest.raises(ProfileError, match=r"drafter of eagle3: expected trust_remote_code: true .* too"):
        load_profile(changed_profile(tmp_path, lambda r: change(r, False)))
    assert "--trust-remote-code" in argv(load_profile(changed_profile(tmp_path, lambda r: change(r, True))), 1)


def snapshot(home: Path, repo: str, commit: str, **made: object) -> dict:
    """A fake of a model in the hub's cache, and the reference that finds it."""
    folder = home / "hub" / f"models--{repo.replace('/', '--')}" / "snapshots" / commit
    folder.parent.mkdir(parents=True)
    model(folder, **made)
    return {"repo": repo, "revision": commit}


def test_permission_for_one_model_of_the_hub_is_none_for_another(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    target = {**snapshot(tmp_path, "org/target", "a" * 40, code=True), "trust_remote_code": True}
    drafter = snapshot(tmp_path, "org/draft", "b" * 40, code=True)
    methods = [{"kind": "none"}, {"kind": "eagle3", "drafter": drafter}]

    def plain(raw: dict) -> None:
        raw.update(target=target, methods=methods)

    with pytest.raises(ProfileError, match=r"drafter of eagle3: expected trust_remote_code: true .* too"):
        load_profile(changed_profile(tmp_path, plain))

    def axes(raw: dict) -> None:
        plain(raw)
        raw["axes"] = {"block": {"a": {"engine": {"block_size": 32}}, "b": {"engine": {"block_size": 64}}}}

    for part in load_profile(changed_profile(tmp_path, axes)).parts:
        assert part.target_folder.name == "a" * 40, "the snapshots are found"
        assert "--trust-remote-code" in argv(part, 0)
        with pytest.raises(EnvironmentFault, match="drafter of eagle3: expected trust_remote_code: true"):
            argv(part, 1)


def test_recorded_permission_for_one_model_is_none_for_another(tmp_path):
    recorded = load_profile("cpu").model_dump(mode="json")
    recorded["target"] = {"path": model(tmp_path / "t", code=True), "trust_remote_code": True}
    recorded["methods"][1]["drafter"] = model(tmp_path / "d", code=True)
    with pytest.raises(EnvironmentFault, match="drafter of eagle3: expected trust_remote_code: true"):
        argv(Profile.model_validate(recorded), 1)


def test_pickled_weights_of_a_recorded_profile_are_refused(tmp_path):
    recorded = load_profile("cpu").model_dump(mode="json")
    profile = Profile.model_validate({**recorded, "target": model(tmp_path / "m", "pytorch_model.bin")})
    with pytest.raises(EnvironmentFault, match=r"expected weights as \*\.safetensors"):
        argv(profile)


def test_permission_for_a_drafter_is_for_its_engines_alone(tmp_path):
    drafter = {"path": model(tmp_path / "d", code=True), "trust_remote_code": True}
    profile = load_profile(changed_profile(tmp_path, lambda r: r["methods"][1].update(drafter=drafter)))
    assert "--trust-remote-code" in argv(profile, 1) and "--trust-remote-code" not in argv(profile, 0)


def test_relative_paths_of_models_stay_in_the_profile_s_folder(tmp_path):
    with pytest.raises(ProfileError, match="leads out of it"):
        load_profile(extending(tmp_path, target={"path": "../m"}))


def test_references_carry_their_permission(tmp_path):
    name = {"repo": "org/name", "revision": "0" * 40, "trust_remote_code": True}
    profile = load_profile(changed_profile(tmp_path, lambda r: r.update(target=name)))
    reference = references_of(profile)["target"]
    assert isinstance(reference, ModelReference) and reference.trust_remote_code
    assert trusted_models(profile.model_dump(mode="json")) == [f"target org/name@{'0' * 40}"]


def test_permissions_of_axes_are_seen():
    raw = {"axes": {"model": {"a": {"target": {"path": "/m", "trust_remote_code": True}}, "b": {"target": "/n"}}}}
    assert trusted_models(raw) == ["target /m"]


def test_recorded_permission_is_none_for_today():
    raw = {"name": "x", "target": {"path": "/m", "trust_remote_code": True}}
    with pytest.raises(UsageError, match="--trust-recorded-code"):
        require_trusted(raw, False)
    require_trusted(raw, True)
    require_trusted({"name": "x", "target": "/m"}, False)


def test_reports_say_whose_code_ran(tmp_path):
    made = history([observation("single-none")], folder=tmp_path)
    profile = {**made.run.profile, "target": {"path": "/models/<b>m", "trust_remote_code": True}}
    summary = assess(with_run(made, profile=profile))
    assert "remote code: target /models/" in render_markdown(summary)
    assert "remote code: target /models/&lt;b&gt;m" in render_html(summary)
    assert "remote code" not in render_markdown(assess(made))


def test_folder_of_whatever_a_profile_gives():
    assert folder_of(ModelFolder(path=Path("/m"))) == folder_of(Path("/m")) == Path("/m")
    assert folder_of(None) is None
    assert folder_of(ModelReference(repo="a/b", revision="main")) is None
