"""Train and export the probe models: ``python -m tools.probe_models build``.

``shapes``: tensor shapes shared by networks, training and export.
``networks``: the models in torch.
``train``: the training recipe.
``export``: checkpoints in vLLM's layouts, and the tokenizer.
``build``: train, export and describe everything.
"""
