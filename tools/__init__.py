"""Programs that are not part of the package; run them from a checkout.

``probe_models`` trains and exports the probe models, ``drafters`` those of a real chat model. ``structure`` prints
figures of the code, ``recipes`` what an addition to it costs.
"""
