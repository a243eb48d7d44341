"""What the server that forks the program has done before: imports.

Nothing here may read the environment when it is imported, as huggingface_hub does: forks have their own.
"""

from __future__ import annotations

import harness.cli.app
import harness.commands.plan
import harness.commands.run
import harness.pytest_items
import harness.reports.judge_run  # noqa: F401
