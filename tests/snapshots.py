"""What a model is made of, by identity, to be compared before and after."""

from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def snapshot(model):
    """Everything that enabling could touch, by identity."""
    return {
        "instance": {name: id(value) for name, value in vars(model).items()},
        "class": {name: id(value) for kind in type(model).__mro__ for name, value in vars(kind).items()},
        "modules": [
            (id(module), {name: id(value) for name, value in vars(module).items()}) for module in model.modules()
        ],
        "config": {name: id(value) for name, value in vars(model.config).items()},
        "generation config": {name: id(value) for name, value in vars(model.generation_config).items()},
        "attention functions": {name: id(value) for name, value in ALL_ATTENTION_FUNCTIONS.items()},
        "mask functions": {name: id(value) for name, value in ALL_MASK_ATTENTION_FUNCTIONS.items()},
        "registries": [dict(AttentionInterface._global_mapping), dict(AttentionMaskInterface._global_mapping)],
    }
