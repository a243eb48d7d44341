"""``vllm-router`` that answers nobody without the run's key. Run as a program, in the router's environment:

    guarded_router.py ARGUMENTS_OF_VLLM_ROUTER

The router (0.1.17) adds ``OPENAI_API_KEY`` to what it sends to the engines of a pair, whoever asks, so that without a
check its own port would be a way around theirs. It has a check: a key that comes in is shown to a URL, here to
/v1/models of an engine, and is good when that says 200; each key is looked at once. The check is an argument of the
router's class that its command line lacks. Paths that the engines leave open are guarded too.
"""

from __future__ import annotations

import functools
import os

URLS_VARIABLE = "KV_HARNESS_ROUTER_CHECK"

if __name__ == "__main__":
    import vllm_router.router as router
    from vllm_router.launch_router import main

    # A router without this argument fails here instead of serving unguarded.
    router._Router = functools.partial(router._Router, api_key_validation_urls=[os.environ[URLS_VARIABLE]])
    main()
