"""Check that the engines gave all KV blocks back after the last request of a cell: blocks that are lost after aborts or
hand-offs make an engine admit fewer and fewer requests, until it admits none."""

from __future__ import annotations

from harness.history.engine_interfaces import RESET_PREFIX_CACHE
from harness.history.verdict import Verdict
from harness.judging.evidence import CellView
from harness.judging.findings import CheckResult, Finding, conclude

NAME = "pool-returned"


def applies(cell: CellView) -> bool:
    """Return whether the record says when the pools were empty, as it does since schema 6; once for each cell."""
    can_tell = RESET_PREFIX_CACHE not in cell.history.run.lacking and cell.record.emptied_s != {}
    return cell.first_view and can_tell and cell.record.state == "complete"


def pool_returned(cell: CellView) -> CheckResult:
    """Check that no block of any engine of the cell was in use once the last request was over."""
    emptied = cell.record.emptied_s or {}
    roles = sorted(cell.engine_roles | emptied.keys())
    findings = [_not_emptied(cell, role, role in emptied) for role in roles if emptied.get(role) is None]
    return conclude(NAME, cell.id, len(roles), findings)


def _not_emptied(cell: CellView, role: str, measured: bool) -> Finding:
    if not measured:
        message = (
            f"the record does not say when the KV pool of the {role} engine was empty after the last request; record "
            "the cell again"
        )
        return cell.untested(NAME, message)
    message = (
        f"the {role} engine still has KV blocks in use after all requests and P's leases have ended (it refuses POST "
        "/reset_prefix_cache): blocks of a request that is over were not given back"
    )
    return cell.finding(NAME, Verdict.REGRESSION, "blocks-kept", message)
