"""The hybrid probe reads all of the state that is handed over, and its training loses it as an engine would."""

from __future__ import annotations

import pytest
import torch

from harness.prompts.probe_task import WEIGHTS

# Threads that wait for a core spin on another one: beside other tests this took twenty times as long.
torch.set_num_threads(1)

LAYERS = (0, 2)


@pytest.fixture(scope="module")
def hybrid():
    # Imported here: with transformers it takes four seconds, in every process that collects tests.
    from tools.probe_models import hybrid

    return hybrid


@pytest.fixture(scope="module")
def target(hybrid):
    import transformers

    loaded = transformers.Qwen3NextForCausalLM.from_pretrained(WEIGHTS / "hybrid", dtype=torch.float32)
    return loaded.eval()


@pytest.fixture(scope="module")
def text(hybrid):
    """A prompt with its answer."""
    return next(ids for ids in hybrid.shipped() if ids.shape[1] > 100)


def handed(ids) -> int:
    """Tokens that P hands over: all of the prompt but the last."""
    return (ids.shape[1] - 5) // 2 + 3


@torch.no_grad()
def continued(target, ids, lost):
    """Logits from the last token of the prompt on, after losing parts of the state [(layer, name)] of those before."""
    cache = target(ids[:, : handed(ids)], use_cache=True).past_key_values
    for layer, name in lost:
        getattr(cache.layers[layer], name)[0].zero_()
    steps = [target(ids[:, t : t + 1], past_key_values=cache).logits for t in range(handed(ids), ids.shape[1])]
    return torch.cat(steps, 1)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", ["recurrent_states", "conv_states"])
def test_no_part_of_the_state_can_be_lost_unseen(target, text, layer, name):
    expected = text[:, handed(text) + 1 :]
    assert torch.equal(continued(target, text, [])[:, :-1].argmax(-1), expected)
    assert not torch.equal(continued(target, text, [(layer, name)])[:, :-1].argmax(-1), expected)


@pytest.mark.parametrize(("state", "convolution"), [(False, False), (True, False), (False, True), (True, True)])
def test_training_loses_what_an_engine_would_lose(hybrid, target, text, state, convolution):
    last = LAYERS[-1]
    names = [name for name, gone in (("recurrent_states", state), ("conv_states", convolution)) if gone]
    lost = hybrid.Lost(torch.tensor([state]), torch.tensor([convolution]), handed(text))
    with torch.no_grad(), hybrid.losing(target.model.layers[last].linear_attn, lost):
        whole = target(text, use_cache=False).logits[:, handed(text) :]
    assert (whole - continued(target, text, [(last, name) for name in names])).abs().max() < 1e-3
