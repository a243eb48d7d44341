"""Programs that are not part of the package; run them from a checkout.

``probe_models``: train and export the probe models.
"""
