"""The smallest check: every prompt that was sent has a token."""

from __future__ import annotations

from tools.recipes.places import Renewed, Written
from tools.recipes.walk import Recipe

_REGISTRY = "harness/judging/checks/registry.py"
_MODULE = '''"""Check that prompts were sent."""

from __future__ import annotations

from harness.judging.evidence import CellView
from harness.judging.findings import CheckResult, conclude

NAME = "prompts-sent"


def prompts_sent(cell: CellView) -> CheckResult:
    """Check that every prompt that was sent has a token."""
    sent = cell.observations()
    empty = [o.prompt_id for o in sent.values() if not o.sent_ids]
    findings = [cell.untested(NAME, f"expected tokens of {prompt}, found none") for prompt in empty]
    return conclude(NAME, cell.id, len(sent), findings)
'''
_TEST = """

def test_an_empty_prompt_tests_nothing():
    from harness.judging.checks.sent import prompts_sent

    sent = observation("single-none")
    assert prompts_sent(view(history([sent]), "single-none")).verdict is Verdict.PASS
    empty = sent.model_copy(update={"sent_ids": ()})
    assert prompts_sent(view(history([empty]), "single-none")).verdict is Verdict.UNKNOWN
"""

CHECK = Recipe(
    name="check",
    places=(
        Written("harness/judging/checks/sent.py", "the check", (), _MODULE),
        Written(
            _REGISTRY,
            "its entry",
            ("prompts_sent",),
            "    Check(sent.NAME, lambda _: True, sent.prompts_sent),\n",
            before='    Check("echoed-prompt"',
        ),
        Written(_REGISTRY, "the import", ('"sent"',), "    sent,\n", before="    settings,\n    texts,\n"),
        Written(
            "docs/checks.md",
            "its row",
            ("prompts-sent",),
            "| `prompts-sent` | all | has every prompt that was sent a token? | UNKNOWN |\n",
            before="| `echoed-prompt` | all |",
        ),
        Written("tests/unit/judging/test_checks.py", "a test of a broken history", ("prompts-sent",), _TEST),
        Renewed("the golden outputs", "python -m tests.golden.oracle update", "tests/golden/expected"),
    ),
    tests=("tests/unit/judging/test_every_check.py", "tests/unit/judging/test_checks.py", "tests/golden"),
    most_files=5,
    most_renewed=28,
)
