"""Process trees that cannot outlive their owner. ``supervisor`` runs with the standard library alone.

* ``process``: ``SupervisedProcess`` and ``SupervisedEngine``, a process or engine started below a supervisor;
* ``child``: ``EngineProcess``, the base class of engines on this machine;
* ``server``: how servers are started: their command, address and environment;
* ``log``: ``EngineLog``, what is read and quoted from a server's log;
* ``stacks``: Python stacks of engines that hang, written beside their logs;
* ``cores``: cores, claimed so that engines of two harnesses do not share one;
* ``ports``: free ports, claimed so that two harnesses of one user do not take the same ones;
* ``orphans``: ``survey`` and ``clean``, for what earlier runs left on this machine;
* ``procfs``: processes and shared memory segments, and which process tree they belong to;
* ``supervisor``: the program that owns a process tree; run by ``process``;
* ``apart``: a command in a child process, whose verdict counts however that process ends;
* ``runtime_dir``: the folder for the sockets of one process tree; used within this package only.
"""
