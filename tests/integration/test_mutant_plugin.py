"""The plugin of the mutants in processes of its own: inert by default, and one line when it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distributions

import pytest

from harness import mutants
from harness.mutants.install import PLUGIN_FOLDER, EnabledMutants, Marks


def run_python(code: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={"PATH": "/usr/bin", **env}
    )


def test_without_its_variable_the_plugin_does_nothing():
    count = "print(len(sys.meta_path))"
    loaded = "print('harness.mutants.hooks' in sys.modules)"
    done = run_python(f"import sys, harness.mutants as m; m.register(); {loaded}; {count}")
    assert done.stdout.split() == ["False", run_python(f"import sys; {count}").stdout.strip()]
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"KV_HARNESS_MUTANTS": "M99"}, "expected injected faults"),
        ({"KV_HARNESS_MUTANTS": "M1,M4"}, "expected one injected fault at a time, found M1, M4"),
    ],
)
def test_bad_arming_ends_the_process_with_one_line(env, sentence):
    done = run_python("import harness.mutants as m; m.register(); print('went on')", **env)
    assert done.returncode == 70 and "went on" not in done.stdout
    (line,) = done.stderr.splitlines()
    assert sentence in line


def test_two_together_when_asked_for():
    env = {"KV_HARNESS_MUTANTS": "M1,M4", "KV_HARNESS_MUTANTS_TOGETHER": "1"}
    assert "installed M1,M4" in run_python("import harness.mutants as m; m.register()", **env).stderr


def test_refusal_of_a_changed_target_ends_the_process(tmp_path):
    """The real finder on a module that has another shape than the mutant was written for."""
    package = tmp_path / "vllm" / "v1" / "core"
    package.mkdir(parents=True)
    for folder in (tmp_path / "vllm", tmp_path / "vllm" / "v1", package):
        (folder / "__init__.py").write_text("")
    (package / "kv_cache_manager.py").write_text("class KVCacheManager:\n    pass\n")
    code = "import harness.mutants as m; m.register(); import vllm.v1.core.kv_cache_manager; print('went on')"
    done = run_python(code, KV_HARNESS_MUTANTS="M1", PYTHONPATH=str(tmp_path))
    assert done.returncode == 70, done.stderr
    assert "went on" not in done.stdout
    marks = Marks(done.stderr)
    assert len(marks.refused) == 1 and "get_block_ids_for_computed_tokens" in marks.refused[0]


def test_vllm_finds_the_plugin_on_the_path_of_engines_with_mutants(tmp_path):
    enabled = EnabledMutants(["M1"], pair=True, folder=tmp_path)
    path = enabled.environment("prefill", "/another/environment")["PYTHONPATH"].split(os.pathsep)
    (point,) = [
        point
        for distribution in distributions(path=path[:1])
        for point in distribution.entry_points
        if point.group == "vllm.general_plugins"
    ]
    assert path[0] == str(PLUGIN_FOLDER) and point.load() is mutants.register
    assert enabled.environment("decode", "/another/environment") == {}
    code = "import harness.mutants as m; m.register(); print(m.__file__)"
    assert run_python(code, PYTHONPATH=os.pathsep.join(path)).stdout.strip() == mutants.__file__
