"""Images, videos or audio of a call, with the arguments that say where in a prompt they belong.

`generate` encodes these arguments, in some transformers releases, and repeats them for every sample and beam, both
before it asks for a cache. They are held back before that, so that prefill by rows encodes those of distinct inputs
alone. A call that turns out to run stock gets what it would have had (`GivenInputs.expanded`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any, Final, TypeGuard

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import GenerationMode
from transformers.utils import ModelOutput

from ..._compat import ATTENDS_ACROSS_IMAGES, CACHE
from ...attention.overrides import own_code_of
from ...errors import Unsupported
from ...instance_methods import Change
from ..foreign_code import is_of_transformers
from ..forward_pass import counts_padding, places_tokens
from ..structure import Structure

PLAIN: Final = frozenset(
    {
        *("attention_mask", "inputs_embeds", "input_ids", "position_ids", CACHE, "use_cache", "logits_to_keep"),
        *("expand_size", "is_encoder_decoder"),  # of the method that repeats them for samples and beams
    }
)
"""Model arguments of `generate` that are no inputs in this sense."""

_TOKEN_TYPES = ("mm_token_type_ids", "moe_mm_token_type_ids")
"""Arguments that say which tokens stand for images, which no token that follows a prompt does."""

_PLACES: Final = "get_rope_index"

_TYPES: Final = "mm_token_type_ids"
"""Argument of those methods by this name that keep nothing of what they compute (GLM-Image's does)."""


def holds_inputs(prompts: object, model: PreTrainedModel) -> TypeGuard[Mapping[str, Any]]:
    """Whether prompts come with pixels, or features of sounds, in an argument that the model takes."""
    if not isinstance(prompts, Mapping) or "input_ids" not in prompts:
        return False
    names = (signature(type(model).forward).parameters.keys() & prompts.keys()) - PLAIN
    return any(isinstance(prompts[name], Tensor) and prompts[name].is_floating_point() for name in names)


def placing_on_host(model: PreTrainedModel) -> list[Change]:
    """The method that gives tokens of images their positions, on the CPU, if the model has one in transformers' code.

    It depends on ids, masks and sizes alone, and waits for the GPU several times for each row and image.
    """
    owner = model.base_model
    method: Any = getattr(type(owner), _PLACES, None)
    if method is None or not is_of_transformers(method) or _TYPES not in (taken := signature(method).parameters):
        return []

    def places(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        given = [one.cpu() if isinstance(one, Tensor) else one for one in args]
        named = {name: one.cpu() if isinstance(one, Tensor) and name in taken else one for name, one in kwargs.items()}
        ids: Tensor = args[0] if args else kwargs["input_ids"]
        return tuple(one.to(ids.device, non_blocking=True) for one in method(owner, *given, **named))

    return [Change(owner, _PLACES, places)]


def image_mask_of(model: PreTrainedModel) -> str | None:
    """The argument that says which images a token sees, if layers of the model's own attend to images."""
    own = own_code_of(type(model))
    return None if own is None else own.image_mask


class GivenInputs:
    """The images, videos or audio of one call, by name as `generate` was given them (`arguments`).

    Attributes:
        ids: ``[given rows, width]``: the prompts that they belong to; None until `expand`.
        copies: Rows of the call for each given one.
    """

    def __init__(self, arguments: Mapping[str, Any], encode: Callable[[], dict[str, Any]] | None = None):
        self.arguments, self.copies = dict(arguments), 1
        self.ids: Tensor | None = None
        self._encode = encode
        self._expand: Callable[..., tuple[Any, dict[str, Any]]] | None = None

    @classmethod
    def among(
        cls, arguments: Mapping[str, Any], encode: Callable[[], dict[str, Any]] | None = None
    ) -> GivenInputs | None:
        """The inputs among the model arguments of a call; None if there are none, or prompts are embeddings.

        Where transformers encodes them before it expands them, `encode` returns them encoded.
        """
        if arguments.get("inputs_embeds") is not None:
            return None
        found = _inputs_among(arguments)
        return cls(found, encode) if found else None

    @property
    def name(self) -> str:
        return next(iter(self.arguments))

    @property
    def says_nothing(self) -> bool:
        """Whether this is text alone, as the numbers of its tokens say."""
        return set(self.arguments) == {"mm_token_type_ids"} and not bool(self.arguments["mm_token_type_ids"].any())

    @property
    def copies_of_features(self) -> int:
        """How often transformers encodes each: once if it does before it repeats them for samples and beams."""
        return self.copies if self._encode is None else 1

    def expand(self, expand: Callable[..., tuple[Any, dict[str, Any]]], ids: Tensor, copies: int) -> None:
        """Remember how transformers expands arguments of these prompts for so many samples or beams."""
        self._expand, self.ids, self.copies = expand, ids, copies

    def shown_to(self, function: Callable[[], Any], arguments: dict[str, Any]) -> Any:
        """The result of a function that counts the images among these model arguments.

        Mllama's static cache has room for as many.
        """
        shown = {name: value for name, value in self.arguments.items() if name not in arguments}
        arguments.update(shown)
        try:
            return function()
        finally:
            for name in shown:
                del arguments[name]

    def expanded(self) -> dict[str, Any]:
        """The arguments as stock passes them on: encoded where it does, a row for each sample or beam."""
        return self._of_all_rows(self.arguments if self._encode is None else _inputs_among(self._encode()))

    def names_in_passes(self, model: PreTrainedModel) -> set[str]:
        """Names of those that transformers' loops update after each pass and hand to the next one."""
        mask = image_mask_of(model)
        return {mask} if mask in self.arguments else set()

    def of_each_pass(self, model: PreTrainedModel) -> dict[str, Any]:
        """The arguments of `names_in_passes`, as stock passes them on."""
        found = {name: self.arguments[name] for name in self.names_in_passes(model)}
        return self._of_all_rows(found) if found else {}

    def _of_all_rows(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        if self._expand is None:
            return dict(arguments)
        return self._expand(expand_size=self.copies, input_ids=self.ids, **arguments)[1]

    def check(self, model: PreTrainedModel, structure: Structure, mode: GenerationMode) -> None:
        """Raise `Unsupported` if a call of this model in this mode cannot share context, because of these inputs."""
        name = next(iter(self.arguments))
        if mode is GenerationMode.ASSISTED_GENERATION:
            raise Unsupported(f"assisted decoding with the argument {name!r} is not accelerated yet")
        if model.config.model_type in ATTENDS_ACROSS_IMAGES:
            raise Unsupported("its encoder attends to the images of all rows, on which the tokens of each row depend")
        own = own_code_of(type(model))
        if structure.layout.own or (own is not None and own.computes_layers and own.image_mask is None):
            raise Unsupported(f"the argument {name!r} is not accelerated with attention code of its own yet")
        if counts_padding(model) or places_tokens(model):
            raise Unsupported(
                f"the argument {name!r} is not accelerated where positions are not those of tokens alone"
            )
        if not structure.alone:
            raise Unsupported(f"the argument {name!r} is not accelerated where several processes compute a model yet")
        self._check_steps(model)

    def _check_steps(self, model: PreTrainedModel) -> None:
        """Raise `Unsupported` for an argument that steps may depend on: one that belongs to tokens, or of features,
        and that the model's own loop passes on to steps of one token."""
        assert self.ids is not None
        prepared = model.prepare_inputs_for_generation(
            self.ids[:, -1:], use_cache=True, is_first_iteration=False, **self.arguments
        )
        forwarded = {name: value for name in self.arguments if (value := prepared.get(name)) is not None}
        rows, width = self.ids.shape
        # Each token after a prompt sees the images that its last one does.
        known: tuple[str | None, ...] = (*_TOKEN_TYPES, image_mask_of(model))
        if len(forwarded) < len(self.arguments) and type(model).__module__.startswith("transformers."):
            known = (*known, "token_type_ids")  # of tokens that see each other; all of them are before a step's
        for name, value in forwarded.items():
            if name in known:
                continue
            of_tokens = isinstance(value, Tensor) and value.dim() > 1 and tuple(value.shape[:2]) == (rows, width)
            of_features = not isinstance(value, Tensor) or (value.is_floating_point() and value.dim() > 1)
            if of_tokens or of_features or name == "token_type_ids":
                raise Unsupported(f"every step takes the argument {name!r}, which is not accelerated yet")


def _inputs_among(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in PLAIN and _holds_tensors(value)}


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping | ModelOutput):
        return any(_holds_tensors(part) for part in value.values())
    if isinstance(value, list | tuple):
        return any(isinstance(part, torch.Tensor) for part in value)
    return isinstance(value, torch.Tensor)
