"""Builds the wheel: what pyproject.toml says, and the shipped data, which lies beside the package in a checkout."""

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

DATA = ("prompts", "baselines", "models", "requirements", "known-defects.yaml")
IN_CHECKOUTS = "smollm2*"
"""Models, baselines, prompts and profiles that wheels leave out: the drafters alone are twice as large as the rest."""
FOR_PEOPLE = ("README.md", "audit-exceptions.yaml", "docs.txt", "uv.txt")
"""Files beside the data that no command reads: what folders are for, and what only scripts of a checkout read."""


class BuildWithData(build_py):
    """Copies the shipped data into the package, where ``harness.util.paths.REPOSITORY`` looks for it."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for profile in Path(self.build_lib, "harness", "profiles").glob(IN_CHECKOUTS):
            profile.unlink()
        for name in DATA:
            source, target = Path(name), Path(self.build_lib, "harness", "data", name)
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(
                    source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns(IN_CHECKOUTS, *FOR_PEOPLE)
                )
            else:
                shutil.copy2(source, target)
        for lock in Path(self.build_lib, "harness", "data", "requirements").glob("[cg]pu.txt"):
            # Commands read versions, and resolve anew what they install: 0.4 MB of hashes would be read by nobody.
            lock.write_text(re.sub(r" \\\n +--hash=\S+", "", lock.read_text(encoding="utf-8")), encoding="utf-8")


setup(cmdclass={"build_py": BuildWithData})
