"""Mutants: known defects that are put back into real vLLM engines to prove that the harness catches them.

The folder ``plugin`` declares ``register`` in the group ``vllm.general_plugins``. Engines that get mutants have it on
their Python path, and vLLM calls ``register`` in each of their processes; other engines know nothing of it. Without the
environment variable ``KV_HARNESS_MUTANTS`` it returns at once and patches nothing. Engines import this package, so it
uses the standard library only.

In the harness:

* ``families``: the mutants, each with its patches and the trial that must catch it;
* ``catalogue``: ``MUTANTS`` and ``TRIALS``, all of them by id; plain data;
* ``install``: ``EnabledMutants`` and ``with_mutants``, which put mutants into a group of engines and switch them;
* ``exchange``: the mutants that change how requests are sent, not the engines; used by ``install``.

In an engine's process:

* ``hooks``: install patches when the engine imports their targets, and switch them;
* ``targets``: what several mutants patch of vLLM.
"""

from __future__ import annotations

import os

MUTANTS_VARIABLE = "KV_HARNESS_MUTANTS"
"""Comma-separated ids of the mutants whose patches are installed in this engine."""
SWITCH_VARIABLE = "KV_HARNESS_MUTANT_SWITCH"
"""File that names the installed mutants that are switched on now; without it all installed ones are on."""
TOGETHER_VARIABLE = "KV_HARNESS_MUTANTS_TOGETHER"
"""Set to ``1`` to allow more than one mutant to be on at the same time."""
LOG_MARK = "[kv-harness mutant]"
"""Prefix of every line that this package writes to the engine's log."""


def register() -> None:
    """Install the mutants that the environment names. vLLM calls this in every process of an engine."""
    if not os.environ.get(MUTANTS_VARIABLE):
        return
    from harness.mutants import catalogue  # noqa: F401  (declares the patches that hooks installs)
    from harness.mutants.hooks import install_all

    install_all(
        os.environ[MUTANTS_VARIABLE],
        os.environ.get(SWITCH_VARIABLE),
        together=os.environ.get(TOGETHER_VARIABLE, "") == "1",
    )
