"""What will be sent: the requests of each cell and the scripts of the scenarios. Nothing is started here.

* ``cells``: ``CellWork``, ``Choice``, ``cell_work``: the requests of each cell;
* ``prepare``: ``prepare``, ``Prepared``: loading and checking of everything before an engine starts;
* ``scripts``: ``Script``, ``Stage``, ``Send``, ``scripts``: requests that bring engines into a scenario's state.
"""
