"""Profiles and recorded runs are data: they run no code, open no address and read nothing that nobody named."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from harness.errors import DataError, ProfileError
from harness.history.folder import load_history
from harness.history.verdict import Verdict
from harness.judging.checks.registry import judge
from harness.judging.references import baselines_for, known_of
from harness.profiles.engine_args import SETTINGS, SWITCHES, VALUES, VARIABLES, check_arguments, check_variables
from harness.profiles.load import load_profile
from harness.reports.judge_run import assess
from harness.util.names import SafeName
from harness.util.paths import REPOSITORY, recorded
from tests.support.builders import (
    changed_profile,
    engine,
    extending,
    history,
    identity,
    observation,
    with_run,
    written_run,
)
from tests.support.reseal import reseal
from tests.support.run_files import answers

PACKAGE = REPOSITORY / "harness"
SOURCES = sorted(PACKAGE.rglob("*.py"))


# --- the package itself ----------------------------------------------------------------------------------------------

_NEVER = {
    "eval": "runs text",
    "exec": "runs text",
    "os.system": "a shell",
    "os.popen": "a shell",
    "subprocess.getoutput": "a shell",
    "subprocess.getstatusoutput": "a shell",
    "pickle.load": "runs code of the data",
    "pickle.loads": "runs code of the data",
    "marshal.loads": "runs code of the data",
    "shelve.open": "runs code of the data",
    "yaml.load": "makes objects",
    "yaml.unsafe_load": "makes objects",
    "yaml.full_load": "makes objects",
    "tempfile.mktemp": "a race",
}


def calls(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    return [(ast.unparse(n.func), n) for n in ast.walk(tree) if isinstance(n, ast.Call)]


def faults_in(source: str) -> list[str]:
    """What a source must not do, with the line."""
    out = []
    for name, call in calls(ast.parse(source)):
        keywords = {k.arg: ast.unparse(k.value) for k in call.keywords}
        if name in _NEVER:
            out.append(f"{call.lineno}: {name} ({_NEVER[name]})")
        if keywords.get("shell", "False") != "False":
            out.append(f"{call.lineno}: {name} with a shell")
        if name in ("torch.load", "np.load", "numpy.load"):
            safe = keywords.get("weights_only") == "True" if name == "torch.load" else "allow_pickle" not in keywords
            if not safe:
                out.append(f"{call.lineno}: {name} unpickles")
        if keywords.get("trust_remote_code") == "True":
            out.append(f"{call.lineno}: {name} runs code of a model")
    return out


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_shell_and_nothing_that_runs_data(path):
    assert faults_in(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line",
    [
        "subprocess.run('ls', shell=True)",
        "os.system('ls')",
        "eval(x)",
        "yaml.load(x, Loader=yaml.Loader)",
        "pickle.load(f)",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "AutoTokenizer.from_pretrained(f, trust_remote_code=True)",
    ],
)
def test_what_the_search_looks_for_is_found(line):
    assert faults_in(line)


def test_no_source_binds_every_address():
    """As a word of its own: in the package nothing listens anywhere but where it was told to."""
    everywhere = re.compile(r"""["'](?:0\.0\.0\.0|::|\[::\])["']""")
    assert {str(p): m.group() for p in SOURCES if (m := everywhere.search(p.read_text(encoding="utf-8")))} == {}


# --- what profiles may say -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["--middleware", "os.system"],
        ["--middleware=os.system"],
        ["--middle", "os.system"],
        ["--logits-processors", "evil.Processor"],
        ["--logits_processors", "evil.Processor"],
        ["--worker-cls", "evil.Worker"],
        ["--worker-extension-cls=evil.Worker"],
        ["--host", "0.0.0.0"],
        ["--hos", "0.0.0.0"],
        ["--port=80"],
        ["--trust-remote-code"],
        ["--trust-remote"],
        ["--load-format", "pt"],
        ["--config", "evil.yaml"],
        ["--chat-template", "evil.jinja"],
        ["--tool-parser-plugin", "evil.py"],
        ["--api-key", "mine"],
        ["--ssl-keyfile", "x"],
        ["--root-path", "x"],
        ["--allowed-local-media-path", "/"],
        ["--download-dir", "/"],
        ["--enable-lora"],
        ["--hf-overrides", '{"auto_map": {}}'],
        ["--compilation-config", '{"backend": "evil.backend"}'],
        ["--compilation-config.backend", "evil.backend"],
        ["-O3"],
        ["-tp", "2"],
        ["os.system"],
        ["--scheduling-policy", "/etc/passwd"],
        ["--scheduling-policy=../x"],
        ["--scheduling-policy", '{"a": 1}'],
        ["--stream-interval", "32", "33", "--middleware=x.y"],
        # Positional: the server would take it for the model.
        ["--stream-interval", "32", "evil/model"],
        ["--stream-interval", "32", "evil-model"],
        ["--stream-interval=32", "evil-model"],
        ["--max-logprobs", "-1", "evil-model"],
        ["--cudagraph-capture-sizes", "1", "2", "evil-model"],
        ["--cudagraph-capture-sizes", "1", "-1"],
        ["--async-scheduling", "--stream-interval"],
        ["--stream-interval", "--async-scheduling"],
        ["--enable-dbo", "stray"],
        ["--enable-dbo=stray"],
        ["--scheduling-policy", "--middleware=x.y"],
        ["--stream-interval\n--middleware", "x"],
    ],
)
def test_arguments_that_could_run_code_or_open_addresses_are_refused(arguments, tmp_path):
    with pytest.raises(ValueError):
        check_arguments(arguments)
    profile = changed_profile(tmp_path, lambda r: r["engine"].update(extra_args=arguments))
    with pytest.raises(ProfileError, match="extra_args"):
        load_profile(profile)


def test_reasons_of_excluded_cells_are_shown_without_secrets(tmp_path):
    said = f"fails, see https://me:{'p' * 12}@host/1 with hf_{'a' * 20}"
    changed = changed_profile(tmp_path, lambda r: r.update(exclude=[{"cells": "pd-mtp", "reason": said}]))
    assert load_profile(changed).exclude[0].reason == "fails, see https://<redacted>@host/1 with <redacted>"


def test_arguments_that_only_tune_are_taken():
    check_arguments(["--scheduling-policy", "priority", "--no-enable-prefix-caching", "--max_logprobs=-1"])
    check_arguments(["--cudagraph-capture-sizes", "1", "2", "4", "--async-scheduling", "--max-logprobs", "-1"])
    assert not (SWITCHES & VALUES)
    assert not (SETTINGS.keys() & (SWITCHES | VALUES))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LD_PRELOAD", "evil.so"),
        ("LD_LIBRARY_PATH", "x"),
        ("PYTHONPATH", "x"),
        ("PYTHONSTARTUP", "x"),
        ("PATH", "x"),
        ("VLLM_PLUGINS", "evil"),
        ("VLLM_ALLOW_INSECURE_SERIALIZATION", "1"),
        ("VLLM_API_KEY", "mine"),
        ("VLLM_SERVER_DEV_MODE", "1"),
        ("VLLM_NIXL_SIDE_CHANNEL_HOST", "0.0.0.0"),
        ("VLLM_HOST_IP", "0.0.0.0"),
        ("HF_TOKEN", "mine"),
        ("HF_HUB_OFFLINE", "0"),
        ("NCCL_NET_PLUGIN", "evil"),
        ("NCCL_DEBUG_FILE", "x"),
        ("UCX_MODULE_DIR", "x"),
        ("UCX_LOG_FILE", "x"),
        ("CUDA_INJECTION64_PATH", "x"),
        ("TORCHINDUCTOR_CACHE_DIR", "x"),
        ("UCX_TLS", "tcp,/etc/passwd"),
        ("UCX_TLS", "a\nb"),
    ],
)
def test_variables_that_could_run_code_or_carry_secrets_are_refused(name, value, tmp_path):
    with pytest.raises(ValueError):
        check_variables({name: value})
    with pytest.raises(ProfileError, match=r"engine\.env"):
        load_profile(changed_profile(tmp_path, lambda r: r["engine"].update(env={name: value})))


def test_variables_that_only_tune_are_taken():
    check_variables({"UCX_TLS": "tcp,sm,self", "UCX_NET_DEVICES": "mlx5_0:1", "NCCL_SOCKET_IFNAME": "^docker0"})
    endings = ("_PATH", "_FILE", "_DIR", "_PLUGIN", "_TOKEN", "_KEY", "_HOST", "_PORT")
    assert not any(v.endswith(endings) for v in VARIABLES)


@pytest.mark.parametrize("where", ["../elsewhere", "models/../../elsewhere", "a/../../../etc"])
def test_relative_paths_stay_in_the_profile_s_folder(where, tmp_path):
    for changes in ({"target": where}, {"base": f"{where}.yaml"}):
        with pytest.raises(ProfileError, match="leads out of it"):
            load_profile(extending(tmp_path, **changes))


def test_relative_paths_inside_and_absolute_ones_are_taken(tmp_path):
    profile = load_profile(extending(tmp_path, baselines="sub/../baselines"))
    assert profile.baselines == tmp_path / "baselines"
    assert load_profile(extending(tmp_path, baselines="/var/baselines")).baselines == Path("/var/baselines")


@pytest.mark.parametrize("text", ["!!python/object/apply:os.system ['true']", "!!python/name:os.system", "!x {}"])
def test_yaml_makes_no_objects(text, tmp_path):
    path = tmp_path / "p.yaml"
    path.write_text(f"extends: cpu\nname: p\ndescription: {text}\n")
    with pytest.raises(ProfileError, match="expected YAML"):
        load_profile(str(path))


# --- names -----------------------------------------------------------------------------------------------------------

BAD_NAMES = ["", ".", "..", "../x", "a/b", "a\\b", "/a", "-rf", "a..b", "a\n", "a b", "é", "a\0b", "x" * 121, ".hidden"]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_could_leave_the_folder_are_none(name):
    with pytest.raises(ValidationError):
        TypeAdapter(SafeName).validate_python(name)


def kept(folder: Path) -> Path:
    """A recorded run with one engine."""
    return written_run(folder, history([observation("pd-none")], engines=(engine("pd-none", "decode"),)))


def damage(folder: Path, *steps: str | int, value: object) -> None:
    def change(raw: dict) -> None:
        inner: Any = raw
        for step in steps[:-1]:
            inner = inner[step]
        inner[steps[-1]] = value

    reseal(folder, change)


@pytest.mark.parametrize(
    "where", [("run_id",), ("cells", 0, "cell"), ("cells", 0, "group"), ("engines", 0, "log"), ("engines", 0, "group")]
)
def test_recorded_names_that_lead_elsewhere_are_a_damaged_record(where, tmp_path):
    folder = kept(tmp_path / "run")
    load_history(folder)
    damage(folder, *where, value="../../x")
    with pytest.raises(DataError, match="damaged"):
        load_history(folder)


def test_observations_of_cells_that_lead_elsewhere_are_damaged(tmp_path):
    folder = kept(tmp_path / "run")
    path = answers(folder, "pd-none")
    path.write_text(path.read_text().replace('"pd-none"', '"../x"'))
    reseal(folder)
    with pytest.raises(DataError, match=r"line 1: .*damaged"):
        load_history(folder)


@pytest.mark.parametrize("name", ["../x", "x/y", "x" * 61])
def test_profile_and_axis_names_are_safe(name, tmp_path):
    with pytest.raises(ProfileError, match="name"):
        load_profile(changed_profile(tmp_path, lambda r: r.update(name=name)))
    with pytest.raises(ProfileError):
        load_profile(changed_profile(tmp_path, lambda r: r.update(axes={"a": {name: {"engine": {"block_size": 32}}}})))


# --- recorded paths --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/etc", "../..", "baselines/../../x", "/proc/self/root/etc", "a\0b"])
def test_recorded_paths_elsewhere_are_not_read(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert recorded(path, tmp_path / "none") is None
    assert recorded("baselines", tmp_path / "none") == Path("baselines")
    assert recorded(REPOSITORY / "baselines" / "cpu", tmp_path / "none") is not None


def test_recorded_run_does_not_choose_its_references(tmp_path):
    """A run from elsewhere that names its own baselines and known defects is judged without them, and cannot pass."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "known.yaml").write_text("not: read")
    made = history([observation("single-none")], folder=tmp_path / "run")
    named = {"baselines": str(tmp_path / "theirs"), "known_defects": str(tmp_path / "known.yaml")}
    identities = {"none": identity().model_dump(mode="json")}
    made = with_run(made, profile={**made.run.profile, **named}, identities=identities)
    made = made.model_copy(update={"own": False})
    lookup = baselines_for(made)["none"]
    assert lookup.baseline is None and "--baselines" in lookup.reason
    assert judge(made, baselines_for(made)).verdict is not Verdict.PASS and known_of(made) is None
    assert any("--known" in n for n in assess(made).judgement.notices)
    # Where it was recorded, from a profile that the user named, it reads them.
    assert known_of(made.model_copy(update={"own": True})) == tmp_path / "known.yaml"
    assert "--baselines" not in baselines_for(made.model_copy(update={"own": True}))["none"].reason
