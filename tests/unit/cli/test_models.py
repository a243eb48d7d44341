"""`harness models` in a place without a network: what is the same of every model is said once."""

from __future__ import annotations

from harness.cli.models import _each_once


def test_what_is_wrong_with_several_models_is_said_once():
    lost = "not in the cache /c; expected an answer from https://hub, found no name; check the network"
    moved = "eagle3: b/two@main: expected a commit, tag or branch 'main'"
    found = _each_once([f"target: a/one@main: {lost}", moved, f"dflash: c/three@main: {lost}"])
    assert found == [f"2 models: {lost}", moved]
