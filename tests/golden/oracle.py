"""Compares what the harness says about recorded runs, and what it would start, with what it said before.

``python -m tests.golden.oracle update`` writes the expected outputs of the runs that the repository carries, and
``python -m tests.golden.oracle compare OTHER_CHECKOUT RUN...`` compares this checkout with another one on any recorded
runs. A change that only moves or renames code must leave every byte as it is; a change of words updates the expected
outputs in a commit of its own, where the difference can be read.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support import program

ROOT = Path(__file__).resolve().parents[2]
RUNS = Path(__file__).parent / "runs"
BASELINES = Path(__file__).parent / "baselines"
"""Those of the prompts that the recorded runs were sent."""
OF_OTHER_HARDWARE = {"gpu": ["--baselines", str(ROOT / "baselines" / "gpu")], "real-model": []}
"""Runs of GPU engines, with the baselines that they are judged by: those that the profile has, or none."""
COMPARED = (Path(__file__).parent / "attacked", RUNS / "gpu")
"""Runs of the same profile on CPU engines and on a GPU."""
EXPECTED = Path(__file__).parent / "expected"
TEMPORARY = "/tmp"
"""Not ``TMPDIR``: lines are wrapped with the folder's name in them, so that its length counts."""
PROFILES = ("cpu", "gpu", "nightly")
PAGES = frozenset({"M1", "gpu", "merged", "normal-tier"})
"""Runs of which the files for other readers are kept, too: a red one, one of a GPU, one of several machines, one of the
normal tier. They show what ``judgement.json`` says, so more runs would hold the same words again."""

_JUDGED = ("judgement.json", "summary.md", "junit.xml", "report.html")
# Engine commands are not printed by any command of the program, so a few lines of Python ask for them.
_COMMANDS = """
import json, os
home = os.environ["HF_HOME"]
os.environ.clear()
os.environ["HF_HOME"] = home
from harness.engines.command import build_command
from harness.engines.environment import EngineEnvironment
from harness.profiles.load import load_profile
environment = EngineEnvironment(
    executable="python", python="3.11", prefix="/prefix", vllm="0.32.0", vllm_build="cpu", torch="2", transformers="5",
    nixl="1",
)
out = {{}}
for name in {profiles!r}:
    profile = load_profile(name)
    for part in profile.parts:
        for method in part.methods:
            for role in ("single", "prefill", "decode"):
                where = f"{{name}}/{{part.variant}}/{{method.kind}}/{{role}}"
                ranks = part.engine.tensor_parallel.of(role)
                try:
                    command = build_command(
                        part, method, role, environment, 1000, None if role == "single" else 1001,
                        [str(n) for n in range(ranks)],
                    )
                    out[where] = [command.argv, command.env]
                except Exception as error:
                    out[where] = f"{{type(error).__name__}}: {{error}}"
print(json.dumps(out, indent=1, sort_keys=True))
"""
_CHECKED_BY = re.compile(r"(harness [0-9][0-9.]*\w*) at [0-9a-f]{12}( with changes)?")


def outputs(run: Path, checkout: Path = ROOT, home: Path = ROOT) -> dict[str, str]:
    """Judge a copy of a recorded run with the code of ``checkout`` and return every file and text that came out.

    ``home`` is the folder that the recorded run's own paths lie in. Times, folders, free disk space and the hash of the
    known defects are replaced by fixed words.
    """
    with tempfile.TemporaryDirectory(dir=TEMPORARY) as temporary:
        folder = Path(temporary) / run.name
        shutil.copytree(run, folder, symlinks=True, ignore=shutil.ignore_patterns(*_JUDGED))
        baselines = OF_OTHER_HARDWARE.get(run.name, ["--baselines", str(BASELINES)])
        done = _harness(["check", str(folder), *baselines, "--write"], checkout, home)
        out = {"exit": f"{done.code}\n", "terminal": done.output}
        for name in _JUDGED:
            path = folder / name
            out[name] = path.read_text(encoding="utf-8") if path.is_file() else "absent\n"
        replaced = {str(folder): "RUN", temporary: "TMP", str(checkout): "CHECKOUT", str(home): "CHECKOUT"}
        known = hashlib.sha256((checkout / "known-defects.yaml").read_bytes()).hexdigest()
        replaced |= {known: "KNOWN-DEFECTS", known[:12]: "KNOWN-DEFECTS"}
        return {name: _normalised(text, replaced) for name, text in out.items()}


def plans(checkout: Path = ROOT) -> dict[str, str]:
    """Return the plan of every shipped profile as printed, and the command line and variables of every engine."""
    out = {}
    for profile in PROFILES:
        done = _harness(["plan", "--profile", profile], checkout, checkout)
        out[f"plan-{profile}"] = _normalised(done.output, {str(checkout): "CHECKOUT"})
    out["commands"] = _normalised(_commands(checkout), {str(checkout): "CHECKOUT"})
    return out


def comparison(checkout: Path = ROOT) -> dict[str, str]:
    """Return what is printed about two recorded runs that are compared, and the exit code."""
    with tempfile.TemporaryDirectory(dir=TEMPORARY) as temporary:
        done = _harness(["report", "--compare", *map(str, COMPARED), "--out", temporary], checkout, ROOT)
        replaced = {temporary: "TMP", str(checkout): "CHECKOUT", str(ROOT): "CHECKOUT"}
        return {"exit": f"{done.code}\n", "terminal": _normalised(done.output, replaced)}


def _commands(checkout: Path) -> str:
    done = _python(["-c", _COMMANDS.format(profiles=PROFILES)], checkout, checkout)
    return done.stdout or done.stderr


def _harness(arguments: list[str], checkout: Path, cwd: Path) -> program.Ended:
    if checkout == cwd == ROOT:
        return program.harness(*arguments, env={**os.environ, **_fixed(checkout)})
    done = _python(["-m", "harness", *arguments], checkout, cwd)
    return program.Ended(done.returncode, done.stdout, done.stderr)


def _fixed(checkout: Path) -> dict[str, str]:
    """Return variables for a terminal of fixed width and a machine without GPUs and models of the hub."""
    out = {"PYTHONPATH": str(checkout), "COLUMNS": "160", "NO_COLOR": "1", "TERM": "dumb", "HF_HOME": "/no-models"}
    return {**out, "CUDA_VISIBLE_DEVICES": ""}


def _python(arguments: list[str], checkout: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with the harness of ``checkout``, not of the current folder."""
    environment = {**os.environ, **_fixed(checkout)}
    command = [sys.executable, "-P", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=600)


def _normalised(text: str, replaced: Mapping[str, str]) -> str:
    for old in sorted(replaced, key=len, reverse=True):
        text = text.replace(old, replaced[old])
    text = re.sub(r"free: \d+ GiB", "free: N GiB", text)
    text = re.sub(r'"(commit|dirty)": [^,\n]*', r'"\1": "CHECKOUT"', text)
    return _CHECKED_BY.sub(r"\1 CHECKOUT", text)


def kept(run: str, out: Mapping[str, str]) -> dict[str, str]:
    """Return what the repository keeps of a run's outputs: of the report, a megabyte of scripts, the hash."""
    some = {name: text for name, text in out.items() if run in PAGES or name in ("exit", "terminal", "judgement.json")}
    if "report.html" in some:
        some["report.html"] = hashlib.sha256(some["report.html"].encode()).hexdigest() + "\n"
    return some


def recorded() -> list[Path]:
    """The recorded runs of the repository."""
    return sorted(p for p in RUNS.iterdir() if p.is_dir())


def expected(name: str) -> dict[str, str]:
    """The expected outputs of a recorded run, of ``comparison`` or of ``plans``."""
    return {p.name: p.read_text(encoding="utf-8") for p in sorted((EXPECTED / name).iterdir())}


def _update() -> None:
    shutil.rmtree(EXPECTED, ignore_errors=True)
    judged = [(r.name, kept(r.name, outputs(r))) for r in recorded()]
    for name, out in [*judged, ("comparison", comparison()), ("plans", plans())]:
        (EXPECTED / name).mkdir(parents=True)
        for file, text in out.items():
            (EXPECTED / name / file).write_text(text, encoding="utf-8")


def _differences(one: Mapping[str, str], other: Mapping[str, str]) -> Iterator[str]:
    for name in sorted({*one, *other}):
        mine, theirs = one.get(name, "absent"), other.get(name, "absent")
        if mine != theirs:
            lines = zip(re.split(r"(?<=[>\n])", mine), re.split(r"(?<=[>\n])", theirs), strict=False)
            first = next(((a, b) for a, b in lines if a != b), (mine[-200:], theirs[-200:]))
            yield f"{name}: {json.dumps(first[0][:300])} instead of {json.dumps(first[1][:300])}"


def _compare(checkout: Path, runs: list[Path]) -> int:
    failed = 0
    pairs = [("plans", plans(ROOT), plans(checkout)), ("comparison", comparison(ROOT), comparison(checkout))]
    for run in runs:
        home = checkout if str(checkout) in (run / "run.json").read_text(encoding="utf-8") else ROOT
        pairs.append((str(run), outputs(run, ROOT, home), outputs(run, checkout, home)))
    for name, ours, theirs in pairs:
        found = list(_differences(ours, theirs))
        failed += bool(found)
        print(f"{name}: {'the same' if not found else 'DIFFERENT'} ({ours.get('exit', '').strip()})")
        for line in found:
            print(f"  {line}")
    print(f"{len(pairs)} compared, {failed} different")
    return 1 if failed else 0


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["update"]:
            _update()
        case ["compare", checkout, *runs]:
            sys.exit(_compare(Path(checkout).resolve(), [Path(r).resolve() for r in runs]))
        case _:
            sys.exit(f"expected `update` or `compare OTHER_CHECKOUT RUN...`, found {sys.argv[1:]}")
