"""Known defects, put back into real vLLM engines to prove that the harness catches them.

``register`` is the package's entry point in the group ``vllm.general_plugins``: vLLM calls it in every process of an
engine. Without the environment variable ``KV_HARNESS_MUTANTS`` it returns at once and patches nothing. This package is
imported by engines, so it needs nothing but the standard library.
"""

from __future__ import annotations

import os

ARM_VARIABLE = "KV_HARNESS_MUTANTS"
"""Ids, separated by commas, of the mutants whose patches are installed in this engine."""
SWITCH_VARIABLE = "KV_HARNESS_MUTANT_SWITCH"
"""File that names the installed mutants which are switched on now; without it all installed ones are on."""
TOGETHER_VARIABLE = "KV_HARNESS_MUTANTS_TOGETHER"
"""``1`` allows more than one mutant to be on at the same time."""
LOG_MARK = "[kv-harness mutant]"
"""Starts every line that this package writes to the engine's log."""


def register() -> None:
    """Install the mutants that the environment names; called by vLLM in every process of an engine."""
    if not os.environ.get(ARM_VARIABLE):
        return
    from harness.mutants.hooks import arm

    arm(
        os.environ[ARM_VARIABLE], os.environ.get(SWITCH_VARIABLE), together=os.environ.get(TOGETHER_VARIABLE, "") == "1"
    )
