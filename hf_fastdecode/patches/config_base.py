"""Cache layout of each layer of a slim model, its config, and the modelling file that is saved beside a config.

Importing this module imports no registry of transformers, whose import ends in that of the configs (`registration`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Final, Literal, get_args

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

_TITLE = '"""Classes of a slim attention checkpoint, for trust_remote_code=True; they are those of hf_fastdecode."""'


PLANS: Final = ("k", "k+r", "kv")
"""A layer caches keys; keys and r V-coordinates; keys and values."""

Rope = Literal["raw", "unrotate"]
"""Keys are cached before RoPE; after RoPE, with their positions."""

ROPES: Final[tuple[Rope, ...]] = get_args(Rope)

CACHE_DTYPES: Final = ("float16", "bfloat16", "int8", "float8_e4m3fn")
"""Dtypes that a layer's cache may have, whatever the model's dtype is."""

SELF_PLANS: Final = (*PLANS, "x")
"""Plans of self-attention without RoPE and QK-norm; ``x`` caches the layer's inputs."""

CROSS_PLANS: Final = (*PLANS, "e")
"""Plans of cross-attention; ``e`` caches nothing, as generation keeps the encoder's output once for all layers."""

ALL_PLANS: Final = (*PLANS, "x", "e")


@dataclass(frozen=True)
class SlimLayer:
    """Cache layout of one layer.

    Attributes:
        plan: One of `ALL_PLANS`; `read_layers` checks which of them a layer may have.
        rank: V-coordinates beside the keys for ``k+r``, else 0.
        float16: Whether keys and V-coordinates fit into fp16 with headroom, as measured in conversion: a model in bf16
            then caches them in fp16, which has three more bits in the same bytes.
        cache_dtype: One of `CACHE_DTYPES`, for keys and V-coordinates, or for inputs; None to follow the model's
            dtype, and for keys `float16`.
    """

    plan: str
    rank: int = 0
    float16: bool = True
    cache_dtype: str | None = None

    def __post_init__(self) -> None:
        check_plan(self.plan, ALL_PLANS)
        if type(self.rank) is not int or (self.rank < 1 if self.plan == "k+r" else self.rank != 0):
            bound = "an integer of at least 1" if self.plan == "k+r" else "0"
            raise ValueError(f"the rank of plan {self.plan!r} must be {bound}, got {self.rank!r}")
        known = () if self.plan in ("kv", "e") else CACHE_DTYPES
        if self.cache_dtype not in (None, *known):
            bound = f"None or one of {', '.join(known)}" if known else "None, the model's dtype"
            raise ValueError(f"the cache_dtype of plan {self.plan!r} must be {bound}, got {self.cache_dtype!r}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the config; without a cache dtype, only fields that earlier versions read."""
        plain = {"plan": self.plan, "rank": self.rank, "float16": self.float16}
        return plain if self.cache_dtype is None else plain | {"cache_dtype": self.cache_dtype}


def check_plan(plan: object, allowed: Sequence[str]) -> None:
    if plan not in allowed:
        raise ValueError(f"a slim layer's plan must be one of {', '.join(allowed)}, got {plan!r}")


def check_threshold(threshold: object) -> None:
    if not isinstance(threshold, int | float) or not 0 <= threshold < 1:
        raise ValueError(
            f"a sparsity threshold is a bound on attention weights, at least 0 (off) and below 1, got {threshold!r}"
        )


def read_layers(
    plain: Sequence[Mapping[str, Any]] | None, layers: int, plans: Sequence[Sequence[str]] = (PLANS,)
) -> list[SlimLayer]:
    """The cache layout of each of `layers` layers, from a config's `slim_layers`; None is keys and values everywhere.

    Layer i may have ``plans[i % len(plans)]``. A ValueError for fewer or more plans than layers, an unknown field or
    an invalid value.
    """
    if plain is None:
        return [SlimLayer("kv")] * layers
    if len(plain) != layers:
        raise ValueError(f"slim_layers must have a plan for each of {layers} layers, got {len(plain)}")
    known = set(SlimLayer.__dataclass_fields__)
    for index, entry in enumerate(plain):
        if "plan" not in entry or (other := sorted(set(entry) - known)):
            wrong = f"the unknown field {other[0]!r}" if "plan" in entry else "no field 'plan'"
            raise ValueError(f"an entry of slim_layers has {wrong}; it takes {', '.join(sorted(known))}")
        check_plan(entry["plan"], plans[index % len(plans)])
    return [SlimLayer(**entry) for entry in plain]


class SlimConfig(PreTrainedConfig):
    """Base class of slim models' configs; it precedes the ordinary config among base classes.

    Tensor parallelism splits no attention: the matrices from keys to values mix all heads, so every rank needs all.

    Attributes:
        slim_layers: A dictionary of `SlimLayer`'s fields per layer; None for keys and values everywhere.
        slim_rope: ``raw``: keys are cached before RoPE, and rotated when they are read. ``unrotate``: they are cached
            after RoPE, beside their positions, and un-rotated for the values. May be changed on a loaded model.
        slim_sparsity_threshold: Attention weights of slim layers below it count as 0, and the others are not
            renormalised; 0 turns this off. May be changed on a loaded model.
        slim_matrix_dtype: ``float16`` or ``float32``, for the matrices that give the values; casting the model does
            not change it.
        plans: Plans that layers of the architecture can have.
        rotary: Whether RoPE stands between projections and scores.
    """

    plans: ClassVar[tuple[str, ...]] = PLANS
    rotary: ClassVar[bool] = True
    slim_layers: list[dict[str, Any]] | None = None
    slim_rope: str = "raw"
    slim_sparsity_threshold: float = 0.0
    slim_matrix_dtype: str = "float16"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.base_model_tp_plan is not None:
            plan = cls.base_model_tp_plan
            cls.base_model_tp_plan = {name: split for name, split in plan.items() if ".mlp." in name}

    def __post_init__(self, **kwargs: Any) -> None:
        """Check, and import the model classes, which the Auto classes ask for next.

        Raises ValueError for fields out of bounds, unknown plans, plans without values for a model that is not
        multi-head, or as `unrotates`.
        """
        super().__post_init__(**kwargs)
        _ = self.unrotates
        check_threshold(self.slim_sparsity_threshold)
        if self.slim_matrix_dtype not in ("float16", "float32"):
            raise ValueError(f"slim_matrix_dtype must be float16 or float32, got {self.slim_matrix_dtype!r}")
        slim = any(layer.plan != "kv" for layer in self.layer_plans)
        kv_heads = getattr(self, "num_key_value_heads", self.num_attention_heads)
        if slim and kv_heads != self.num_attention_heads:
            raise ValueError(
                "a cache of keys alone needs num_key_value_heads == num_attention_heads, got "
                f"{kv_heads} != {self.num_attention_heads}; plan 'kv' for every layer"
            )
        import_module(f".architectures.{self.model_type}", __package__)  # which registers its model classes

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """Save as transformers does, with a modelling file beside the config, see `write_modeling_file`."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        self.auto_map = write_modeling_file(self, folder)
        super().save_pretrained(save_directory, push_to_hub, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Do nothing: the copy of this file that transformers would save does not work outside its package."""

    @property
    def unrotates(self) -> bool:
        """Whether keys are cached after RoPE, beside their positions, and un-rotated when they are read.

        Raises ValueError for another `slim_rope` than ``raw`` and ``unrotate``, or RoPE without fixed frequencies.
        """
        rope = self.slim_rope  # read once: attributes of configs are slow, and all layers ask in each step
        if rope == "raw":
            return False
        if rope not in ROPES:
            raise ValueError(f"slim_rope must be one of {', '.join(ROPES)}, got {rope!r}")
        if not self.rotary:
            raise ValueError(
                f"slim_rope {self.slim_rope!r} needs RoPE, and {self.model_type} has none; set it to 'raw'"
            )
        if (kind := (getattr(self, "rope_parameters", None) or {}).get("rope_type")) == "longrope":
            raise ValueError(
                f"slim_rope {self.slim_rope!r} needs fixed frequencies, and those of RoPE of type {kind!r} change "
                "with the length of the text; set it to 'raw'"
            )
        return True

    @property
    def layers_that_attend_by_themselves(self) -> list[int]:
        """Layers whose attention code and cache are this package's, see `ModelLayout`."""
        return [index for index, layer in enumerate(self.layer_plans) if layer.plan != "kv"]

    @property
    def layer_plans(self) -> list[SlimLayer]:
        return read_layers(self.slim_layers, self.num_hidden_layers, (self.plans,))


def write_modeling_file(config: SlimConfig, folder: Path) -> dict[str, str]:
    """Write ``modeling_slim.py``, which imports the classes from where they are, and return the config's ``auto_map``.

    With ``trust_remote_code=True`` slim checkpoints then load without ``import hf_fastdecode``; where the package is
    not installed, transformers says so before it runs the file. After the import the registered classes serve, and
    the file is not read. Checkpoints on disk and on the Hub keep these module paths, which must stay importable.
    """
    from transformers.models.auto import modeling_auto as auto  # which reads from the registry of configs

    models = {
        "AutoModel": auto.MODEL_MAPPING,
        "AutoModelForCausalLM": auto.MODEL_FOR_CAUSAL_LM_MAPPING,
        "AutoModelForSeq2SeqLM": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        "AutoModelForSpeechSeq2Seq": auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    }
    kind = type(config)
    classes = {"AutoConfig": kind} | {name: known[kind] for name, known in models.items() if kind in known}
    imports = sorted({f"from {one.__module__} import {one.__name__}" for one in classes.values()})
    (folder / "modeling_slim.py").write_text("\n".join([_TITLE, "", *imports, ""]), encoding="utf-8")
    return {name: f"modeling_slim.{one.__name__}" for name, one in classes.items()}


def slim_config(
    model_type: str, module: str, *, base: type[SlimConfig] = SlimConfig, **fields: Any
) -> type[SlimConfig]:
    """Make and register the config class of a family: the ordinary one, with the cache layout of each layer.

    Checkpoints find the class in `module`; `base` precedes the ordinary config of `model_type` among base classes.
    """
    from transformers.models.auto.configuration_auto import AutoConfig  # whose import ends in that of this class

    found = vars(import_module(f"transformers.models.{model_type}.configuration_{model_type}")).values()
    ordinary = next(one for one in found if isinstance(one, type) and vars(one).get("model_type") == model_type)
    doc = f"A config of {model_type} with the cache layout of each layer."
    attributes = {"__doc__": doc, "__module__": module, "model_type": f"slim_{model_type}", **fields}
    made: type[SlimConfig] = strict(type(f"Slim{ordinary.__name__}", (base, ordinary), attributes))
    AutoConfig.register(made.model_type, made, exist_ok=True)  # this package may be imported afresh
    return made


def families_in(module: ModuleType) -> tuple[str, ...]:
    """Model types of the ordinary architectures whose slim configs a module makes, in its order."""
    made = (one for one in vars(module).values() if isinstance(one, type) and issubclass(one, SlimConfig))
    configs = (one for one in made if "model_type" in vars(one) and one.__module__ == module.__name__)
    return tuple(one.model_type.removeprefix("slim_") for one in configs)
