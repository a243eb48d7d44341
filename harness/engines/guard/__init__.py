"""Modules on the Python path of engines and routers that make them refuse requests without the key.

* ``kv_harness_guard``: ASGI middleware for engines; standard library only;
* ``guarded_router``: a program that runs ``vllm-router`` with its key check enabled.
"""
