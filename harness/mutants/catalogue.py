"""The mutants and the defects that they stand for. Plain data, which the harness reads without importing vLLM.

M1 to M11 put back the historic defects of ``docs/mutants.md``; the others are related defects.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Place = Literal["prefill", "decode", "both", "client", "command"]


class Mutant(NamedTuple):
    """One defect that can be put back."""

    id: str
    title: str
    origin: str
    """The upstream issue or pull request, or the kind of defect."""
    place: Place
    """The engine of a pair that gets it; the harness itself carries out ``client`` and ``command``."""
    behaviour: str
    historic: bool = False
    """One of the five defects that define this harness, or its direct analogue."""


MUTANTS: dict[str, Mutant] = {
    m.id: m
    for m in (
        Mutant(
            "M1",
            "P publishes its lookahead blocks",
            "vllm #43807, #43996; fixed by #46694",
            "prefill",
            "KVCacheManager.get_block_ids_for_computed_tokens returns all block ids of the request",
            historic=True,
        ),
        Mutant(
            "M1c",
            "P publishes its lookahead blocks after a prefill in chunks",
            "vllm #43807 as it was in 0.21 to 0.22.1",
            "prefill",
            "as M1, for requests whose prompt was computed in more than one step",
        ),
        Mutant(
            "M1d",
            "D pairs its uncached suffix with P's first blocks",
            "the other half of vllm #43807",
            "decode",
            "NixlBaseConnectorWorker._apply_prefix_caching keeps the front instead of the suffix",
        ),
        Mutant(
            "M2",
            "a second BOS",
            "test half of vllm #44151",
            "both",
            "CompletionRequest.build_tok_params forces add_special_tokens",
            historic=True,
        ),
        Mutant(
            "M3",
            "DFlash writes drafts into blocks that it does not own",
            "vllm #42971, #43733, #49757",
            "decode",
            "no lookahead on the first prefill, one slot less for DFlash, a window check without the bonus token, and "
            "vacated block-table rows that keep their ids",
            historic=True,
        ),
        Mutant(
            "M4",
            "the drafter's KV never arrives",
            "end state of vllm #34529",
            "decode",
            "received blocks of the drafter's layers are zeroed when the transfer completes",
            historic=True,
        ),
        Mutant(
            "M4g",
            "the connector is finalised before the drafter ran",
            "vllm #34529, V2 #43719",
            "prefill",
            "KV is saved to the staging buffer after the target's forward pass and not after the drafter's; on CPU, "
            "where no staging exists, the mutant brings real staging buffers with it",
        ),
        Mutant(
            "M5a",
            "cached blocks remembered over a failed admission",
            "analogue of vllm #18955, #18957",
            "decode",
            "KVCacheManager.get_computed_blocks is memoised per request until allocate_slots succeeds",
            historic=True,
        ),
        Mutant(
            "M5b",
            "an evicted block stays in the prefix cache",
            "analogue of vllm #18955",
            "decode",
            "BlockPool._remove_cached_block_hashes resets the hash and leaves the map entry",
            historic=True,
        ),
        Mutant(
            "M6",
            "P frees blocks before D has read them",
            "class of vllm #45357",
            "prefill",
            "NixlPullConnectorScheduler.request_finished answers that the blocks may be freed",
        ),
        Mutant(
            "M7",
            "block hashes ignore what came before",
            "prefix-cache collision",
            "both",
            "kv_cache_utils.hash_block_tokens ignores the parent hash",
        ),
        Mutant(
            "M8",
            "drafts shuffled before verification",
            "",
            "decode",
            "GPUModelRunner.take_draft_token_ids returns each request's drafts in reverse order",
        ),
        Mutant(
            "M9",
            "the hand-off's parameters are dropped",
            "a router's or client's error",
            "client",
            "D is asked without kv_transfer_params, so that it prefills by itself",
        ),
        Mutant(
            "M10",
            "no drafter on P",
            "a deployment error",
            "command",
            "P is started without speculation while D has a drafter",
        ),
        Mutant(
            "M11",
            "wrong drafts are accepted",
            "",
            "decode",
            "the rejection sampler accepts one wrong draft in a hundred",
        ),
        Mutant(
            "N1",
            "P's lease ends before D reads",
            "lease expiry of the NIXL connector",
            "prefill",
            "the lease of a finished prefill ends at once",
        ),
        Mutant(
            "N2",
            "blocks are zeroed after the transfer",
            "vllm #48481",
            "decode",
            "the second received block of the target's layers is zeroed when the transfer completes",
        ),
        Mutant(
            "N3",
            "a failed receive is answered with 200",
            "vllm #52234",
            "decode",
            "D reads nothing and reports the transfer as done",
        ),
        Mutant(
            "N4",
            "the drafter's context is not restored from the cache",
            "vllm #47930",
            "decode",
            "the drafter's KV of blocks taken from the prefix cache is zeroed",
        ),
        Mutant(
            "N5",
            "a cached block belongs to another prompt",
            "vllm #56734, #44409",
            "decode",
            "the second block of a prefix hit is overwritten in the target's layers by the first one",
        ),
        Mutant(
            "N6",
            "the router hands nothing off",
            "a deployment error, or a router that falls back to D",
            "client",
            "the router is started without P and sends every request to D, which prefills by itself",
        ),
        Mutant(
            "N7",
            "the last layer's KV never arrives",
            "a layer that the transfer does not register",
            "decode",
            "the received KV of the target's last layer is zeroed when the transfer completes; all tokens stay right",
        ),
        Mutant(
            "N8",
            "an answer's blocks do not keep their KV",
            "class of vllm #53912",
            "decode",
            "when a request ends, the target's KV of the blocks with its output tokens, which stay in the prefix "
            "cache, is zeroed",
        ),
        Mutant(
            "N9",
            "an answer's blocks do not keep the drafter's context",
            "class of vllm #47930",
            "decode",
            "as N8, in the drafter's layers",
        ),
        Mutant(
            "N10",
            "a prefix hit on blocks that are not written yet",
            "class of vllm #41838, #42359",
            "decode",
            "a request that finds blocks which another one computes in the same step reads the null block instead",
        ),
        Mutant(
            "N11",
            "a request that was given up keeps a block",
            "class of vllm #46283, #58222",
            "decode",
            "the last KV block of an aborted request is never given back to the pool",
        ),
        Mutant(
            "N12",
            "a request whose transfer failed is not computed again",
            "class of vllm #49250",
            "decode",
            "after a failed load, D takes the tokens that were not fetched for computed and goes on from there",
        ),
        Mutant(
            "N13",
            "speculation finds nothing in the prefix cache",
            "vllm #54360, #57032",
            "both",
            "KVCacheManager.get_computed_blocks finds no block on an engine with a drafter",
        ),
        Mutant(
            "N14",
            "a grammar is applied to the wrong rows of a verify step",
            "class of vllm #49694, #43388",
            "both",
            "the bitmasks of a request's drafts are each applied to the row after theirs",
        ),
        Mutant(
            "N15",
            "blocks of a request that was given up are written later",
            "class of vllm #48633, sglang #35049",
            "decode",
            "the target's KV in blocks of an aborted request is zeroed once another request has filled them",
        ),
        Mutant(
            "N16",
            "P hands over the wrong blocks of a request that it preempted",
            "class of vllm #50297",
            "prefill",
            "request_finished publishes the second block of a request that was preempted in place of its first",
        ),
        Mutant(
            "N17",
            "a P that writes fills D's uncached blocks from its first ones",
            "class of vllm #48758",
            "prefill",
            "of a prompt that D has in part, NixlPushConnectorWorker writes P's first blocks instead of its last",
        ),
        Mutant(
            "N18",
            "a connector does damage by being there",
            "class of vllm #53505, #50344",
            "decode",
            "with a connector, a request that D computes alone loses its second block after the prefill",
        ),
        Mutant(
            "N19",
            "the first block is lost, without speculation",
            "a transfer that leaves a block out",
            "decode",
            "D zeroes the target's KV in the first block of each hand-off",
        ),
        Mutant(
            "N20",
            "P hands over the blocks that a window has left, not those in it",
            "class of vllm #52234, in layers with sliding windows",
            "prefill",
            "NixlBaseConnectorScheduler.get_exchange_clipped_blocks keeps a group's first blocks instead of its last",
        ),
        Mutant(
            "N21",
            "an answer after a hand-off says that its tokens ran out",
            "a finish reason that is not the engine's own",
            "decode",
            "Request.get_finished_reason of a request with KV from P is length where it is stop",
        ),
        Mutant(
            "N22",
            "text loses a token",
            "a tokenizer that differs from the one that made the ids",
            "both",
            "BaseRenderer._tokenize_prompt leaves out the fourth token of a prompt that is sent as text",
        ),
        Mutant(
            "N23",
            "drafts are dropped without a word",
            "speculation that is off although it was asked for",
            "decode",
            "Scheduler.update_draft_token_ids gets no drafts",
        ),
        Mutant(
            "N24",
            "the prefix cache ignores salts",
            "tenants that share a prefix cache although they must not",
            "both",
            "generate_block_hash_extra_keys leaves out the request's cache_salt",
        ),
        Mutant(
            "N25",
            "D reads nothing from a P that took the place of another one",
            "class of vllm #49238",
            "decode",
            "as N3, where P is not the first one that D has met",
        ),
        Mutant(
            "N26",
            "P reads other blocks back from D than those of the answer",
            "class of vllm #47021",
            "prefill",
            "as M1d, on P: it reads D's first blocks instead of its last",
        ),
        Mutant(
            "N27",
            "the recurrent state never arrives",
            "class of vllm #34529, #43719, in layers with recurrent state",
            "decode",
            "D zeroes the state of each hand-off, and keeps the KV of attention",
        ),
        Mutant(
            "N28",
            "a prefix hit restores the state of a placeholder",
            "class of vllm #53912, #43559, in layers with recurrent state",
            "decode",
            "the state that a hit continues from is replaced by that of the null block, which stands for those before",
        ),
        Mutant(
            "N29",
            "D takes one P for another",
            "two P for one D",
            "decode",
            "what a second P holds is read from the first one that D has met, at the same block numbers",
        ),
        Mutant(
            "N30",
            "placeholders of drafts are taken for tokens of the prompt",
            "class of vllm #55178",
            "decode",
            "the last token of a prompt, padded with placeholders for drafts, runs as a part of the prompt, so that "
            "the recurrent state takes them in",
        ),
        Mutant(
            "N31",
            "P hands over the KV of drafts",
            "vllm #55055",
            "both",
            "_prefill_backoff is 0: P hands over every token of a prompt, in whose last slots the later ones of "
            "several modules have written unverified drafts",
        ),
    )
}

HISTORIC = tuple(m.id for m in MUTANTS.values() if m.historic)
