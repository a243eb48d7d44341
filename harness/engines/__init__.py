"""Real vLLM engines: how they are started, asked, counted, recorded and ended.

For other packages:

* ``session``: ``EngineGroupSession``, the running engines of one group;
* ``request``: ``Ask``, one request to a group, and ``Exchange``, which sends it alone or as a hand-off;
* ``client``: ``Client``, the HTTP client of one engine;
* ``http``: HTTP with limits for whole exchanges;
* ``api_key``: the random key of a group, and the file through which a user gets it;
* ``environment``: the versions and features of the Python that engines run under;
* ``executor``: ``make_executor``, which gives groups their places on this machine or on a cluster;
* ``inventory``: the devices of this machine, and the jobs that the scheduler packs onto them;
* ``places``: ``Place`` and ``EngineHandle``, the interfaces of where an engine runs;
* ``counters``: Prometheus counters under the harness's own names;
* ``command``: the command line and environment of one engine;
* ``router``, ``routers``: the ``vllm-router`` in front of a group;
* ``mutation``: the interface through which ``harness.mutants`` changes a group.

Within this package:

* ``launcher``: start and end the engines of a group;
* ``readiness``: wait until engines can be judged;
* ``response``: validate what engines answer;
* ``log_facts``: facts about an engine's set-up that only its log tells;
* ``attached``, ``server_info``: servers that run already, and the settings that they tell;
* ``guard``: modules that make engines and routers refuse requests without the key;
* ``ray``: engines on the nodes of a Ray cluster.
"""
