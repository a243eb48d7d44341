"""Modules on the Python path of engines and routers; they use the standard library only.

* ``kv_harness_guard``: ASGI middleware that makes engines refuse requests without the key;
* ``kv_harness_fork``: a vLLM plugin that lets CPU engines fork their processes;
* ``guarded_router``: a program that runs ``vllm-router`` with its key check enabled.
"""
