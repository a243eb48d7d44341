"""Drills on answers: engines keep running, and one thing in an exchange is corrupted on the way."""

from __future__ import annotations

from faults import response_faults as a
from faults.request_drill import EITHER, R, U, on_answers
from harness.history.verdict import Verdict

_SHAPE = "expected a completion with one choice"
_TOKENS = "the baseline has"
_NO_DRAFT = "speculation was not tested"
_PROMPT_SENT = "prompt ids that were sent"
_MODEL = "model 'target'"

_WITHOUT_IDS = a.edited(lambda b: a.choice(b).pop("token_ids"))
_ANOTHER_ECHO = a.edited(a.echo_another)
_ANOTHER_MODEL = a.edited(lambda b: b.update(model="other"))
_WITHOUT_METRICS = a.edited(lambda b: b.pop("metrics"))

_TRANSPORT = (
    on_answers("error-body", "200 with an error body", "D", a.instead(200, a.ERROR_BODY), U, "an error body"),
    on_answers(
        "error-body-hostile",
        "200 with an error of lone surrogates, NUL, markup and escapes",
        "single",
        a.instead(200, a.SURROGATE),
        U,
        "an error body",
    ),
    on_answers("error-500", "status 500", "P", a.instead(500, a.ERROR_BODY), U, "status 200 .* found 500"),
    on_answers("error-429", "status 429", "single", a.instead(429, b"{}"), U, "status 200 .* found 429"),
    on_answers("error-503-all", "status 503 to everything", "D", a.instead(503, b""), U, "found 503", "all"),
    on_answers(
        "redirect",
        "a redirect to another server",
        "D",
        a.instead(307, b"", (("location", "http://127.0.0.1:1/v1/completions"),)),
        U,
        "status 200 .* found 307",
    ),
    on_answers("html", "a web server's page", "D", a.instead(200, a.HTML, (("content-type", "text/html"),)), U, _SHAPE),
    on_answers("cut", "connection closed in the middle of the body", "D", a.cut, U, "RemoteProtocolError"),
    on_answers("closed", "connection closed without an answer", "P", a.closed, U, "RemoteProtocolError"),
    on_answers("reset", "connection reset without an answer", "single", a.reset, U, "ReadError|RemoteProtocolError"),
    on_answers("garbage", "bytes that are not HTTP", "D", a.garbage, U, "RemoteProtocolError"),
    on_answers("old-http", "HTTP/1.0 without a length, cut", "single", a.old_http, U, _SHAPE),
    on_answers("encoding", "content-encoding that the body does not have", "D", a.labelled("gzip"), U, "DecodingError"),
    on_answers("hang", "no answer, connection open", "single", a.hung, U, "ReadTimeout|within .* s", bound_s=60),
    on_answers("hang-prefill", "no answer from P", "P", a.hung, U, "ReadTimeout|within .* s", bound_s=60),
    on_answers(
        "drip", "a byte a second, longer than the limit", "single", a.dripping(45), U, "(?i)timeout|within", bound_s=60
    ),
    on_answers("huge", "a correct answer after 256 MiB of spaces", "single", a.padded(256), U, "MiB|too (large|long)"),
)

_SHAPES = (
    on_answers("invalid-json", "truncated JSON", "D", a.spoiled_text(lambda b: b[:-20]), U, _SHAPE),
    on_answers("other-shape", "JSON of the wrong shape", "D", a.instead(200, b"[1, 2, 3]"), U, _SHAPE),
    on_answers("nested", "100,000 nested lists", "single", a.spoiled_text(a.nested), U, _SHAPE),
    on_answers("latin-1", "bytes that are not UTF-8", "P", a.spoiled_text(lambda b: b"\xff\xfe" + b), U, _SHAPE),
    on_answers(
        "two-choices", "two choices", "single", a.edited(lambda b: b["choices"].append(b["choices"][0])), U, _SHAPE
    ),
    on_answers("huge-token", "a token id of 400 digits", "D", a.edited(a.set_token(10**400)), U, _SHAPE),
    on_answers("token-64-bits", "a token id beyond 64 bits", "single", a.edited(a.set_token(2**70)), U, _SHAPE),
    on_answers("negative-token", "a negative token id", "single", a.edited(a.set_token(-5)), U, _SHAPE),
    on_answers("text-token", "a word instead of a token id", "D", a.edited(a.set_token("seven")), U, _SHAPE),
    on_answers("nan-logprob", "a log-prob that is NaN", "D", a.edited(a.set_logprob(float("nan"))), U, _SHAPE),
    on_answers(
        "inf-logprob", "a log-prob that is infinite", "single", a.edited(a.set_logprob(float("inf"))), U, _SHAPE
    ),
    on_answers("nan-top", "top log-probs that are NaN", "D", a.edited(a.set_top_logprobs(float("nan"))), U, _SHAPE),
    on_answers("null-logprob", "a log-prob that is null", "single", a.edited(a.set_logprob(None)), U, _SHAPE),
    on_answers(
        "surrogate",
        "a finish reason that is a lone surrogate",
        "single",
        a.edited(lambda b: a.choice(b).update(finish_reason="\ud800")),
        EITHER,
        f"{_SHAPE}|finish reason",
    ),
)

_CONTENT = (
    on_answers("repeated", "a token repeated to the end", "D", a.edited(a.repeat_tokens), R, _TOKENS),
    on_answers("fewer", "fewer tokens than usage says", "D", a.edited(a.drop_token), R, "usage to count"),
    on_answers(
        "shorter", "three tokens fewer, with every count changed to match", "single", a.edited(a.shorten), R, _TOKENS
    ),
    on_answers("more", "more tokens than usage says", "D", a.edited(a.add_token), R, "usage to count"),
    on_answers("none", "no tokens", "single", a.edited(a.no_tokens), R, "at least one output token"),
    on_answers("no-ids", "no token ids", "D", _WITHOUT_IDS, R, "expected output token ids"),
    on_answers("no-ids-all", "no token ids", "single", _WITHOUT_IDS, R, "output token ids", "all"),
    on_answers("echo", "different prompt ids are echoed", "P", _ANOTHER_ECHO, R, _PROMPT_SENT),
    on_answers("echo-all", "different prompt ids are echoed", "single", _ANOTHER_ECHO, R, _PROMPT_SENT, "all"),
    on_answers(
        "no-echo",
        "no prompt ids are echoed",
        "D",
        a.edited(lambda b: a.choice(b).pop("prompt_token_ids")),
        U,
        "to echo the prompt",
    ),
    on_answers(
        "other-prompt",
        "the engine is given another prompt",
        "single",
        a.altered_request(lambda b: b["prompt"].reverse()),
        R,
        _PROMPT_SENT,
    ),
    on_answers(
        "hot",
        "the engine samples at temperature 2",
        "single",
        a.altered_request(lambda b: b.update(temperature=2.0, seed=5)),
        R,
        _TOKENS,
    ),
    on_answers(
        "no-finish",
        "no finish reason",
        "D",
        a.edited(lambda b: a.choice(b).update(finish_reason=None)),
        R,
        "finish reason",
    ),
    on_answers(
        "other-model-asked",
        "the engine serves another name",
        "D",
        a.altered_request(lambda b: b.update(model="other")),
        U,
        "found 404",
    ),
    on_answers("other-model", "the answer names another model", "single", _ANOTHER_MODEL, U, _MODEL),
    on_answers("other-model-all", "every answer names another model", "D", _ANOTHER_MODEL, U, _MODEL, "all"),
)

_FIGURES = (
    on_answers("no-acceptance", "no acceptance figures", "D", _WITHOUT_METRICS, U, "acceptance"),
    on_answers("no-acceptance-all", "no acceptance figures", "single", _WITHOUT_METRICS, U, "acceptance", "all"),
    on_answers(
        "acceptance-total",
        "accepted drafts that do not add up",
        "D",
        a.edited(
            lambda b: a.speculation(b).update(
                num_accepted_draft_tokens=a.speculation(b)["num_accepted_draft_tokens"] + 5
            )
        ),
        R,
        "per-step counts do not add up",
    ),
    on_answers(
        "acceptance-cut",
        "steps for half of the tokens",
        "single",
        a.edited(a.steps_cut),
        R,
        "verify steps account for fewer",
    ),
    on_answers(
        "acceptance-over",
        "a step that accepts more than it drafted",
        "single",
        a.edited(lambda b: a.speculation(b).update(per_step_drafted=[0] * len(a.speculation(b)["per_step_drafted"]))),
        R,
        "a step accepts more drafts|add up",
    ),
    on_answers(
        "no-drafts",
        "zero drafts in the answer",
        "D",
        a.edited(a.no_drafts),
        (Verdict.REGRESSION, Verdict.UNKNOWN),
        _NO_DRAFT,
    ),
    on_answers("metrics-html", "/metrics is a web page", "D", a.instead(200, a.HTML), U, "metrics", "all", "/metrics"),
    on_answers(
        "metrics-nan", "/metrics counts NaN", "single", a.spoiled_text(a.nan_counters), U, "metrics", "all", "/metrics"
    ),
    on_answers("metrics-500", "/metrics fails", "single", a.instead(500, b""), U, "metrics", "all", "/metrics"),
    on_answers("metrics-empty", "/metrics is empty", "D", a.instead(200, b""), U, "counters|proof", "all", "/metrics"),
)

RESPONSES = (*_TRANSPORT, *_SHAPES, *_CONTENT, *_FIGURES)
