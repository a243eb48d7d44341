"""What the plain engine is asked to show how it rounds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from harness.history.rounding import ASIDE, HELD_AGAINST
from harness.profiles.load import load_profile
from harness.prompts.model import load_prompts
from harness.runner.rounding import rounding


class FakeSession:
    """Notes what it is asked, and answers nothing."""

    def __init__(self) -> None:
        self.profile = load_profile("cpu")
        self.group = SimpleNamespace(name=SimpleNamespace(reference="single-none"))
        self.roles = ("single",)
        self.senders = ThreadPoolExecutor(2)

    def ask(self, ask, legs):
        return None


def test_prompts_that_the_cell_answered_are_asked_once_less():
    session = FakeSession()
    prompts = load_prompts(session.profile.workload.prompts).cold[:2]
    asked = [(o.instance, o.prompt_id, o.part) for o in rounding(prompts, session, True, {prompts[0].id})]
    again = [(prompt, part) for instance, prompt, part in asked if instance == ASIDE["again"]]
    assert again == [
        (prompts[0].id, "subject"),
        (prompts[1].id, HELD_AGAINST),
        (prompts[1].id, "subject"),
    ]
    crowd = [prompt for instance, prompt, _ in asked if instance == ASIDE["crowd"]]
    assert crowd == [p.id for p in prompts]
