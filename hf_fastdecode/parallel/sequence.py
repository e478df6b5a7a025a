"""Sequence parallelism: the processes between which the context of each call is divided (Tree Attention).

Each process stores its part of every node and of every suffix. In a decode step all of them have the new tokens' keys
and values; each attends to what it stores, the new tokens that it will store among them, and one collective a layer
merges that of all processes. Whatever else the model computes, each process computes whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ..attention.forest import Forest, Path, Span, joined
from ..attention.kv import Partial, Scoring, Segment, SuffixLengths
from ..attention.launch.plan import NO_OWN_NODES, OwnNodes
from ..attention.launch.step_tables import Attend, DescribedStep, NewTokens, StepTables
from ..attention.torch_operators.prefill_ops import PackedRuns, Run
from ..errors import Unsupported
from ..kernels.device import interpreted, triton_is_installed
from ..kernels.failures import KernelFailedError
from .ranks import splits_between
from .shards import (
    FEWEST_TOKENS,
    SUFFIX_BLOCK,
    Contexts,
    DividedPass,
    GatheredContexts,
    OwnTokens,
    ReadsContexts,
    Shard,
    Undivided,
    gathered,
    gathered_tokens,
    order_after_gather,
    stored_forest,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


GATHERED_TOKENS = 1 << 16
"""Tokens of stored context that a prefill pass gathers at once, at most."""


class SequenceParallel(Undivided):
    """The processes that divide nodes and suffixes, and what this one stores, by `shard` and `suffix_shard`."""

    is_divided = True
    group: ProcessGroup

    def __init__(self, group: ProcessGroup):
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.shard, self.suffix_shard = Shard(self.rank, self.ranks), Shard(self.rank, self.ranks, SUFFIX_BLOCK)
        # The latest ones, and what is stored of them here; another thread may replace them.
        self._forests: tuple[Forest, Forest] | None = None
        self._suffixes: tuple[SuffixLengths, SuffixLengths] | None = None

    @property
    def whose(self) -> str:
        return f"the processes {dist.get_process_group_ranks(self.group)}"

    @property
    def tables(self) -> Callable[..., StepTables]:
        return partial(DividedStepTables, self)

    def shard_of(self, runs: Mapping[int, int], segment: int) -> Shard:
        """The part of a segment stored here; `runs`: tokens of each suffix in segments made of suffixes, by number."""
        if (run := runs.get(segment)) is None:
            return self.shard
        return Shard(self.rank, self.ranks, self.suffix_shard.block, run)

    def stored(self, forest: Forest, runs: Mapping[int, int]) -> Forest:
        known = self._forests
        if known is None or known[0] is not forest:
            known = self._forests = forest, stored_forest(forest, partial(self.shard_of, runs))
        return known[1]

    def stored_suffixes(self, lengths: SuffixLengths) -> SuffixLengths:
        known = self._suffixes
        if known is None or known[0] != lengths:
            shard = self.suffix_shard
            per_row = None if lengths.per_row is None else shard.counts(lengths.per_row)
            stored = SuffixLengths(shard.count(lengths.longest), per_row, shard.count(lengths.shortest))
            known = self._suffixes = lengths, stored
        return known[1]

    def own_tokens(self, spans: Path) -> OwnTokens:
        indices, before = [torch.empty(0, dtype=torch.long, device="cpu")], 0
        for span in spans:
            indices.append(self.shard.stored_tokens(span.start, span.stop) - span.start + before)
            before += span.length
        return OwnTokens(joined(self.shard.span(span) for span in spans), torch.cat(indices))

    def merge(self, own: Partial) -> Partial:
        """The partial over what all processes store, bitwise the same on all of them: one collective.

        `own` is over what this process stores; ``(0, -inf)`` where it stores nothing. ValueError where gradients are
        needed.
        """
        if own.out.requires_grad:
            raise ValueError(
                f"no gradients pass between the {self.ranks} processes that divide a context; run the pass under "
                "torch.no_grad(), or enable the model with sequence_parallel=False"
            )
        buffer = partial_buffer(own.out.shape, own.out.device, own.out.dtype)
        buffer.partial.out.copy_(own.out)
        buffer.partial.lse.copy_(own.lse)
        return merge_over(self.group, buffer)

    def whole(self, stored: Segment, span: Span, runs: Mapping[int, int]) -> Segment:
        """Keys and values of a whole span: ``[kv_heads, length, head_dim]`` each; one collective.

        Of what this process stores of its segment, ``[kv_heads, tokens, head_dim]`` each; `runs` as for `shard_of`.
        """
        shard = self.shard_of(runs, span.segment)
        order, longest = order_after_gather(shard, span.start, span.stop)
        return gathered_tokens(stored.view(shard.span(span)), longest, order, self.group)

    def seen(self, before: SuffixLengths, queries: int) -> Tensor | None:
        whole = torch.tensor([before.longest], device="cpu") if before.per_row is None else before.per_row.cpu()
        return self.suffix_shard.counts(whole.long()[:, None] + 1 + torch.arange(queries, device="cpu"))

    def room(self, tokens: int) -> int:
        # As the process that stores most, and one more, which a step may write to that stores no token.
        return replace(self.suffix_shard, rank=0).count(tokens) + 1

    def check_window(self, window: int | None) -> None:
        if window is not None:
            raise Unsupported(
                f"a window of {window} tokens hides some of a row, whose context is divided between processes",
                "use sequence_parallel=False for such models and lengths",
            )

    def read_at_once(self, context: Path) -> Path:
        starts = ((span, start) for span in context for start in range(0, span.length, GATHERED_TOKENS))
        return tuple(span[start : start + GATHERED_TOKENS] for span, start in starts)

    def most_of_pass(self, parameters: Iterable[Tensor], max_tokens: int) -> int | None:
        if splits_between(parameters, self.group):
            return None
        return max_tokens * (self.ranks if max_tokens >= FEWEST_TOKENS else 1)

    def part_of(self, runs: Sequence[Run]) -> DividedPass | None:
        return DividedPass.of(runs, self.group)

    def reads(
        self, stored: Contexts, gather: Contexts, whole: Segment, runs: PackedRuns, contexts: Path
    ) -> ReadsContexts:
        read_here = {name for run in runs.runs for name in run.context if isinstance(name, Span)}
        return GatheredContexts(contexts, read_here, gather, whole)

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceParallel:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a cache that is divided between {self.ranks} processes cannot be saved: each has a part of it; keep the "
            "prompts, and prefill them again"
        )


class DividedStepTables(StepTables):
    """`StepTables` of the nodes and suffixes that this process stores; attention is merged with the others'."""

    def __init__(
        self,
        parallel: SequenceParallel,
        rows: int,
        layers: Iterable[int],
        forest: Forest,
        device: torch.device,
        own_nodes: OwnNodes = NO_OWN_NODES,
    ):
        super().__init__(rows, layers, forest, device, own_nodes)
        self._parallel = parallel
        # Lengths and new tokens as `forest_decode` reads them, and the lengths of whole suffixes.
        with torch.inference_mode(False):
            self._divided = torch.zeros(4, rows, dtype=torch.int32, device=device)
        self.lengths = self._divided[0]

    @property
    def _kernel_lengths(self) -> Tensor:
        return self._divided[:3]

    def _stored(self, suffixes: SuffixLengths) -> SuffixLengths:
        return self._parallel.stored_suffixes(suffixes)

    def _write_lengths(self, now: DescribedStep) -> None:
        shard, whole = self._parallel.suffix_shard, now.suffixes.per_row
        if whole is None:
            whole = torch.tensor([now.suffixes.longest], dtype=torch.int32, device="cpu")
        first, stop = shard.next_stored(whole)
        table = torch.stack([shard.counts(whole) - now.own_tokens, first, stop, whole])
        rows = self.rows if now.suffixes.per_row is None else len(whole)
        self._divided[:, :rows].copy_(table, non_blocking=True)  # the host need not wait: the copy is staged

    def new_tokens(self) -> NewTokens:
        stored, first, _, whole = self._divided
        return NewTokens(whole.long(), stored.long(), stored + (first == 0))

    def _over_all_keys(self, attend: Attend, query: Tensor, scoring: Scoring, into: Partial | None) -> Tensor:
        """The processes' partials, merged by one collective after all that could raise; `into` is not written."""
        self._parallel.check_window(scoring.window)
        if scoring.sinks is not None and not self._parallel.suffix_shard.counts_sinks:
            scoring = replace(scoring, sinks=None)
        buffer = partial_buffer(query.shape, query.device)
        attend(scoring, buffer.partial)
        return merge_over(self._parallel.group, buffer, query.dtype).out


class PartialBuffer(NamedTuple):
    """A partial in one piece of memory, to be sent as it is."""

    flat: Tensor  # [elements] fp32 (fp64 for fp64 partials): all of out, then all of lse
    partial: Partial  # views of it, to be written: out [..., head_dim] and lse [...]


def partial_buffer(
    shape: Sequence[int], device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> PartialBuffer:
    """An uninitialized buffer of a partial whose ``out`` has this shape.

    Every element of it must be written, also by a rank without a key: ``(0, -inf)``, see `empty_partial`.
    """
    flat = torch.empty(prod(shape) + prod(shape[:-1]), dtype=dtype, device=device)
    elements = prod(shape)
    return PartialBuffer(flat, Partial(flat[:elements].view(*shape), flat[elements:].view(*shape[:-1])))


def merged(buffers: Tensor, shape: Sequence[int]) -> Partial:
    """The partial over the keys of all ranks: ``lse = logsumexp(lse_r)``, ``out = sum(exp(lse_r - lse) out_r)``.

    The sums are in the order of ranks. An empty shard has weight 0, and all empty ones stay ``(0, -inf)``. `buffers`
    are ``[ranks, elements]`` fp32, the `PartialBuffer.flat` of each rank; `shape` is that of ``out``.
    """
    elements = prod(shape)
    out, lse = buffers[:, :elements].view(-1, *shape), buffers[:, elements:].view(-1, *shape[:-1])
    largest = lse.amax(0).clamp_min(torch.finfo(lse.dtype).min)  # -inf - (-inf) would be nan
    weights = (lse - largest).exp()
    total = weights.sum(0)
    mean = (weights[..., None] * out).sum(0) / total.clamp_min(torch.finfo(lse.dtype).tiny)[..., None]
    return Partial(mean, largest + total.log())


def merge_over(group: ProcessGroup, buffer: PartialBuffer, dtype: torch.dtype | None = None) -> Partial:
    """The partial over the keys of all ranks of a group, bitwise the same on all of them; one collective.

    The buffer is over the keys of this rank; the result's ``out`` has its dtype, or the given one.
    """
    by_rank, like = gathered(buffer.flat, group), buffer.partial
    if triton_is_installed() and _by_kernel(by_rank):
        from ..kernels.forest_decode.merge import merge_ranks

        found = Partial(torch.empty_like(like.out, dtype=dtype), torch.empty_like(like.lse))
        try:
            merge_ranks(by_rank, found.out, found.lse)
            return found
        except KernelFailedError:  # on this rank alone, whose last bits then differ; rank 0 draws the tokens
            pass
    found = merged(by_rank, like.out.shape)
    return Partial(found.out.to(dtype or like.out.dtype), found.lse)


def _by_kernel(partials: Tensor) -> bool:
    """Whether a kernel merges: alike on all ranks, which would otherwise differ in the last bits."""
    return partials.dtype == torch.float32 and (partials.is_cuda or interpreted())


_WHOLE, _OF_WHOLE_INPUT = "replicate", "rowwise_split_input"


def sequence_parallel_plan(config: PreTrainedConfig) -> dict[str, str]:
    """A plan of transformers' tensor parallelism that leaves attention heads whole.

    ::

        plan = hf_fastdecode.sequence_parallel_plan(AutoConfig.from_pretrained(name))
        distributed = DistributedConfig(tp_size=2, tp_plan=plan)
        model = AutoModelForCausalLM.from_pretrained(name, distributed_config=distributed)
        hf_fastdecode.enable(model, sequence_parallel="auto")

    Projections to queries, keys and values are computed by every process, and the projection of attention's output is
    split by its inputs. All other layers are split as by ``tp_plan="auto"``.

    Args:
        config: That of the model.

    Returns:
        Styles of all modules and parameters that the plan names, by their names with ``*`` for a layer's number.

    Raises:
        TypeError: It is no config.
        ValueError: transformers has no plan for this architecture.
    """
    if not isinstance(config, PreTrainedConfig):
        raise TypeError(
            f"sequence_parallel_plan takes a model's config, got {type(config).__name__}; give it "
            "AutoConfig.from_pretrained(name), or model.config"
        )
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES

    with torch.device("meta"):
        model = _class_of(config)
    usual: dict[str, str] = model.tp_plan or {}
    attending = (name for name, module in model.named_modules() if _attends(module))
    attention = {re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in attending}  # as plans have them
    plan = {}
    for name, style in usual.items():
        if not any(name == one or name.startswith(f"{one}.") for one in attention):
            plan[name] = style
        elif style in ("rowwise", _OF_WHOLE_INPUT):
            plan[name] = _OF_WHOLE_INPUT
        elif _WHOLE in ALL_PARALLEL_STYLES:  # else a plan replaces the model's: what it does not name is whole
            plan[name] = _WHOLE
    if not plan:
        raise ValueError(
            f"transformers has no tensor-parallel plan for {type(model).__name__}; load it in every process, and "
            "divide its context alone: enable(model, sequence_parallel='auto')"
        )
    return plan


def _class_of(config: PreTrainedConfig) -> PreTrainedModel:
    """A model of this config on the current device, of the class that its checkpoint names."""
    named: Any = getattr(transformers, (config.architectures or [""])[0], None)
    if named is not None and issubclass(named, PreTrainedModel):
        return named._from_config(config)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def _attends(module: nn.Module) -> bool:
    """Whether a module has the projections of one layer's attention."""
    return "layer_idx" in vars(module) and any(hasattr(module, name) for name in ("is_causal", "num_key_value_groups"))
