"""Files, paths, locks, text and time: helpers that know nothing of engines, prompts or verdicts.

* ``byte_cache``: ``ByteCache``: an LRU cache bounded by bytes;
* ``clock``: ``now``, ``utc``: a wall clock that never jumps within a process;
* ``file_lock``: ``open_lock``, ``take``, ``wait_for``, ``claim``, ``held``: exclusive locks on files;
* ``files``: ``sha256_*``, ``write_atomic``, ``write_json``, ``read_json_lines``: hashes, atomic writes, JSON lines;
* ``json_io``: ``loads``, ``read_text``: strict JSON from bounded files;
* ``machine``: ``now``, ``git_state``: the time and the state of the checkout as a run records them;
* ``names``: ``SafeName`` and its kin: types of names that become parts of file names;
* ``paths``: ``REPOSITORY``, ``joined``, ``recorded``: which paths a profile or a recorded run may reach;
* ``progress``: ``Reporter``: what a run shows while it is under way;
* ``signals``: ``ignored``, ``deferred``, ``raise_once``: signal masking;
* ``storage``: ``writing``, ``LineFile``, ``FolderLock``: recording safely, one writer per folder;
* ``strict``: ``Strict``: base class of all profile and record models;
* ``text``: ``harmless``, ``shortened``: text made safe to show;
* ``yaml_io``: ``load``, ``parse``: YAML as plain, bounded data.
"""
