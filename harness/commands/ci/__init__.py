"""``harness ci``: split a profile into parts for several machines, as data for CI systems.

* ``plan``: pack cells into steps by expected time;
* ``systems``: the steps as a GitHub matrix and a Buildkite pipeline.
"""
