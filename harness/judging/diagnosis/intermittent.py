"""Failures that no rule on the prompt explains: whether they come and go, and how often."""

from __future__ import annotations

from collections.abc import Sequence

from harness.judging.evidence import CellView
from harness.judging.findings import Finding


def comes_and_goes(cell: CellView, findings: Sequence[Finding]) -> str:
    """Return in words how often requests fail, and whether one failed that passed when its prompt was sent again, as
    text instead of as ids or the other way round. The interval of the rate is Clopper and Pearson's."""
    # It takes long to import, and most runs have no such failure.
    from scipy.stats import binomtest

    # That a prompt has another answer as text than as ids is this very difference.
    failed = {(f.part or f.prompt_id, f.form) for f in findings if f.prompt_id and f.check != "text-form"}
    asked = {(o.key, o.form) for o in cell.all_observations() if o.error is None and o.route == "cell"} | failed
    both = sorted(str(key) for key, form in failed if any(k == key and (k, f) not in failed for k, f in asked))
    share = binomtest(len(failed), len(asked)).proportion_ci(0.95, method="exact")
    bounds = f"{100 * share.low:.2g} to {100 * share.high:.2g} % with 95 % confidence"
    rate = f"{len(failed)} of {len(asked)} requests, {bounds}"
    if both:
        return f"intermittent: {both[0]} fails once and passes once with the same tokens; {rate}"
    return f"intermittent if these prompts pass when they are sent again ({rate})"
