"""The smallest kind of scenario: a prompt that is asked twice, in caches of their own."""

from __future__ import annotations

from tools.recipes.places import Renewed, Written
from tools.recipes.walk import Recipe

_CONFIG = '''class Twice(_Scenario):
    """Each prompt is asked twice, in caches of their own."""

    kind: Literal["twice"]
    prompts: tuple[str, ...] = Field(min_length=1)


'''
_MODULE = '''"""A prompt that is asked twice, in caches of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from harness.observed.prefix_cache import Hit
from harness.profiles.model import Profile
from harness.profiles.scenarios import Twice
from harness.prompts.model import Prompt
from harness.scenarios.base import Gap, Kind, Occurrence, Stage, one
from harness.scenarios.proving import judge_hit, leg_of


class TwiceKind(Kind[Twice]):
    needs = frozenset({"first", "subject"})

    def stages(self, config: Twice, prompts: Mapping[str, Prompt], chosen: Sequence[Prompt]) -> list[list[Stage]]:
        limit = config.max_tokens
        return [[one(prompts[p], "first", "a", limit), one(prompts[p], "subject", "b", limit)] for p in config.prompts]

    def impossible(self, config: Twice, profile: Profile, prompts: Mapping[str, Prompt]) -> str | None:
        return None

    def gaps(self, config: Twice, seen: Occurrence) -> Iterator[Gap]:
        subject, role = seen.parts["subject"], seen.cell.answering
        leg = leg_of(seen.cell, subject, role)
        yield from judge_hit(seen.cell, subject, leg, Hit(0, 0), "the same prompt was in another cache")
'''
_TEST = """

TWICE = {"id": "twice", "kind": "twice", "prompts": ["p96"]}


@pytest.mark.parametrize(("hits", "verdict"), [(0.0, Verdict.PASS), (64.0, Verdict.REGRESSION)])
def test_a_prompt_in_another_cache_is_not_found(hits, verdict):
    made = [
        in_scenario("single-none", "twice", "first"),
        in_scenario("single-none", "twice", "subject", counters={"prefix_hits": hits}),
    ]
    assert proof(made, TWICE, "single-none").verdict is verdict
"""
_PAGE = "docs/scenarios.md"

SCENARIO = Recipe(
    name="scenario",
    places=(
        Written(
            "harness/profiles/scenarios.py", "its configuration", ("Twice",), _CONFIG, before="Scenario = Annotated["
        ),
        Written(
            "harness/profiles/scenarios.py", "the union of all", ("Twice",), "    | Twice\n", before="    | Trace,\n"
        ),
        Written("harness/scenarios/twice.py", "its kind", (), _MODULE),
        Written(
            "harness/profiles/cpu-full.yaml",
            "a scenario of the kind",
            ("twice",),
            "  - {id: twice, kind: twice, prompts: [copy-117-22]}\n",
            before="  # Two prompts have a block in common, and the second",
        ),
        Written(
            _PAGE,
            "the row: what is sent, and the proof",
            ("what is sent", "twice"),
            "| `twice` | a prompt twice, in caches of their own | the second finds nothing |\n",
            before="| `shared-block` | A·S·T",
        ),
        Written(
            _PAGE,
            "the row: where it runs",
            ("Which combinations run", "twice"),
            "| `twice` | ✔ | ✔ (on D) | ✔ | ✔ | ✔ | ✔ |\n",
            before="| `shared-block` | ✔",
        ),
        Written("tests/unit/workload/test_scenarios.py", "a test of the proof", ("twice",), _TEST),
        Renewed(
            "the schema of profiles",
            "harness plan --schema > harness/profiles/profile.schema.json",
            "harness/profiles/profile.schema.json",
        ),
    ),
    tests=("tests/unit/scenarios", "tests/unit/workload/test_scenarios.py", "tests/unit/profiles/test_profiles.py"),
    most_files=5,
    most_renewed=1,
)
