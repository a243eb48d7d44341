"""The command line: options, help texts and exit codes. Only ``app.main`` is for other packages.

Heavy imports stand inside the functions that need them, so that help texts and usage errors come at once.

* ``app``: the application, the registration of all commands, and ``main``;
* ``options``, ``target``: options that several commands share; ``completion``: the values that shells complete;
* ``help``, ``examples``: how help texts look, and what they end with; ``shapes``: what ``--json`` prints;
* ``run``: ``harness run``, with ``--resume`` and ``--part``; ``plan``: ``plan`` and ``doctor``;
* ``judge``: ``check``, ``report``, ``trend``, ``merge``; ``baseline``: ``harness baseline``;
* ``ab``: ``harness ab``;
* ``repro``, ``bisect``: ``harness repro`` and ``harness bisect``;
* ``trust``: ``selftest`` and ``aa``; ``soak``, ``up``, ``probe``, ``models``, ``ci``: what they are called;
* ``leftovers``: ``ps`` and ``clean``; ``listing``: ``harness list``;
* ``prompts``, ``prompt_sets``: ``harness prompts``.
"""
