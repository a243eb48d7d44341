"""``vllm-router`` that refuses requests without the key. Run as a program, in the router's environment:

    guarded_router.py ARGUMENTS_OF_VLLM_ROUTER

The router (0.1.17) adds ``OPENAI_API_KEY`` to what it sends to the engines of a pair, whoever asks, so that without a
check its own port would bypass theirs. It has a check: it sends an incoming key to a URL, here /v1/models of an engine,
accepts the key if the status is 200, and remembers the result. The check is an argument of the router's class that its
command line lacks. It also guards the paths that the engines leave open.
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
