"""Slim attention (Graef): caches of keys, keys with V-coordinates, or inputs, in the place of keys and values.

The mathematics of converting a checkpoint's attention layers, with PyTorch alone and in fp64.
"""

from __future__ import annotations

from .biases import fold_into_output_bias, score_offset, value_constant
from .cache_errors import CacheError, CacheErrors, PlanName
from .cross_attention import CrossCache, cross_cache_width, hybrid_layers
from .feedback_rounding import RoundingFeedback, round_with_feedback, rounding_feedback
from .inputs_cache import absorbed_queries, inputs_cache_output
from .key_to_value import KeyToValue, SingularKeysError, solve_key_to_value
from .layer_plan import RANK_SHARES, LayerPlan, fit_layer
from .reference_attention import attention_output
from .rope import RopeLayout, Rotation
from .stored_coordinates import KeyStatistics, StoredValueCoordinates, key_statistics, store_value_coordinates
from .stored_matrix import ScaledColumns, round_columns, round_columns_for
from .value_coordinates import ValueCoordinates, noisiest_directions, value_coordinates
from .weights import AttentionWeights, require_linear_scores, require_multi_head

__all__ = [
    "RANK_SHARES",
    "AttentionWeights",
    "CacheError",
    "CacheErrors",
    "CrossCache",
    "KeyStatistics",
    "KeyToValue",
    "LayerPlan",
    "PlanName",
    "RopeLayout",
    "Rotation",
    "RoundingFeedback",
    "ScaledColumns",
    "SingularKeysError",
    "StoredValueCoordinates",
    "ValueCoordinates",
    "absorbed_queries",
    "attention_output",
    "cross_cache_width",
    "fit_layer",
    "fold_into_output_bias",
    "hybrid_layers",
    "inputs_cache_output",
    "key_statistics",
    "noisiest_directions",
    "require_linear_scores",
    "require_multi_head",
    "round_columns",
    "round_columns_for",
    "round_with_feedback",
    "rounding_feedback",
    "score_offset",
    "solve_key_to_value",
    "store_value_coordinates",
    "value_constant",
    "value_coordinates",
]
