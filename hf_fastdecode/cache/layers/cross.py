"""Cross-attention: keys and values of an encoder's output, or of images, once for all samples and beams of an input.

The keys and values of an input never grow. Each layer computes those of all distinct inputs in its first pass, keeps
the tokens that the model's mask shows, end to end, and later passes read an input's tokens as a node of all its rows.

Which input a row reads follows from the node that its path begins with: prompts of different inputs share no node,
since all layers after the first cross-attention compute with the encoder's output.

Images that a decoder's own layers attend to (Mllama) are stored alike. Such layers lie between those that attend to
tokens, and hold keys and values of images in their places of one cache. A prompt's pass computes them, by
transformers' own attention, in which each token sees the images that a mask of the model says. Tokens after a prompt
see what its last token does: of that, the keys and values are stored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from itertools import accumulate
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import Cache, EncoderDecoderCache

from ...attention.forest import Begin, Forest, Span, begin_of
from ...attention.kv import CrossKV, Scoring, Segment
from ...attention.overrides import cast
from ...attention.torch_operators.decode_ops import AlikeInputs, attend_alike, nodes_attention
from ...errors import Unsupported
from ..state import PrefillItem, SharedState
from .attention import PlainLayer

ENCODER_OUTPUTS: Final = "encoder_outputs"
"""Name of the encoder's output among model arguments."""


class EncodedInputs:
    """The distinct inputs of a call, and each layer's keys and values of them.

    They are stored in groups, by passes over a prompt of each input, which come before all others. Each group is a
    segment until all are stored.

    Args:
        arguments: Model arguments with the encoder's output, one row per distinct input, and its attention mask.
        count: Number of distinct inputs.
        tokens: Tokens of the encoder's output of an input, padding included.

    Attributes:
        segments: By layer and segment, keys and values of the inputs' shown tokens: ``[kv_heads, tokens, head_dim]``
            each.
        spans: For each input that is stored, its tokens.
        query_heads: Query heads of the layers, where these attend to nothing else.
    """

    query_heads: int | None = None

    def __init__(self, arguments: Mapping[str, Any], count: int, tokens: int):
        self._arguments, self.count, self.tokens = arguments, count, tokens
        self.segments: dict[int, dict[int, Segment]] = {}
        self.spans: tuple[Span, ...] = ()
        self._group: tuple[int, int] | None = None  # the inputs whose keys and values the current pass stores
        self._groups = 0
        self._leases: tuple[object, ...] = ()
        self._shown: Tensor | None = None  # the mask that the group's spans are of
        self._places: Tensor | None = None  # of shown tokens, counted input by input; None if all are
        self._begins: dict[Begin, int] = {}
        self._latest: tuple[Forest, Forest] | None = None
        self._read: dict[int, tuple[Forest, list[AlikeInputs]]] = {}  # by layer
        self._of_pass: tuple[Sequence[PrefillItem], Forest] | None = None

    @contextmanager
    def storing_next(self, count: int) -> Iterator[None]:
        """Context of a pass over prompts of the next so many inputs, if any are left: layers store what they have."""
        if (first := len(self.spans)) == self.count:
            yield
            return
        self._group, self._shown, self._places = (first, first + count), None, None
        try:
            yield
        finally:
            self._group, self._groups = None, self._groups + 1
        if len(self.spans) == self.count:
            self._arguments = self.placeholders  # which no layer projects again
            self._join()

    def _join(self) -> None:
        """Put the groups into one segment, layer by layer, so that alike inputs are read side by side."""
        if self._groups == 1:
            return
        starts = [0]
        for layer, groups in self.segments.items():
            starts = [0, *accumulate(segment.keys.shape[1] for segment in groups.values())]
            self.segments[layer] = {0: Segment(*(torch.cat(parts, 1) for parts in zip(*groups.values(), strict=True)))}
        self.spans = tuple(Span(0, starts[span.segment] + span.start, span.length) for span in self.spans)
        self._latest, self._of_pass, self._read = None, None, {}
        self._leases = ()  # these are copies

    @property
    def arguments(self) -> dict[str, Any]:
        """Model arguments of the next pass: of the group's inputs; placeholders once all are stored."""
        if self._group is None:
            return dict(self._arguments)
        outputs, mask = self._arguments[ENCODER_OUTPUTS], self._arguments.get("attention_mask")
        own = slice(*self._group)
        part = type(outputs)(**{name: one[own] for name, one in outputs.items()})
        return (
            dict(self._arguments) | {ENCODER_OUTPUTS: part} | ({} if mask is None else {"attention_mask": mask[own]})
        )

    @property
    def hidden(self) -> Tensor:
        """The encoder's output for the next pass, ``[inputs, tokens, width]``."""
        hidden: Tensor = self.arguments[ENCODER_OUTPUTS][0]
        return hidden

    @property
    def stores_next(self) -> bool:
        """Whether the next pass stores what it computes of its inputs."""
        return self._group is not None

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers whose keys and values of the next pass's inputs are stored."""
        return () if self._group is not None else tuple(self.segments)

    @property
    def placeholders(self) -> dict[str, Any]:
        """Arguments of passes that store nothing: of one token, in memory of their own, and without a mask."""
        outputs = self._arguments[ENCODER_OUTPUTS]
        one = type(outputs)(last_hidden_state=torch.zeros_like(outputs[0][:1, :1]))
        return {**self._arguments, ENCODER_OUTPUTS: one, "attention_mask": None}

    def assign(self, begins: Sequence[Begin], inputs: Sequence[int]) -> None:
        """Set which inputs the rows read whose paths begin there."""
        self._begins.update(zip(begins, inputs, strict=True))

    def moved(self, begins: Mapping[Begin, Begin]) -> EncodedInputs:
        """A copy for paths that now begin elsewhere: `begins` maps new beginnings to old ones."""
        twin = copy(self)
        vars(twin).update({"_latest": None, "_of_pass": None, "_read": {}})
        twin._begins = {new: self._begins[old] for old, new in begins.items() if old in self._begins}
        return twin

    def store(self, layer: int, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
        """Keep a layer's keys and values of the group's inputs, ``[inputs, kv_heads, tokens, head_dim]`` each.

        The decoder sees the tokens of the mask, ``[inputs, tokens]`` bool; all of them when None. Raises Unsupported
        where an input has no shown token, or layers have different masks.
        """
        first, stop = self._group or (0, 0)
        count, _, tokens, _ = keys.shape
        if count != stop - first:
            raise Unsupported(f"a layer has keys of {count} inputs, and the pass has {stop - first}")
        if len(self.spans) == first:
            self._show(mask, count, tokens)
        elif mask is not self._shown and (
            mask is None or self._shown is None or not torch.equal(mask, self._shown.to(mask.device))
        ):
            raise Unsupported("its layers see different tokens of the encoder's output")
        parts = (part.transpose(0, 1).flatten(1, 2) for part in (keys, values))
        if self._places is not None:
            parts = (part.index_select(1, self._places.to(part.device)) for part in parts)
        self.segments.setdefault(layer, {})[self._groups] = Segment(*(part.contiguous() for part in parts))

    def store_captured(self, segments: Mapping[int, Segment], lease: object) -> None:
        """Read all layers' keys and values of the group's inputs where they are, in the buffers of a captured pass.

        They are ``[kv_heads, inputs * tokens, head_dim]`` each by layer, of inputs without hidden tokens. The pass is
        not replayed while the `lease` lives.
        """
        first, stop = self._group or (0, 0)
        self._show(None, stop - first, self.tokens)
        for layer, segment in segments.items():
            self.segments.setdefault(layer, {})[self._groups] = segment
        self._leases = (*self._leases, lease)

    def _show(self, mask: Tensor | None, count: int, tokens: int) -> None:
        lengths = [tokens] * count
        if mask is not None and mask.shape != (count, tokens):
            raise Unsupported(f"the mask over {count} encoder outputs of {tokens} tokens is {list(mask.shape)}")
        if mask is not None and not bool(mask.all()):
            lengths = mask.sum(1).tolist()
            self._places = mask.flatten().nonzero().flatten()
        if not all(lengths):
            raise Unsupported("an input's encoder output is masked whole")
        ends = torch.tensor(lengths, device="cpu").cumsum(0).tolist()
        self._shown = mask
        found = (Span(self._groups, end - length, length) for end, length in zip(ends, lengths, strict=True))
        self.spans = (*self.spans, *found)

    def forest_of(self, forest: Forest) -> Forest:
        """The forest in which each row of a forest of prompts attends to its input; the same for the same forest."""
        if self._latest is None or self._latest[0] is not forest:
            self._latest = forest, self._forest(list(map(begin_of, forest.paths)))
        return self._latest[1]

    def forest_of_pass(self, state: SharedState) -> Forest:
        """The forest of the current pass's rows: of the prompts that it prefills, or of the batch."""
        if state.current.items:
            if self._of_pass is None or self._of_pass[0] is not state.current.items:
                begins = [begin_of((*item.context, item.span)) for item in state.current.items]
                self._of_pass = state.current.items, self._forest(begins)
            return self._of_pass[1]
        assert state.forest is not None
        return self.forest_of(state.forest)

    def _forest(self, begins: Sequence[Begin]) -> Forest:
        return Forest.from_paths([(self.spans[self._begins[begin]],) for begin in begins])

    def view(self, cache: Cache, state: SharedState) -> Any:
        """The cache as decoders take it, with these inputs, for a pass that runs eagerly."""

        def attend(layer: int, query: Tensor, scoring: Scoring) -> Tensor:
            forest, backend = self.forest_of_pass(state), state.torch_backend
            if scoring.softcap is None and backend == "auto":
                outs = [attend_alike(query[one.rows], *one.stored, scoring.scale) for one in self._by(forest, layer)]
                return outs[0] if len(outs) == 1 else torch.cat(outs)
            options: dict[str, Any] = {"softcap": scoring.softcap, "backend": backend}
            part = nodes_attention(query, forest, self.segments[layer], scoring.scale, **options)
            return part.out.to(query.dtype).transpose(1, 2)

        return self.view_of(cache, self, attend)

    def view_of(self, cache: Cache, inputs: HasInputs, attend: Attend) -> Any:
        """The cache as decoders take it, with others' inputs and attention instead of these."""
        return CrossView(cache, inputs, attend)

    def see(self, arguments: Mapping[str, Any]) -> None:
        """Read, of the arguments of a pass, what says which tokens see an input; none does here."""

    def _by(self, forest: Forest, layer: int) -> list[AlikeInputs]:
        """The layer's inputs as rows read them; the same for the same forest, since all steps ask for them."""
        known = self._read.get(layer)
        if known is None or known[0] is not forest:
            segments = self.segments[layer]
            found = [AlikeInputs.of(segments[nodes[0].span.segment], nodes) for nodes in forest.batches[0]]
            self._read[layer] = known = forest, found
        return known[1]

    def example(self, layer: int) -> Segment:
        return next(iter(self.segments[layer].values()))

    def stored(self) -> dict[int, NodesAlone]:
        """By layer, the storage that kernels' tables describe."""
        return {layer: NodesAlone(segments, segments) for layer, segments in self.segments.items()}

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for of_layer in self.segments.values() for one in of_layer.values() for part in one)

    @property
    def stock_row_bytes(self) -> int:
        """Bytes of a row's keys and values in transformers' caches, in all layers, padding included."""
        parts = (part for layer in self.segments for part in self.example(layer))
        return self.tokens * sum(part.nbytes // part.shape[1] for part in parts)


class NodesAlone(NamedTuple):
    """A layer's nodes as `StepTables` reads them, without suffixes, see `StoredKV`."""

    segments: Mapping[int, Segment]
    version: object
    suffix: None = None


Attend = Callable[[int, Tensor, Scoring], Tensor]
"""Attends a layer's queries ``[rows, heads, queries, head_dim]``; returns ``[rows, queries, heads, head_dim]``."""


class HasInputs(Protocol):
    """Inputs as views ask them: the layers that hold theirs, the tokens of one, and storage for a new layer's."""

    tokens: int

    @property
    def layers(self) -> Sequence[int]: ...
    def store(self, layer: int, keys: Tensor, values: Tensor, mask: Tensor | None) -> None: ...


class CrossView(EncoderDecoderCache):
    """The cache that a decoder with cross-attention takes: a cache of its own tokens, and the inputs' layers."""

    def __init__(self, cache: Cache, inputs: HasInputs, attend: Attend):
        self.self_attention_cache = cache
        layers = [_CrossLayer(inputs, attend, index) for index in range(len(cache.layers))]
        self.cross_attention_cache = Cache(layers=layers)
        self.is_updated = dict.fromkeys(inputs.layers, True)

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse tokens of code that expects the cache of a decoder alone."""
        raise Unsupported("its attention code does not tell its own tokens from those of an encoder")


class _CrossLayer(PlainLayer):
    def __init__(self, inputs: HasInputs, attend: Attend, index: int):
        super().__init__()
        self._inputs, self._attend, self._index = inputs, attend, index
        self.keys = self.values = InputKV(inputs, attend, index)

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[CrossKV, CrossKV]:
        """Take keys and values of all inputs, ``[inputs, kv_heads, tokens, head_dim]`` each."""
        handle = InputKV(self._inputs, self._attend, self._index, Segment(cast(keys), cast(values)))
        return handle, handle

    def get_seq_length(self) -> int:
        return self._inputs.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0


class InputKV(CrossKV):
    """Replaces a layer's keys, and its values, of inputs: stored ones, or new ones that `show` stores."""

    def __init__(self, inputs: HasInputs, attend: Attend, index: int, new: Segment | None = None):
        self._inputs, self._attend, self._index, self._new = inputs, attend, index, new
        if new is not None:
            self.device = new.keys.device

    def show(self, mask: Tensor | None) -> None:
        if self._new is not None:
            self._inputs.store(self._index, *self._new, mask)

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        return self._attend(self._index, query, scoring)

    def numel(self) -> int:
        """More than none: models ask it of stored images."""
        return 1


class ImageInputs(EncodedInputs):
    """The images of each distinct prompt of a call, and the layers' keys and values of them.

    Of `count` distinct prompts, whose images are `tokens` keys in a layer, padding included; for the `layers` that
    attend to them, with as many query heads each. `mask` is the name of the model argument ``[rows, tokens, images,
    tiles]`` that says which tiles a token sees.
    """

    def __init__(self, count: int, tokens: int, layers: Collection[int], query_heads: int, mask: str):
        super().__init__({}, count, tokens)
        self.of_images, self.query_heads, self._name = frozenset(layers), query_heads, mask
        self._seen: Tensor | None = None  # by the last token of each row of the pass: [rows, tiles]
        self._keys_seen: Tensor | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        """None in the pass that stores images, which is given them; later ones see what a prompt's last token does."""
        return {} if self._group is not None else {self._name: None}

    @property
    def placeholders(self) -> dict[str, Any]:
        return {}

    def see(self, arguments: Mapping[str, Any]) -> None:
        """Read, of the arguments of a pass, which images its rows' last tokens see."""
        mask = arguments.get(self._name)
        self._seen = None if mask is None else mask[:, -1].flatten(1).bool()
        self._keys_seen = None

    def shown(self, tokens: int) -> Tensor | None:
        """The keys of a layer that are seen, ``[rows, tokens]`` bool; all of them when None."""
        if self._seen is not None and self._keys_seen is None:
            self._keys_seen = self._seen.repeat_interleave(tokens // self._seen.shape[1], 1)
        return self._keys_seen

    def view_of(self, cache: Cache, inputs: HasInputs, attend: Attend) -> ImageView:
        return ImageView(cache, self, inputs, attend)


class ImageView:
    """The cache that a decoder with such layers takes: one of tokens, and images in the layers that see them."""

    def __init__(self, cache: Cache, images: ImageInputs, inputs: HasInputs, attend: Attend):
        self._cache, self._images, self._tokens = cache, images, inputs.tokens
        self._in_capture = inputs is not images
        self.layers = [_ImageLayer(inputs, attend, index) for index in range(len(cache.layers))]

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Store images, and attend to them as they are; or append tokens."""
        if layer_idx not in self._images.of_images:
            return self._cache.update(keys, values, layer_idx, *args, **kwargs)
        self._images.store(layer_idx, keys, values, self._images.shown(keys.shape[2]))
        return keys, values

    def get_seq_length(self, layer_idx: int | None = None) -> Any:
        """Tokens before the pass, or those of a layer's images."""
        if layer_idx in self._images.of_images:
            return self._tokens
        # 5.17 asks thus whether images are stored, as they are before a step that is captured.
        return self._cache.get_seq_length() or int(self._in_capture)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


class _ImageLayer:
    """Tells the model that a layer has images, and gives it handles instead of keys and values."""

    is_initialized = True

    def __init__(self, inputs: HasInputs, attend: Attend, index: int):
        self.keys = self.values = InputKV(inputs, attend, index)
