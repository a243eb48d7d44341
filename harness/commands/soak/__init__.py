"""``harness soak``: keep engines under load and watch them for leaks and for answers that change.

* ``load``: play rounds of requests;
* ``rounds``: judge each round;
* ``journal``: the answers of the round in progress, on disk;
* ``processes``, ``sampler``: measure process trees at a fixed interval;
* ``growth``: judge whether a figure grows;
* ``model``: the recorded lines and the result;
* ``run``: the soak as a whole;
* ``report``: terminal, soak.json and soak.html.
"""
