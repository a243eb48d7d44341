"""The hybrid target: layers with recurrent state (gated delta nets) around one of attention, as Qwen3-Next has them.

The networks are those of transformers. What is to be copied is divided between the two kinds of layers, so that both
matter: the word after each of ``state_words()``, and the first one, come from the recurrent state alone, all others by
attention. Every other state word takes the state of both recurrent layers, and the first word the convolution of both,
so that none of them can be lost unseen.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next

from harness.prompts import probe_task
from harness.prompts.model import load_prompts
from harness.util.paths import REPOSITORY
from tools.probe_models import train as plain
from tools.probe_models.networks import HybridMTP
from tools.probe_models.shapes import HYBRID, SHAPE
from tools.probe_models.train import Log, sample_batch, warm_cosine

_ATTENTION = HYBRID.layers.index("full_attention")
_LAST = len(HYBRID.layers) - 1


class Recipe(NamedTuple):
    """Everything that determines the weights of the hybrid target; recorded with them."""

    seed: int = 20
    steps: int = 2500
    peak_lr: float = 2.5e-3
    polish: tuple[tuple[int, float], ...] = ((800, 1e-3), (900, 7e-4))
    """Steps and peak learning rate of each further phase, on prompts of all lengths."""
    both_steps: int = 1000
    """Steps that make some words depend on state and convolution of the last layer, too."""
    both_lr: float = 1e-3
    last_steps: int = 300
    last_lr: float = 5e-4
    known: int = 4
    """Prompts of the harness's own set that each step of the last phase has beside the random ones."""
    max_words: int = 225


def config() -> Qwen3NextConfig:
    """Return the config of the target.

    vLLM wants a layer with experts in this architecture: the first one has two, of which each token takes both, so that
    no rounding decides which.
    """
    return Qwen3NextConfig(
        vocab_size=probe_task.VOCAB_SIZE,
        hidden_size=SHAPE.hidden,
        intermediate_size=SHAPE.intermediate,
        num_hidden_layers=len(HYBRID.layers),
        layer_types=list(HYBRID.layers),
        num_attention_heads=HYBRID.heads,
        num_key_value_heads=HYBRID.heads,
        head_dim=HYBRID.head_dim,
        linear_num_key_heads=1,
        linear_num_value_heads=1,
        linear_key_head_dim=HYBRID.state_dim,
        linear_value_head_dim=HYBRID.state_dim,
        linear_conv_kernel_dim=4,
        num_experts=2,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=128,
        mlp_only_layers=list(range(1, len(HYBRID.layers))),
        max_position_embeddings=SHAPE.max_positions,
        rms_norm_eps=SHAPE.norm_eps,
        tie_word_embeddings=False,
        initializer_range=0.06,
        bos_token_id=probe_task.BOS,
        eos_token_id=probe_task.EOT,
        pad_token_id=probe_task.PAD,
        attn_implementation="eager",
    )


def new_target() -> Qwen3NextForCausalLM:
    """Return an untrained target with one matrix for embeddings and head, and a state that forgets next to nothing."""
    target = Qwen3NextForCausalLM(config())
    target.lm_head.weight = target.model.embed_tokens.weight
    memories = [layer.linear_attn for layer in target.model.layers if hasattr(layer, "linear_attn")]
    for memory in memories:
        nn.init.zeros_(memory.A_log)
        nn.init.constant_(memory.dt_bias, -6.0)
    # The last one begins as what it has to be: a word is stored under the one before it, and looked up by it.
    size, width = HYBRID.state_dim, memories[-1].conv1d.weight.shape[-1]
    with torch.no_grad():
        projection = memories[-1].in_proj_qkvz.weight
        projection[size : 2 * size] = projection[:size]
        taps = memories[-1].conv1d.weight.mul_(0.1)
        taps[:, 0, width - 1] += 1
        taps[size : 2 * size, 0, width - 2 :] += torch.tensor([1.0, -1.0])
    return target


def sources(ids: Tensor) -> Tensor:
    """Return for each query from <assistant> on the prompt position that it has to attend to [B, n + 1]: that of the
    word to copy, or 0 (<bos>, which tells nothing) where the word comes from the recurrent state."""
    words = (ids.shape[1] - 5) // 2
    queries = ids[:, words + 3 : -1]
    by_state = torch.isin(queries, torch.tensor([probe_task.ASSISTANT, *probe_task.state_words()]))
    return torch.where(by_state, 0, torch.arange(words + 1) + probe_task.FIRST_SOURCE_POSITION)


def from_both(queries: Tensor) -> Tensor:
    """Return which queries (token ids, any shape) are those whose word takes the state of both recurrent layers."""
    return torch.isin(queries, torch.tensor(sorted(probe_task.state_words())[1::2]))


def blinded(source: Tensor, length: int) -> Tensor:
    """Return the additive mask [B, 1, T, T] of causal attention in which queries with source 0 see <bos> alone."""
    mask = torch.full((length, length), -1e9).triu(1).repeat(source.shape[0], 1, 1)
    queries = mask[:, -1 - source.shape[1] : -1]
    queries[..., 1:].masked_fill_((source == 0).unsqueeze(-1), -1e9)
    return mask.unsqueeze(1)


def train(recipe: Recipe, log: Log) -> Qwen3NextForCausalLM:
    """Train the hybrid target: with a curriculum of growing prompts, then on prompts of all lengths, at last with those
    of the shipped prompt set among them, which it has to answer without a mistake."""
    torch.manual_seed(recipe.seed)
    target = new_target()
    train_phase(target, recipe, log, recipe.steps, recipe.peak_lr, grows=True)
    for steps, peak_lr in recipe.polish:
        train_phase(target, recipe, log, steps, peak_lr)
    # Until here nothing makes the model read the last layer's state, and it does not.
    train_phase(target, recipe, log, recipe.both_steps, recipe.both_lr, loses=True)
    train_phase(target, recipe, log, recipe.last_steps, recipe.last_lr, loses=True, known=shipped())
    return target


class _Read:
    """The hybrid target as drafters read a ``Target``: one stream, of the hidden states behind the final norm."""

    def __init__(self, target: Qwen3NextForCausalLM) -> None:
        self._target = target
        self.norm = nn.Identity()

    @property
    def embed_tokens(self) -> nn.Embedding:
        return self._target.model.embed_tokens

    def streams(self, ids: Tensor) -> list[Tensor]:
        """Return hidden states [B, T, H]."""
        return [self._target.model(ids, use_cache=False).last_hidden_state]

    def requires_grad_(self, wanted: bool) -> None:
        self._target.requires_grad_(wanted)


def train_drafter(target: Qwen3NextForCausalLM, recipe: plain.Recipe, log: Log) -> HybridMTP:
    """Train the MTP drafter of a finished hybrid target by the recipe of the other drafters."""
    torch.manual_seed(recipe.seed)
    drafter = HybridMTP()
    plain.train_drafter("hybrid-mtp", drafter, _Read(target), recipe, log)
    return drafter


def shipped() -> list[Tensor]:
    """Return the shipped prompts that ask for a copy, each with its answer [1, 2n + 5]."""
    asked = [list(p.ids) for p in load_prompts(REPOSITORY / "prompts" / "probe.jsonl").prompts]
    copies = [ids for ids in asked if ids[-1] == probe_task.ASSISTANT]
    return [torch.tensor([ids + probe_task.expected_output(ids)]) for ids in copies]


def train_phase(
    target: Qwen3NextForCausalLM,
    recipe: Recipe,
    log: Log,
    total: int,
    peak: float,
    grows: bool = False,
    loses: bool = False,
    known: Sequence[Tensor] = (),
) -> None:
    """Train for ``total`` steps in place: with or without the curriculum, and the loss of what is handed over of the
    last layer."""
    params = [p for p in target.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=peak, betas=(0.9, 0.98), weight_decay=0.01)
    start = time.monotonic()
    for step in range(total):
        progress = step / total
        longest = int(12 + min(1.0, progress / 0.5) * (recipe.max_words - 12)) if grows else recipe.max_words
        shortest = 4 if torch.rand(()) < 0.65 else max(4, longest * 2 // 3)
        words = int(torch.randint(shortest, longest + 1, ()))
        picked = torch.randperm(len(known))[: recipe.known].tolist()
        batches = [sample_batch(max(4, min(64, 1500 // words)), words), *(known[i] for i in picked)]
        for group in optimizer.param_groups:
            group["lr"] = peak * warm_cosine(step, total, 100, 0.5 if grows else 0.2, 0.01)
        optimizer.zero_grad()
        said = [_learn(target, ids, grows and progress < 0.6, loses) for ids in batches]
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        if step % 100 == 0 or step == total - 1:
            log(f"hybrid {step}/{total} words {words} {said[0]} t {time.monotonic() - start:.0f}s")


class Lost(NamedTuple):
    """What a hand-off loses of the last layer in the rows of a batch [B]: its state, its convolution."""

    state: Tensor
    convolution: Tensor
    tokens: int
    """Tokens that were handed over, from the first one on."""


@contextmanager
def losing(memory: nn.Module, lost: Lost) -> Iterator[None]:
    """Let a layer compute as an engine does whose state or convolution were zero after the tokens handed over."""
    convolve, taps = modeling_qwen3_next.causal_conv1d_fn, memory.conv1d.weight

    def write(_module: nn.Module, _inputs: Any, gates: Tensor) -> Tensor:
        # With one head, the first of the two numbers of a token says how much of it is written.
        before = torch.arange(gates.shape[1]) < lost.tokens
        return gates.masked_fill((lost.state[:, None] & before).unsqueeze(-1) & torch.tensor([True, False]), -30.0)

    def shortened(inputs: Tensor, weight: Tensor, *rest: Any, **options: Any) -> Tensor:
        whole = convolve(inputs, weight, *rest, **options)
        if weight.data_ptr() != taps.data_ptr() or not lost.convolution.any():
            return whole
        after = torch.arange(inputs.shape[-1]) >= lost.tokens
        return torch.where(
            lost.convolution[:, None, None] & after, convolve(inputs * after, weight, *rest, **options), whole
        )

    hook = memory.in_proj_ba.register_forward_hook(write)
    try:
        with patch.object(modeling_qwen3_next, "causal_conv1d_fn", shortened):
            yield
    finally:
        hook.remove()


def _learn(target: Qwen3NextForCausalLM, ids: Tensor, blind: bool, loses: bool) -> str:
    """Add the gradients of a batch, and return how well it was answered.

    With ``blind``, the queries of ``sources`` with source 0 cannot see more; attention is supervised towards its source
    all along, so that it keeps looking away when it can. With ``loses``, half of the rows lose the last layer's state
    before the last token of the prompt, and half its convolution: the words of ``from_both`` must not be said without
    the one, the first word not without the other.
    """
    words = (ids.shape[1] - 5) // 2
    source = sources(ids)
    masks: Any = {"full_attention": blinded(source + (not blind), ids.shape[1]), "linear_attention": None}
    seen: list[Tensor] = []
    attention = target.model.layers[_ATTENTION].self_attn
    hook = attention.register_forward_hook(lambda _module, _inputs, outputs: seen.append(outputs[1]))
    state_lost, convolution_lost = (torch.rand(2, ids.shape[0]) < 0.5) & loses
    with losing(target.model.layers[_LAST].linear_attn, Lost(state_lost, convolution_lost, words + 3)):
        hidden = target.model(ids, attention_mask=masks).last_hidden_state[:, words + 3 : -1]
    hook.remove()
    logits = target.lm_head(hidden)
    labels = ids[:, words + 4 :]
    entropy = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
    queries = ids[:, words + 3 : -1]
    lost = from_both(queries) & state_lost[:, None]
    lost |= (queries == probe_task.ASSISTANT) & convolution_lost[:, None]
    state = (source == 0) & ~lost
    copy = entropy[source != 0].mean() + entropy[state].mean()
    if lost.any():
        # The likelihood of anything else; the factor keeps it finite.
        copy = copy - torch.log1p(-0.9999 * torch.exp(-entropy[lost])).mean()
    weight = seen[0][:, :, words + 3 : -1].mean(1).gather(2, source.unsqueeze(-1))
    looks = -(weight + 1e-6).log().mean()
    (copy + 0.5 * looks).backward()
    right = (logits.argmax(-1) == labels).float()
    return (
        f"copy {copy.item():.5f} looks {looks.item():.4f} right by attention {right[source != 0].mean():.4f} by state "
        f"{right[state].mean():.4f} of the lost {right[lost].mean():.4f}"
    )
