"""What will be sent: the requests of each cell and the scripts of the scenarios. Nothing is started here.

* ``cells``: ``CellWork``, ``Choice``, ``cell_work``: the requests of each cell;
* ``expected``: ``lacking``: what a recorded run lacks of a profile's plan;
* ``prepare``: ``prepare``, ``Prepared``: loading and checking of everything before an engine starts;
* ``rows``: ``planned_rows``: the requests of a cell as they are written into the record;
* ``scripts``: ``Script``, ``Stage``, ``Send``, ``scripts``: requests that bring engines into a scenario's state.
"""
