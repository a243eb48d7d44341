"""``harness soak``: keep engines under load and watch them for leaks and for answers that change.

* ``load``: play rounds of requests, with their answers on disk at once;
* ``rounds``: judge each round;
* ``sampler``: measure process trees at a fixed interval;
* ``growth``: judge whether a figure grows;
* ``model``: the recorded lines and the result;
* ``run``: the soak as a whole;
* ``report``: terminal, soak.json and soak.html.
"""
