"""Packing of the jobs of a matrix onto GPUs, with no knowledge of engines or vLLM.

* ``gpus``: ``visible_here``, ``query_gpus``, ``wait_given_back``: the GPUs that a run may use, and their memory;
* ``links``: ``query_links``, ``between``: NVLink, PCIe or host between the GPUs of this machine;
* ``hardware``: ``hardware``: this machine as a run records it;
* ``model``: ``Device``, ``Job``, ``EngineNeed``, ``Placement``: plain data and its checks;
* ``packing``: ``Packer``, ``impossible``: where the engines of a job fit;
* ``planning``: ``planned``, ``one_by_one``, ``simulate``: schedulers for real runs, and their simulation;
* ``scheduler``: ``Scheduler``: what to start next, and where.
"""
