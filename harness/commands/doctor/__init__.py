"""``harness doctor``: what this machine can run, and what is missing.

* ``examine``: packages, memory, disk, ports, models, prompts and baselines;
* ``gpu``: what real models need: the hub, transports, driver, GPU memory and what compiles kernels.
"""
