"""Fault injection against the harness itself: ``python -m faults``, from a checkout. Not part of the package.

A fault test, in code a *drill*, is one fault with the verdict, the reason and the time limit that must follow, all
stated beforehand. A *pair* is a prefill engine (P) and a decode engine (D).

* ``catalogue``: all drills;
* ``model``, ``results``, ``verdict``, ``report``: drills, their results, and whether they were survived;
* ``context``: a set of drills in progress;
* ``response_drills``, ``handoff_drills``, ``process_drills``, ``filesystem``, ``kill_timing``: the drills by target;
* ``request_drill``, ``response_faults``, ``proxy``, ``tcp_relay``: the tools for faults in exchanges;
* ``testbed``, ``process_group``, ``background``, ``metrics``: the engines that faults act on;
* ``request_runner``, ``process_runner``, ``cli_child``: run the harness in a drill;
* ``leaks``: what a drill leaves behind;
* ``run``, ``cli``: the command.
"""
