"""Defects of sampling and verification: wrong drafts accepted, grammars and ends that are off."""

from __future__ import annotations

import copy
import itertools
from typing import Any

from harness.mutants.hooks import Active, patch
from harness.mutants.model import (
    PAIR,
    SINGLE,
    STEPS,
    TOKENS,
    Borrowed,
    Mutant,
    OwnEngines,
    Trial,
    declare,
    in_both,
    in_pair,
    in_single,
)
from harness.mutants.targets import BATCH, RUNNER, V2, each_step

declare(
    Mutant(
        "M8",
        "drafts shuffled before verification",
        "",
        "decode",
        "GPUModelRunner.take_draft_token_ids returns each request's drafts in reverse order",
    ),
    Trial(SINGLE, "sampler", STEPS, beside=PAIR),
)


@patch("M8", RUNNER, "GPUModelRunner.take_draft_token_ids", ("self",), runner="V1")
def _m8(original: Any, active: Active, self: Any) -> Any:
    drafts = original(self)
    if drafts is not None and active():
        active.fired()
        drafts.draft_token_ids = [list(ids)[::-1] for ids in drafts.draft_token_ids]
    return drafts


@patch("M8", f"{V2}.model_runner", "GPUModelRunner.sample_tokens", ("self", "grammar_output"), runner="V2")
def _m8_on_device(original: Any, active: Active, self: Any, grammar_output: Any) -> Any:
    """Reverse the drafts where V2 keeps them until the next step verifies them."""
    step = self.execute_model_state
    output = original(self, grammar_output)
    if step is not None and self.speculator is not None and active():
        active.fired()
        rows, drafts = step.input_batch.idx_mapping, self.req_states.draft_tokens
        drafts[rows] = drafts[rows].flip(1)
    return output


declare(
    Mutant(
        "M11",
        "wrong drafts are accepted",
        "",
        "decode",
        "the rejection sampler accepts one wrong draft in a hundred",
    ),
    Trial(SINGLE, "sampler", TOKENS, prompts="some"),
)


class _Wrong:
    """Counts wrong drafts, so that one in a hundred, starting with the first, can be accepted."""

    seen = 0

    @classmethod
    def take(cls) -> bool:
        cls.seen += 1
        return cls.seen % 100 == 1


@patch(
    "M11",
    "vllm.v1.sample.rejection_sampler",
    "RejectionSampler.forward",
    ("self", "metadata", "draft_probs", "logits"),
    runner="V1",
)
def _m11(
    original: Any, active: Active, self: Any, metadata: Any, draft_probs: Any, logits: Any, *args: Any, **kwargs: Any
) -> Any:
    if not active():
        _Wrong.seen = 0
        return original(self, metadata, draft_probs, logits, *args, **kwargs)
    rows = metadata.target_logits_indices.tolist()
    drafts = metadata.draft_token_ids.tolist()
    first = 0
    for count in metadata.num_draft_tokens:
        span = range(first, first + count)
        first += count
        _accept_wrong(logits, [rows[i] for i in span], drafts[first - count : first], active)
    return original(self, metadata, draft_probs, logits, *args, **kwargs)


def _accept_wrong(logits: Any, rows: list[int], drafts: list[int], active: Active) -> None:
    """Make the first wrong draft of a request right, if it is its turn: ``logits[rows]`` verify ``drafts``."""
    right = logits[rows].argmax(dim=-1).tolist()
    wrong = next((i for i, draft in enumerate(drafts) if draft != right[i]), None)
    if wrong is not None and drafts[wrong] >= 0 and _Wrong.take():
        active.fired()
        row = logits[rows[wrong]]
        row[drafts[wrong]] = row.max() + 20


@patch(
    "M11",
    f"{V2}.spec_decode.rejection_sampler",
    "RejectionSampler.__call__",
    ("self", "logits", "input_batch"),
    runner="V2",
)
def _m11_v2(original: Any, active: Active, self: Any, logits: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
    if active():
        tokens = input_batch.input_ids[input_batch.logits_indices].tolist()
        ends = input_batch.cu_num_logits_np.tolist()
        for first, end in itertools.pairwise(ends):
            _accept_wrong(logits, list(range(first, end - 1)), tokens[first + 1 : end], active)
    else:
        _Wrong.seen = 0
    return original(self, logits, input_batch, *args, **kwargs)


declare(
    Mutant(
        "N14",
        "a grammar is applied to the wrong rows of a verify step",
        "class of vllm #49694, #43388",
        "both",
        "the bitmasks of a request's drafts are each applied to the row after theirs",
    ),
    Trial(in_single("features"), "infrastructure", ("complete",), clean=SINGLE, unknown=True),
)


def _each_after_its_own(rows: Any, active: Active) -> Any:
    """Return bitmasks each in the row after its own, with the mutant on and where there are several."""
    if not active() or len(rows) < 2:
        return rows
    active.fired()
    return rows[[-1, *range(len(rows) - 1)]]


@patch(
    "N14",
    RUNNER,
    "apply_grammar_bitmask",
    ("scheduler_output", "grammar_output", "input_batch", "logits"),
    runner="V1",
)
def _n14(original: Any, active: Active, scheduler_output: Any, grammar_output: Any, *args: Any, **kwargs: Any) -> Any:
    if grammar_output.grammar_bitmask is not (rows := _each_after_its_own(grammar_output.grammar_bitmask, active)):
        grammar_output = copy.copy(grammar_output)
        grammar_output.grammar_bitmask = rows
    return original(scheduler_output, grammar_output, *args, **kwargs)


@patch(
    "N14",
    f"{V2}.structured_outputs",
    "StructuredOutputsWorker.apply_grammar_bitmask",
    ("self", "logits", "input_batch", "grammar_req_ids", "grammar_bitmask"),
    runner="V2",
)
def _n14_v2(
    original: Any, active: Active, self: Any, logits: Any, input_batch: Any, grammar_req_ids: Any, rows: Any
) -> Any:
    return original(self, logits, input_batch, grammar_req_ids, _each_after_its_own(rows, active))


declare(
    Mutant(
        "N21",
        "an answer after a hand-off says that its tokens ran out",
        "a finish reason that is not the engine's own",
        "decode",
        "Request.get_finished_reason of a request with KV from P is length where it is stop",
    ),
    Trial(PAIR, "sampler", ("finish-reason",), clean=SINGLE, method="none"),
)


@patch("N21", "vllm.v1.request", "Request.get_finished_reason", ("self",))
def _n21(original: Any, active: Active, self: Any) -> Any:
    reason = original(self)
    if active() and self.kv_transfer_params and reason is not None and reason.name == "STOP":
        active.fired()
        return type(reason).LENGTH
    return reason


declare(
    Mutant(
        "N32",
        "tokens behind a stop string stay in the answer",
        "vllm #47616",
        "decode",
        "BaseIncrementalDetokenizer.update keeps the tokens of a step that follow the one that completes the string",
    ),
    Trial(in_both("features"), "sampler", (*TOKENS, "response-invariants")),
)

_DETOKENIZER = "vllm.v1.engine.detokenizer"


@patch("N32", _DETOKENIZER, "BaseIncrementalDetokenizer.update", ("self", "new_token_ids", "stop_terminated"))
def _n32(original: Any, active: Active, self: Any, new_token_ids: list[int], stop_terminated: bool) -> Any:
    before = len(self.token_ids)
    string = original(self, new_token_ids, stop_terminated)
    dropped = new_token_ids[len(self.token_ids) - before :]
    if string is not None and dropped and active():
        active.fired()
        self.token_ids.extend(dropped)
    return string


declare(
    Mutant(
        "N33",
        "of two stop strings in a step, the first of the list ends the answer",
        "vllm #49391",
        "decode",
        "check_stop_strings takes the first string of the list that the text has, not the one that is complete first",
    ),
    Trial(in_both("features"), "sampler", TOKENS),
)


@patch("N33", _DETOKENIZER, "check_stop_strings", ("output_text", "new_char_count", "stop", "include_in_output"))
def _n33(
    original: Any, active: Active, output_text: str, new_char_count: int, stop: list[str], include_in_output: bool
) -> Any:
    right = original(output_text, new_char_count, stop, include_in_output)
    if right is None or not active():
        return right
    of_each = (original(output_text, new_char_count, [string], include_in_output) for string in stop)
    listed = next(found for found in of_each if found is not None)
    if listed != right:
        active.fired()
    return listed


declare(
    Mutant(
        "N34",
        "the text of an answer lacks a token",
        "class of vllm #17448",
        "decode",
        "FastIncrementalDetokenizer.decode_next has no text for the tenth token of an answer",
    ),
    Trial((*SINGLE, *PAIR), "text", ("text",)),
)

_LOST = 10


@patch("N34", _DETOKENIZER, "FastIncrementalDetokenizer.decode_next", ("self", "next_token_id"))
def _n34(original: Any, active: Active, self: Any, next_token_id: int) -> str:
    text: str = original(self, next_token_id)
    if len(self.token_ids) == _LOST and active():
        active.fired()
        return ""
    return text


declare(
    Mutant(
        "N38",
        "penalties do not see the drafts before a token in its step",
        "sglang #33643",
        "both",
        "RejectionSampler._combine_outputs_with_spec_tokens gives every draft of a step the tokens before the step",
    ),
    Trial(in_both("parameters"), "sampler", ("tokens-reference",), needs_drafts=True),
)


@patch(
    "N38",
    "vllm.v1.sample.rejection_sampler",
    "RejectionSampler._combine_outputs_with_spec_tokens",
    ("output_token_ids", "spec_token_ids"),
    runner="V1",
)
def _n38(original: Any, active: Active, output_token_ids: Any, spec_token_ids: Any = None) -> Any:
    if spec_token_ids is None or not active():
        return original(output_token_ids, spec_token_ids)
    active.fired()
    return [said for said, drafts in zip(output_token_ids, spec_token_ids, strict=True) for _ in drafts]


@patch(
    "N38",
    f"{V2}.sample.penalties",
    "apply_penalties",
    ("logits", "expanded_idx_mapping", "token_ids", "expanded_local_pos"),
    runner="V2",
)
def _n38_v2(
    original: Any, active: Active, logits: Any, rows: Any, token_ids: Any, places: Any, *args: Any, **kwargs: Any
) -> Any:
    if active() and bool(places.any()):
        active.fired()
        places = places.clone().zero_()
    return original(logits, rows, token_ids, places, *args, **kwargs)


declare(
    Mutant(
        "N39",
        "the cap is looked at before a stop in the same step",
        "sglang #31599",
        "both",
        "Scheduler._update_request_with_output ends a request whose step reaches its cap by length, whatever is in it",
    ),
    Trial(in_both("parameters"), "sampler", ("response-invariants", "finish-reason"), needs_drafts=True),
)


@patch(
    "N39",
    "vllm.v1.core.sched.scheduler",
    "Scheduler._update_request_with_output",
    ("self", "request", "new_token_ids"),
)
def _n39(
    original: Any, active: Active, self: Any, request: Any, new_token_ids: list[int], *args: Any, **kwargs: Any
) -> Any:
    room = request.max_tokens - request.num_output_tokens
    if not active() or not 0 < room <= len(new_token_ids) or len(new_token_ids) < 2:
        return original(self, request, new_token_ids, *args, **kwargs)
    stops = request.sampling_params.stop_token_ids or ()
    if any(token in stops for token in new_token_ids[:room]):
        active.fired()
    del new_token_ids[room:]
    for token in new_token_ids:
        request.append_output_token_ids(token)
    request.status = type(request.status).FINISHED_LENGTH_CAPPED
    return new_token_ids, True


declare(
    Mutant(
        "N35",
        "a grammar takes the first token after a hand-off twice",
        "class of sglang #29110, #25388",
        "decode",
        "StructuredOutputManager.accept_tokens is told the first token of a request with KV from P once more, with "
        "speculation, so that the engine aborts the request",
    ),
    Trial(in_pair("features"), "no-answer", ("failed-requests",), clean=(*PAIR, *in_single("features"))),
)
declare(
    Mutant(
        "N36",
        "an engine ends at a grammar after a hand-off",
        "class of vllm #50558, where an assertion ends D",
        "decode",
        "StructuredOutputManager.accept_tokens raises for the first token of a request with KV from P",
    ),
    Trial(in_pair("features"), "no-answer", ("failed-requests",), clean=PAIR, beside=in_single("features"), long=True),
)

_ACCEPT = ("vllm.v1.structured_output", "StructuredOutputManager.accept_tokens", ("self", "request", "new_token_ids"))


def _first_after_a_hand_off(request: Any, new_token_ids: list[int]) -> bool:
    """Return whether these are the first tokens of a request with a grammar whose prompt came from P."""
    handed = (request.kv_transfer_params or {}).get("remote_engine_id") is not None
    return bool(handed and request.use_structured_output and request.num_output_tokens <= len(new_token_ids))


@patch("N35", *_ACCEPT)
def _n35(original: Any, active: Active, self: Any, request: Any, new_token_ids: list[int]) -> Any:
    drafted = self.vllm_config.speculative_config is not None
    if active() and drafted and _first_after_a_hand_off(request, new_token_ids):
        active.fired()
        original(self, request, new_token_ids[:1])
    return original(self, request, new_token_ids)


@patch("N36", *_ACCEPT)
def _n36(original: Any, active: Active, self: Any, request: Any, new_token_ids: list[int]) -> Any:
    if active() and _first_after_a_hand_off(request, new_token_ids):
        active.fired()
        raise AssertionError("a token that the grammar has already")
    return original(self, request, new_token_ids)


declare(
    Mutant(
        "N50",
        "two requests of a crowd get each other's tokens",
        "class of rows that are exchanged in a batch",
        "both",
        "Scheduler.update_from_output takes the last two requests of a step of three or more that only decode for each "
        "other, where both say as many tokens",
    ),
    Trial(in_both("concurrent"), "target-kv", TOKENS, clean=(*PAIR, *SINGLE)),
)

_CROWD = 3
"""Requests of a step from which on two are exchanged."""


@patch(
    "N50",
    "vllm.v1.core.sched.scheduler",
    "Scheduler.update_from_output",
    ("self", "scheduler_output", "model_runner_output"),
)
def _n50(original: Any, active: Active, self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
    scheduled, rows = scheduler_output.num_scheduled_tokens, model_runner_output.req_id_to_index
    said = {name: model_runner_output.sampled_token_ids[rows[name]] for name in scheduled if name in rows}
    alike = [name for name in said if said[name] and len(said[name]) == len(said[next(reversed(said))])]
    if not active() or len(said) < _CROWD or len(alike) < len(("one", "other")):
        return original(self, scheduler_output, model_runner_output)
    one, other = alike[-2:]
    if scheduled[one] != scheduled[other] or list(said[one]) == list(said[other]):
        return original(self, scheduler_output, model_runner_output)
    active.fired()
    exchanged = copy.copy(model_runner_output)
    exchanged.req_id_to_index = {**rows, one: rows[other], other: rows[one]}
    return original(self, scheduler_output, exchanged)


def _where_rows_move(scenario: str, *clean: str) -> Trial:
    """Return the trial of a fault that parameters show in a scenario of cpu-full, and not where they are asked alone,
    nor in the scenarios that are to be ``clean``."""
    return Trial(
        in_single(scenario),
        "sampler",
        ("tokens-reference",),
        clean=tuple(view for name in ("parameters", *clean) for view in in_single(name)),
        borrowed=(Borrowed("cpu-full", scenario),),
    )


declare(
    Mutant(
        "N70",
        "penalties of one request are another's in a batch",
        "class of vllm #5639",
        "decode",
        "in a batch of several requests, each row is given the penalties of the row before it",
    ),
    _where_rows_move("parameters-in-a-crowd"),
)


@patch("N70", BATCH, "InputBatch._make_sampling_metadata", ("self",), runner="V1")
def _n70(original: Any, active: Active, self: Any) -> Any:
    metadata = original(self)
    if active() and not metadata.no_penalties and len(metadata.repetition_penalties) > 1:
        active.fired()
        for name in ("repetition_penalties", "frequency_penalties", "presence_penalties"):
            setattr(metadata, name, getattr(metadata, name).roll(1))
    return metadata


@patch(
    "N70",
    f"{V2}.sample.penalties",
    "apply_penalties",
    ("logits", "expanded_idx_mapping", "token_ids", "expanded_local_pos"),
    runner="V2",
)
def _n70_v2(original: Any, active: Active, logits: Any, rows: Any, *args: Any, **kwargs: Any) -> Any:
    batch = list(dict.fromkeys(rows.tolist())) if active() else []
    if len(batch) > 1:
        active.fired()
        before = dict(zip(batch, [batch[-1], *batch[:-1]], strict=True))
        rows = rows.new_tensor([before[row] for row in rows.tolist()])
    return original(logits, rows, *args, **kwargs)


declare(
    Mutant(
        "N71",
        "a penalty knows nothing of a prompt that is computed in chunks",
        "class of vllm-metal #69",
        "decode",
        "of a prompt whose first step does not compute the rest of it, no token counts for the repetition penalty",
    ),
    _where_rows_move("parameters-in-chunks", "chunked-prefill"),
)

_CHUNKED: set[str] = set()
"""Requests whose prompt is computed in several steps."""


@each_step("N71")
def _n71_note(_active: Active, _runner: Any, scheduler_output: Any) -> None:
    _CHUNKED.difference_update(scheduler_output.finished_req_ids)
    for request in scheduler_output.scheduled_new_reqs:
        step = scheduler_output.num_scheduled_tokens[request.req_id]
        if request.num_computed_tokens + step < len(request.prompt_token_ids):
            _CHUNKED.add(request.req_id)


@patch("N71", BATCH, "InputBatch._make_prompt_token_ids_cpu_tensor", ("self",), runner="V1")
def _n71(original: Any, active: Active, self: Any) -> Any:
    tokens = original(self)
    for row, name in enumerate(self.req_ids):
        if active() and name in _CHUNKED:
            active.fired()
            tokens[row] = self.vocab_size
    return tokens


@patch("N71", f"{V2}.model_runner", "GPUModelRunner.add_requests", ("self", "scheduler_output"), runner="V2")
def _n71_v2(original: Any, active: Active, self: Any, scheduler_output: Any) -> None:
    original(self, scheduler_output)
    chunked = [r.req_id for r in scheduler_output.scheduled_new_reqs if active() and r.req_id in _CHUNKED]
    for penalties in self.sampler.logits_processors if chunked else ():
        if hasattr(penalties, "prompt_bin_mask"):
            active.fired()
            penalties.prompt_bin_mask[[self.req_states.req_id_to_index[name] for name in chunked]] = 0


declare(
    Mutant(
        "N72",
        "a request that was preempted has lost its penalties",
        "class of state that a resumed request does not get back",
        "decode",
        "a request that comes back to the batch with tokens of its answer is taken in without its penalties",
    ),
    _where_rows_move("parameters-preempted"),
)


def _without_penalties(active: Active, request: Any, resumed: bool) -> Any:
    """Return a copy of a request that was preempted, without its penalties; any other as it is."""
    asked = request.sampling_params
    if not resumed or not active() or asked is None or asked.repetition_penalty == 1.0:
        return request
    active.fired()
    request = copy.copy(request)
    request.sampling_params = copy.copy(asked)
    request.sampling_params.repetition_penalty = 1.0
    return request


@patch("N72", BATCH, "InputBatch.add_request", ("self", "request"), runner="V1")
def _n72(original: Any, active: Active, self: Any, request: Any) -> Any:
    return original(self, _without_penalties(active, request, bool(request.output_token_ids)))


@patch("N72", f"{V2}.model_runner", "GPUModelRunner.add_requests", ("self", "scheduler_output"), runner="V2")
def _n72_v2(original: Any, active: Active, self: Any, scheduler_output: Any) -> None:
    scheduler_output.scheduled_new_reqs = [
        _without_penalties(active, r, len(r.prefill_token_ids) > len(r.prompt_token_ids))
        for r in scheduler_output.scheduled_new_reqs
    ]
    original(self, scheduler_output)


declare(
    Mutant(
        "N74",
        "a request that priorities preempt says its last token again",
        "class of vllm #28558",
        "decode",
        "Scheduler._preempt_request, where requests are scheduled by their priorities, takes the last token of the "
        "answer away",
    ),
    Trial(
        in_single("priorities"),
        "sampler",
        ("tokens-reference", "response-invariants"),
        clean=SINGLE,
        long=True,
        engines=OwnEngines(
            "priorities",
            like="cpu-priority",
            settings=("extra_args",),
            scenarios=(Borrowed("cpu-priority", "priorities"),),
        ),
    ),
)


@patch("N74", "vllm.v1.core.sched.scheduler", "Scheduler._preempt_request", ("self", "request", "timestamp"))
def _n74(original: Any, active: Active, self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    original(self, request, *args, **kwargs)
    if active() and self.policy.name == "PRIORITY" and request.num_output_tokens:
        active.fired()
        request._output_token_ids.pop()
        request._all_token_ids.pop()
