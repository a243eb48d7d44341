"""What the plain engine is asked to show how it rounds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from harness.history.rounding import ASIDE, HELD_AGAINST
from harness.profiles.cells import Cell
from harness.profiles.load import load_profile
from harness.prompts.model import load_prompts
from harness.runner.rounding import chosen, largest_crowd, plain_work, rounding
from harness.workload.cells import cell_work


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


def test_the_crowd_is_as_large_as_the_largest_that_the_run_asks():
    """Beside three others a real model rounded as alone, beside 31 others not."""
    for name, most in (("smollm2-gpu-crowds", 32), ("smollm2", 4)):
        profile = load_profile(name).parts[0]
        prompts = load_prompts(profile.workload.prompts)
        plain = plain_work([cell_work(profile, prompts, Cell("single", profile.methods[0], variant=profile.variant))])
        four = chosen(plain)
        crowd = largest_crowd(plain, four)
        assert len(four) == 4 and crowd[:4] == four and len({p.id for p in crowd}) == most
        session = FakeSession()
        sizes = [o.concurrent for o in rounding(four, session, True, (), crowd) if o.instance == ASIDE["crowd"]]
        assert sizes == [most] * most
