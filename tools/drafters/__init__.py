"""Train drafters of SmolLM2-135M-Instruct on text that it writes itself: ``python -m tools.drafters``.

``topics``, ``questions``: what the target is asked.
``target``: the target in torch, with the streams that drafters read.
``texts``: its answers.
``networks``: the drafters in torch.
``train``: losses, schedule, early stopping.
``export``: files at rest, and their expansion.
``measure``: what an engine will count.
``build``: all of it, and what is recorded.
"""
