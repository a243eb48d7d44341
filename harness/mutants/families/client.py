"""Defects of what engines are sent and how they are deployed: clients, routers, tokenizers, command lines."""

from __future__ import annotations

from typing import Any

from harness.mutants.hooks import Active, patch
from harness.mutants.model import (
    BOTH_FORMS,
    COLD,
    PAIR,
    SINGLE,
    Borrowed,
    Mutant,
    Trial,
    View,
    declare,
    in_pair,
)

declare(
    Mutant(
        "M2",
        "a second BOS",
        "test half of vllm #44151",
        "both",
        "CompletionRequest.build_tok_params forces add_special_tokens",
        historic=True,
    ),
    Trial((*PAIR, *SINGLE), "input", ("echoed-prompt",), forms=BOTH_FORMS),
)


@patch(
    "M2",
    "vllm.entrypoints.openai.completion.protocol",
    "CompletionRequest.build_tok_params",
    ("self", "model_config"),
)
def _m2(original: Any, active: Active, self: Any, model_config: Any) -> Any:
    if active():
        active.fired()
        self.add_special_tokens = True
    return original(self, model_config)


declare(
    Mutant(
        "M9",
        "the hand-off's parameters are dropped",
        "a router's or client's error",
        "client",
        "D is asked without kv_transfer_params, so that it prefills by itself",
    ),
    Trial(PAIR, "nothing-tested", ("transfer",), unknown=True),
)


declare(
    Mutant(
        "M10",
        "no drafter on P",
        "a deployment error",
        "command",
        "P is started without speculation while D has a drafter",
    ),
    Trial(PAIR, "infrastructure", ("complete",), unknown=True, refusal="NIXL compatibility hash mismatch"),
)


declare(
    Mutant(
        "N6",
        "the router does not hand off",
        "a deployment error, or a router that falls back to D",
        "client",
        "the router is started without P and sends every request to D, which prefills by itself",
    ),
    Trial((View("pd", COLD, "router"),), "routing", ("transfer",), clean=PAIR),
)


declare(
    Mutant(
        "N22",
        "text loses a token",
        "a tokenizer that differs from the one that made the ids",
        "both",
        "BaseRenderer._tokenize_prompt leaves out the fourth token of a prompt that is sent as text",
    ),
    Trial(SINGLE, "input", ("text-form",), forms=BOTH_FORMS),
)


@patch("N22", "vllm.renderers.base", "BaseRenderer._tokenize_prompt", ("self", "prompt", "params"))
def _n22(original: Any, active: Active, self: Any, prompt: Any, params: Any) -> Any:
    tokens = original(self, prompt, params)
    if active():
        active.fired()
        del tokens["prompt_token_ids"][3]
    return tokens


declare(
    Mutant(
        "N73",
        "the router hands on no parameter that OpenAI's API has not",
        "a router that builds requests anew, as it knows them",
        "client",
        "what is asked of the router lacks every parameter of vLLM's own, such as bad_words",
    ),
    Trial(
        (View("pd", "parameters-by-router", "router"),),
        "sampler",
        ("tokens-reference",),
        clean=in_pair("parameters"),
        borrowed=(Borrowed("cpu-full", "parameters-by-router"),),
    ),
)
