"""Prompt sets as data: how they are built, read and checked, and where their lengths lie relative to a block.

* ``datasets``: ``read_texts``, ``fetch_texts``: texts that people wrote, from a file or the hub;
* ``echo``: ``build_echo_prompts``: "repeat this list" prompts for real models;
* ``lengths``: ``Stratum``, ``classify``, ``target_lengths``: length classes;
* ``model``: ``Prompt``, ``PromptSet``, ``load_prompts``, ``build_probe_prompts``: the sets themselves;
* ``padded``: ``build_natural_prompts``, ``coverage``: natural prompts padded to wanted lengths;
* ``probe_task``: vocabulary, prompt format and expected output of the probe models.
"""
