"""Private names of torch (2.11 to 2.15) and transformers (5.17 to 5.24) that this package uses, and newer Python.

Each entry says what would replace it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Final, TypeVar

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.dropout import _DropoutNd
from transformers import GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerationMixin
from transformers.models.codegen import modeling_codegen
from transformers.utils.deprecation import deprecate_kwarg

Value = TypeVar("Value")

TRANSFORMERS: Final = transformers.__version__
"""Version of the installed transformers."""

NEWEST_TESTED: Final = (5, 24)
"""Newest minor release of transformers that the tests ran on; CONTRIBUTING says how one is taken up."""


def untested_transformers() -> str | None:
    """The installed transformers' version, if it is newer than those that the tests ran on."""
    return TRANSFORMERS if Version(TRANSFORMERS).release[:2] > NEWEST_TESTED else None


CACHE: Final = "cache" if "cache" in GenerateDecoderOnlyOutput.__dataclass_fields__ else "past_key_values"
"""Name of the cache among the arguments of `forward` and `generate`, and in their outputs.

transformers 5.24 renamed ``past_key_values`` to ``cache``, and takes the old name until 5.40. Inline it when 5.24 is
the oldest supported.
"""

CACHE_LENGTH: Final = f"{CACHE}_length"
"""Name of the cache's length among the arguments of modules that embed positions; renamed with `CACHE`."""

# Names under which a pass may be given its cache; where both are, the first one counts.
_CACHE_NAMES: Final = ("cache", "past_key_values") if CACHE == "cache" else ("past_key_values",)


def cache_in(arguments: Mapping[str, Any]) -> Any:
    """The cache among the named arguments of a forward pass, as the installed transformers finds it, or None."""
    for name in _CACHE_NAMES:  # a generator would take most of the time, in each pass of an enabled model
        if name in arguments:
            return arguments[name]
    return None


def ignored_cache(arguments: Mapping[str, Any]) -> Any:
    """The argument by the cache's name in other releases, which this one's `forward` ignores; None without."""
    return None if "cache" in _CACHE_NAMES else arguments.get("cache")


def with_cache(arguments: Mapping[str, Any], cache: Any) -> dict[str, Any]:
    """Named arguments of a forward pass with this cache instead of theirs."""
    others = {name: value for name, value in arguments.items() if name not in _CACHE_NAMES}
    return others | {CACHE: cache}


def takes_old_name(method: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a method with an argument ``cache``, which the code of earlier releases passes by its old name."""
    if CACHE == "cache":
        return method

    @wraps(method)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        if CACHE in kwargs:
            kwargs["cache"] = kwargs.pop(CACHE)
        return method(*args, **kwargs)

    return renamed


def takes_cache(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a `forward` with an argument ``cache``: it takes both names, and warns, as in transformers."""
    if CACHE == "cache":
        warning: Callable[..., Any] = deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")(forward)
        return warning
    renamed = takes_old_name(forward)
    signature = inspect.signature(forward)  # which `generate` compares its arguments with
    parameters = [
        one.replace(name=CACHE if one.name == "cache" else one.name) for one in signature.parameters.values()
    ]
    renamed.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return renamed


ATTENDS_ACROSS_IMAGES: Final = frozenset({"minimax_m3_vl"} if CACHE == "past_key_values" else ())
"""Model types whose encoder attends to the images of all rows; remove it when transformers 5.24 is the oldest."""

CODEGEN_MAKES_TABLES_ONCE: Final = hasattr(modeling_codegen, "CodeGenRotaryEmbedding")
"""Whether CodeGen's decoder makes cos and sin for all its layers, as from transformers 5.24; before, each layer does.

Inline it when 5.24 is the oldest supported.
"""

AnyDropout = _DropoutNd
"""Base class of all dropout modules; replace it if torch names a public one."""

COMPILED_CALL: Final = "_compiled_call_impl"
"""Attribute in which `nn.Module.compile` stores the compiled call. It is not pickled or copied.

Replace it when a module can be compiled for one thread or one context.
"""


@contextmanager
def setting(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Context in which a variable has a value; ``with variable.set(value)`` where Python is 3.14 or newer."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def uncompiled_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module with its hooks, bypassing `nn.Module.compile`; replace it if torch has a switch for that."""
    return module._call_impl(*args, **kwargs)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether `nn.Module.compile` was called; replace it if torch has a public query."""
    return getattr(module, COMPILED_CALL) is not None


def global_forward_hooks() -> Iterator[Callable[..., Any]]:
    """Hooks of all modules; replace it if torch lists what ``register_module_forward_hook`` registered."""
    yield from torch_module._global_forward_hooks.values()
    yield from torch_module._global_forward_pre_hooks.values()


def global_backward_hooks() -> Iterator[Callable[..., Any]]:
    """The same of gradients; replace it if torch lists what ``register_module_full_backward_hook`` registered."""
    yield from torch_module._global_backward_hooks.values()
    yield from torch_module._global_backward_pre_hooks.values()


def tensor_version(tensor: Tensor) -> int:
    """Counter of in-place writes, -1 for inference tensors; replace it if torch makes `_version` public."""
    return -1 if tensor.is_inference() else tensor._version


def local_part(tensor: Tensor) -> Tensor:
    """The local part of a DTensor, any other tensor as it is; ``to_local`` would make a view each time.

    Replace it if torch makes `DTensor._local_tensor` public.
    """
    return getattr(tensor, "_local_tensor", tensor)


_PLAIN: Final = frozenset({Tensor, nn.Parameter})


def stored_parts(tensor: Tensor) -> list[Tensor]:
    """The tensors with memory in which this process stores a tensor: itself, a DTensor's local part, or what quantized
    weights are made of: tensors of a wrapper (torchao, quanto), packed numbers with their scales (bitsandbytes).

    A wrapper's own address is 0, and its version is not that of its parts.
    """
    if type(tensor) in _PLAIN:
        return [tensor]
    if hasattr(tensor, "__tensor_flatten__"):  # PyTorch's protocol of wrappers
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [one for part in parts if isinstance(part, Tensor) for one in stored_parts(part)]
    state = getattr(tensor, "quant_state", None)  # of bitsandbytes, whose scales may be quantized too
    scales = [getattr(one, "absmax", None) for one in (state, getattr(state, "state2", None))]
    return [tensor, *(one for one in scales if isinstance(one, Tensor))]


def without_subclasses() -> AbstractContextManager[Any]:
    """Context in which operators on subclasses of tensors return plain ones, for torch to make public."""
    context: AbstractContextManager[Any] = torch._C.DisableTorchFunctionSubclass()
    return context


STORED: Final = "hf_fastdecode_stored"
"""Attribute of a parameter that was gathered for a call: the one that is trained, of which this process has a part."""


def stored_of(parameter: Tensor) -> Tensor:
    """The parameter that a library trains (FSDP), where one was gathered from it for a call; any other itself.

    Its identity and version tell whether weights have changed since an earlier call.
    """
    found: Tensor = getattr(parameter, STORED, parameter)
    return found


def doge_is_causal(modelling: Any) -> bool:
    """Whether Doge adds its gates to a causal mask also in prompts without padding; goes with transformers 5.17.

    `modelling` is transformers' file of Doge, in which the later releases also make masks for `generate`.
    """
    return "create_masks_for_generate" in vars(modelling.DogeForCausalLM)


def is_fsdp2(modules: Iterable[nn.Module]) -> bool:
    """Whether FSDP 2 divides parameters of these modules, which it gathers for passes."""
    if "torch.distributed.fsdp" not in sys.modules:
        return False
    from torch.distributed.fsdp import FSDPModule

    return any(issubclass(kind, FSDPModule) for kind in set(map(type, modules)))


def fsdp2_state(module: Any) -> Any:
    """The state of an `FSDPModule`, which has its parameters and settings; for torch to make public."""
    return module._get_fsdp_state()


def fsdp2_groups(state: Any) -> list[Any]:
    """The groups of parameters that FSDP 2 gathers together for the modules of one state."""
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.12 and earlier have one
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def fsdp2_states_of_root(state: Any) -> list[Any]:
    """All states under a state's root, once that has run or been prepared; before that, it alone."""
    return list(state._state_ctx.all_states) or [state]


def fsdp2_stays_gathered(group: Any) -> bool:
    """Whether a group has all of its parameters, and keeps them in passes.

    The root's parameters stay gathered after its first pass by default (`_auto_reshard_after_forward`).
    """
    return bool(group.is_unsharded and not group._reshard_after_forward)


def zero_init_of(parameter: Any) -> Any:
    """What has divided a parameter of ZeRO-3, with its settings, in a closure; for DeepSpeed to make public."""
    return inspect.getclosurevars(parameter.all_gather).nonlocals["self"]


LINEAR: Final[Callable[..., Tensor]] = torch._C._nn.linear
"""`F.linear`, also where a library replaces that name (DeepSpeed's ZeRO-3)."""


CACHES_CASTS: Final = "_cache_enabled"
"""Attribute of `torch.autocast`: whether it keeps casts of weights. Replace it if torch names a public one."""


SET_BY_ZERO: Final = frozenset(
    "_external_params _original_parameters all_parameters applied_pre_backward_ref_cnt ds_external_parameters "
    "ds_grads_remaining ds_id ds_inflight_param_registry ds_model_granularity ds_recompute_parameters post_bwd_fn "
    "pre_bwd_fn".split()
)
"""Attributes that ZeRO-3 sets on modules (DeepSpeed 0.19), some of them in each training step; no model reads them."""


def all_gather_vectors(whole: Tensor, part: Tensor, group: Any) -> None:
    """Write the parts of all processes of a group, in order, to a vector; inline it when torch 2.13 is the oldest."""
    gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
    gather(whole, part, group=group)


def free_cublas_workspaces() -> None:
    """Free cuBLAS's workspaces of all streams; remove it when ``torch.cuda.empty_cache`` does."""
    torch._C._cuda_clearCublasWorkspaces()


LOOP_METHODS: Final = ("_sample", "_prefill", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
"""Methods of `GenerationMixin` that its loop calls and ours does not; replace it with a documented list of seams."""


def prefill_of_transformers(
    model: PreTrainedModel, ids: Tensor, config: GenerationConfig, arguments: dict[str, Any]
) -> Any:
    """The output of the first pass of transformers' loops, in chunks if the config asks for them.

    Replace it if transformers makes the method public.
    """
    return model._prefill(ids, config, arguments)


ENCODE: Final = (
    "_maybe_prepare_encoder_kwargs_for_generation"
    if hasattr(GenerationMixin, "_maybe_prepare_encoder_kwargs_for_generation")
    else "_prepare_encoder_decoder_kwargs_for_generation"
)
"""Method of `GenerationMixin` by which `generate` runs a model's encoder, once for the rows that it was given.

Inline the first name when the oldest supported transformers has it.
"""

ATTENTION_FIELD: Final = "_attn_implementation_internal"
"""Attribute of a config that names its attention functions.

The public ``set_attn_implementation`` validates the name and changes sub-configs too; replace this if it can be a
context for one config.
"""


EXPERTS_FIELD: Final = "_experts_implementation_internal"
"""Attribute of a config that names the implementation of its experts.

transformers changes it to ``batched_mm`` and back for its decode steps, see `optimized_for_decode`.
"""


def optimized_for_decode(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Context of transformers' decode steps, e.g. for kernels of experts; replace it if that becomes public."""
    return model._optimize_model_for_decode()


def keeps_logits(model: PreTrainedModel) -> bool:
    """Whether `forward` takes ``logits_to_keep``; replace it if transformers makes the query public."""
    return model._supports_logits_to_keep()


def torch_function(function: Any) -> Any:
    """transformers' function in PyTorch, where a model's function is a package's in its place, for GPUs only.

    Other functions are returned as they are. Replace it if transformers lists the functions that it replaces so.
    """
    names: dict[str, Any] = getattr(function, "__globals__", {})
    return inspect.unwrap(function) if names.get("__name__") == _REPLACES_FUNCTIONS else function


def is_of_package(function: Any) -> bool:
    """Whether a package's function runs in the place of transformers' in PyTorch."""
    own = torch_function(function)
    return own is not function and inspect.getclosurevars(function).nonlocals.get("implementation") is not own


_REPLACES_FUNCTIONS: Final = "transformers.integrations.hub_kernels"
"""Its ``use_kernel_func_from_hub_with_fallback`` takes functions of packages such as flash-linear-attention."""


def pad_token(config: GenerationConfig) -> Tensor | None:
    """Pad token of a `generate` call, by default its end token; replace it if it is passed to ``custom_generate``."""
    token: Tensor | None = config._pad_token_tensor
    return token


def loading_names(model: PreTrainedModel) -> list[WeightRenaming]:
    """How names in checkpoints change when this model is loaded; replace it if transformers makes that public."""
    return [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightRenaming)]


def loaded_name(renamings: Iterable[WeightRenaming], stored: str) -> str:
    """The name in the model of a checkpoint's tensor, up to the prefix of a base model."""
    for renaming in renamings:
        stored, _ = renaming.rename_source_key(stored)
    return stored


def all_tokens_without_cache(prepare: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Wrap Phi-3's `prepare_inputs_for_generation`: when it drops the cache, the step gets all tokens.

    Before transformers 5.20 the step gets the last token only; remove this when 5.20 is the oldest supported.
    """
    if CACHE == "cache":
        return prepare

    @wraps(prepare)
    def prepare_inputs(model: Any, input_ids: Tensor, past_key_values: Any = None, **kwargs: Any) -> dict[str, Any]:
        inputs = prepare(model, input_ids, past_key_values=past_key_values, **kwargs)
        if past_key_values is None or inputs.get("past_key_values") is not None:
            return inputs
        return prepare(model, input_ids, **{**kwargs, "next_sequence_length": None})

    return prepare_inputs
