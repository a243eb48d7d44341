"""The smallest mutant: the last block of a request that was given up stays in use."""

from __future__ import annotations

from tools.recipes.places import Raised, Written
from tools.recipes.walk import Recipe

ID = "N999"
"""Larger than any id that there will be."""
_FAMILY = "harness/mutants/families/pools.py"
_DECLARED = f'''

declare(
    Mutant("{ID}", "every request keeps a block", "class of vllm #46283", "decode", "its last KV block stays in use"),
    Trial(SINGLE, "blocks-kept", ("pool-returned",)),
)
'''
_PATCH = f'''

@patch("{ID}", *FREE_BLOCKS)
def _{ID.lower()}(original: Any, active: Active, self: Any, request: Any) -> Any:
    if active():
        active.fired()
        self.kv_cache_manager.block_pool.touch(self.kv_cache_manager.get_blocks(request.request_id).blocks[0][-1:])
    return original(self, request)
'''

MUTANT = Recipe(
    name="mutant",
    places=(
        Written(_FAMILY, "what it is, and its trial", (ID,), _DECLARED),
        Written(_FAMILY, "its patch", (ID, "patch"), _PATCH),
        Written(
            "docs/mutants.md",
            "its row",
            (ID,),
            f"| {ID} | every request keeps a block | class of #46283 | engine | KV blocks are not freed |\n",
            before="\nN31 is what P did before the fix",
        ),
        Raised("README.md", "how many there are", ("mutants",), r"injects (\d+) faults"),
    ),
    tests=("tests/unit/mutants",),
    most_files=4,
    most_renewed=0,
)
