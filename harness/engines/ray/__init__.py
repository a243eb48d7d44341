"""Engines on the nodes of a Ray cluster.

* ``driver``: ``RayExecutor``, the side of the harness;
* ``node``: ``NodeEngine``, the actor on a node; used by ``driver``.
"""
