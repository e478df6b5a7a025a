"""Configs of slim encoder-decoder models: a line for each family, as in `slim_configs`."""

from __future__ import annotations

from typing import Any

from .config_base import CROSS_PLANS, SELF_PLANS, SlimConfig, SlimLayer, read_layers, slim_config


class SlimEncoderDecoderConfig(SlimConfig):
    """Base class of the configs; `slim_layers` has two entries per decoder layer: self-attention, cross-attention."""

    rotary = False
    is_encoder_decoder: bool = True  # PreTrainedConfig's False would hide that of the ordinary config

    def __post_init__(self, **kwargs: Any) -> None:
        """Check, also that cross-attention has plan ``e`` in all layers or in none; else ValueError."""
        super().__post_init__(**kwargs)
        cross = [layer.plan for layer in self.layer_plans[1::2]]
        if "e" in cross and set(cross) != {"e"}:
            raise ValueError(
                "cross-attention reads the encoder's output in all layers or in none (plan 'e'), got "
                f"{', '.join(cross)}; plan 'e' for all of them"
            )

    @property
    def layer_plans(self) -> list[SlimLayer]:
        layers = self.num_decoder_layers if hasattr(self, "num_decoder_layers") else self.decoder_layers
        return read_layers(self.slim_layers, 2 * layers, (SELF_PLANS, CROSS_PLANS))

    @property
    def layers_that_attend_by_themselves(self) -> list[int]:
        """None: in a shared-context cache, slim layers of decoders with an encoder store keys and values."""
        return []


SlimT5Config = slim_config("t5", __name__, base=SlimEncoderDecoderConfig)
SlimBartConfig = slim_config("bart", __name__, base=SlimEncoderDecoderConfig)
SlimWhisperConfig = slim_config("whisper", __name__, base=SlimEncoderDecoderConfig)
