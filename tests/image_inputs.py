"""Prompts with small random images, videos or sounds, in the forms that processors of different models give them."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

Part = int | tuple[int, ...]
"""Part of a prompt: a number of random tokens, or an image: rows and columns of patches, and its seed, if not 0.

Models whose images have one size leave rows and columns aside.
"""

KINDS = ("image", "video", "audio")


class Features(NamedTuple):
    """What a model gets of some images or sounds: arguments by name, and how many tokens stand for each."""

    arguments: dict[str, Tensor]
    tokens: list[int]


def prompts_with_images(
    model: PreTrainedModel, *prompts: Sequence[Part], kind: str = "image", seed: int = 0, sized: bool = False
) -> dict[str, Tensor]:
    """Left-padded prompts with their images, as the model's processor gives them.

    Args:
        sized: Whether images have the rows and columns that they are given with, also where models may have one size
            for all; and prompts that differ in the seeds of images alone have equal text. Some videos have two frames.

    Raises:
        LookupError: No form that is known here suits the model.
    """
    config: Any = model.config
    generator = torch.Generator().manual_seed(seed)
    place = _first(config, f"{kind}_token_id", f"{kind}_token_index")
    if sized and kind == "video" and str(config.model_type).startswith("glm"):
        place = config.image_token_id
    images = [part for parts in prompts for part in parts if not isinstance(part, int)]
    features = Features({}, [])
    if images:
        counts_of_rows = [sum(not isinstance(part, int) for part in parts) for parts in prompts]
        features = _features(model, kind, images, counts_of_rows if sized else None)
    counts, rows = iter(features.tokens), list[Tensor]()
    before, after = ([] if one is None else [one] for one in _frame(config, kind))
    broken = [7] if sized and "image_sizes" in features.arguments else []
    runs = iter(_runs(config, features.arguments) if sized else ())
    for parts in prompts:
        generator = _generator_of(parts) if sized else generator
        tokens = list[Tensor]()
        for part in parts:
            if isinstance(part, int):
                tokens.append(torch.randint(3, 90, (part,), generator=generator))
            else:
                run, rest = divmod(next(counts), number := next(runs, 1))
                tokens.append(torch.tensor([*before, *[place] * run, *after, *broken] * number + [place] * rest))
        rows.append(torch.cat(tokens))
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for row, tokens in enumerate(rows):
        ids[row, width - len(tokens) :], mask[row, width - len(tokens) :] = tokens, 1
    inputs = {"input_ids": ids, "attention_mask": mask, **features.arguments}
    for name in ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"):
        if name in inspect.signature(type(model).forward).parameters:
            inputs[name] = (ids == place).int() * (2 if kind == "video" else 1)
    if (tiles := inputs.get("aspect_ratio_mask")) is not None:
        inputs["cross_attention_mask"] = _seen_by_tokens(ids == place, tiles)
    return inputs


def _runs(config: Any, arguments: dict[str, Tensor]) -> list[int]:
    """In how many runs the tokens of each image stand: of a video's frames, or of the rows of an image (Pixtral)."""
    if "video_grid_thw" in arguments and str(config.model_type).startswith(
        ("qwen3", "cosmos3", "cohere_compass", "glm")
    ):
        frames: list[int] = arguments["video_grid_thw"][:, 0].tolist()
        return frames
    return [2] * len(arguments["image_sizes"]) if "image_sizes" in arguments else []


def _generator_of(parts: Sequence[Part]) -> torch.Generator:
    sizes = [part if isinstance(part, int) else part[:2] for part in parts]
    return torch.Generator().manual_seed(zlib.crc32(repr(sizes).encode()))


def _seen_by_tokens(images: Tensor, tiles: Tensor) -> Tensor:
    """Which tiles ``[rows, tokens, 1, tiles]`` a token sees: those of its prompt's image, from that on.

    Args:
        images: ``[rows, tokens]`` bool, tokens that stand for an image.
        tiles: ``[images, 1, tiles]``, those that are no padding.
    """
    if images.sum(1).tolist() != [1] * len(tiles):
        raise LookupError("prompts of tiles have one image each")
    return images.long().cumsum(1)[:, :, None, None] * tiles[:, None]


def _frame(config: Any, kind: str) -> tuple[int | None, int | None]:
    """Tokens before and after an image, by which some models find it."""
    if kind == "audio":
        return None, None
    ends = ((f"{name}_start_token_id", f"{name}_end_token_id") for name in ("vision", "image"))
    return next(((getattr(config, a), getattr(config, b)) for a, b in ends if getattr(config, a, None)), (None, None))


def _features(
    model: PreTrainedModel, kind: str, images: Sequence[tuple[int, ...]], counts_of_rows: Sequence[int] | None
) -> Features:
    forms = {"image": _image_forms, "video": _video_forms, "audio": _audio_forms}[kind](model, images)
    if counts_of_rows is not None:
        sized = {"image": _sized_images, "audio": _sized_sounds, "video": _sized_videos}[kind]
        forms = chain(sized(model, images, counts_of_rows), forms)
    errors = []
    for arguments in forms:
        try:
            return Features(arguments, _tokens(model, kind, arguments, len(images), counts_of_rows))
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
    raise LookupError(f"no form of {kind}s suits {type(model).__name__}: {errors[-3:]}")


def _tokens(
    model: PreTrainedModel,
    kind: str,
    arguments: dict[str, Tensor],
    count: int,
    counts_of_rows: Sequence[int] | None = None,
) -> list[int]:
    """Tokens of each image, as the model itself makes them.

    Args:
        counts_of_rows: Images of each row; None where all have equally many tokens.
    """
    if model.config.model_type == "qwen2_audio":
        frames = arguments["feature_attention_mask"].sum(1)
        made: list[int] = model.model.audio_tower._get_feat_extract_output_lengths(frames)[1].tolist()
        return made
    if "aspect_ratio_ids" in arguments:  # which layers of their own attend to
        return [1] * count
    encode: Callable[..., Any] | None = getattr(model, f"get_{kind}_features", None)
    if encode is None:
        encode = getattr(model.model, f"get_{kind}_features")
    there = {name: part.to(model.device) for name, part in arguments.items()}
    there |= {name: part.to(model.dtype) for name, part in there.items() if part.is_floating_point()}
    with torch.no_grad():
        output = encode(**there, return_dict=True)
    pooled = output.last_hidden_state if output.pooler_output is None else output.pooler_output  # before 5.24
    grid = f"{kind}_grid_thw" in arguments
    of_rows = counts_of_rows is not None and next(iter(arguments.values())).shape[:2] == (
        *(len(counts_of_rows), max(counts_of_rows)),
    )
    if of_rows and isinstance(pooled, list | tuple) and len(arguments) == 1:
        pooled = torch.cat(list(pooled))  # of all images of a row
    elif counts_of_rows is not None and isinstance(pooled, Tensor) and pooled.dim() == 2 and count > 1 and not grid:
        of_each = [{name: part[one : one + 1] for name, part in arguments.items()} for one in range(count)]
        return [_tokens(model, kind, one, 1)[0] for one in of_each]
    if isinstance(pooled, Tensor) and pooled.dim() == 2:
        each, rest = divmod(len(pooled), count)
        if rest:
            raise ValueError(f"{len(pooled)} tokens of {count} images")
        return [each] * count
    if len(pooled) != count:
        raise ValueError(f"features of {len(pooled)} images, not {count}")
    return [len(one) for one in pooled]


def _image_forms(model: PreTrainedModel, images: Sequence[tuple[int, ...]]) -> Iterator[dict[str, Tensor]]:
    config: Any = model.config
    takes = inspect.signature(type(model).forward).parameters
    vision = _first(config, "vision_config", "vision_model_config", "perception_config") or config
    patch, channels = (
        _first(vision, "patch_size") or 14,
        _first(vision, "in_channels", "num_channels", "in_chans") or 3,
    )
    patch = patch if isinstance(patch, int) else patch[0]
    if "image_grid_thw" in takes:
        grids = [(1, high, wide) for high, wide, *_ in images]
        grid = {"image_grid_thw": torch.tensor(grids)}
        if "image_merge_sizes" in takes:
            grid["image_merge_sizes"] = torch.tensor([2] * len(images))
        for shape in ([channels * (_first(vision, "temporal_patch_size") or 1) * patch**2], [channels, patch, patch]):
            patches = [_random((high * wide, *shape), seed) for high, wide, seed in map(_seeded, images)]
            yield {"pixel_values": torch.cat(patches), **grid}
    if "image_position_ids" in takes:
        places = torch.cartesian_prod(torch.arange(6), torch.arange(6)).repeat(len(images), 1, 1)
        patches = torch.stack([_random((36, channels * patch**2), _seeded(image)[2]) for image in images])
        yield {"pixel_values": patches, "image_position_ids": places}
    if "spatial_shapes" in takes:
        patches = torch.stack([_random((16, channels * patch**2), _seeded(image)[2]) for image in images])
        shown = torch.ones(len(images), 16, dtype=torch.long)
        shapes = {"spatial_shapes": torch.tensor([[4, 4]] * len(images)), "pixel_attention_mask": shown}
        yield {"pixel_values": patches, **shapes}
    size = _first(vision, "image_size") or 4 * patch
    size = size if isinstance(size, int) else size[0]
    seeds = [_seeded(image)[2] for image in images]
    if "aspect_ratio_ids" in takes:  # of one tile, and of two
        shown = torch.arange(len(images))[:, None] % 2
        tiles = torch.stack([_random((1, vision.max_num_tiles, channels, size, size), seed) for seed in seeds])
        mask = (torch.arange(vision.max_num_tiles) <= shown[..., None]).long()
        yield {"pixel_values": tiles, "aspect_ratio_ids": shown + 1, "aspect_ratio_mask": mask}
    sizes = {"image_sizes": torch.tensor([[size, size]] * len(images))} if "image_sizes" in takes else {}
    pixels = torch.stack([_random((channels, size, size), seed) for seed in seeds])
    for more in (sizes, {}) if sizes else ({},):
        yield {"pixel_values": pixels, **more}
    for tiles in (1, 2, 3, 5):
        several = torch.stack([_random((tiles, channels, size, size), seed) for seed in seeds])
        yield {"pixel_values": several, **sizes}


def _video_forms(model: PreTrainedModel, videos: Sequence[tuple[int, ...]]) -> Iterator[dict[str, Tensor]]:
    """Videos of one frame, for models that take the patches of all images end to end."""
    if "video_grid_thw" in inspect.signature(type(model).forward).parameters:
        for images in _image_forms(model, videos):
            if "image_grid_thw" in images:
                yield {"pixel_values_videos": images["pixel_values"], "video_grid_thw": images["image_grid_thw"]}


def _audio_forms(model: PreTrainedModel, sounds: Sequence[tuple[int, ...]]) -> Iterator[dict[str, Tensor]]:
    config: Any = model.config
    takes = inspect.signature(type(model).forward).parameters
    audio = _first(config, "audio_config", "encoder_config") or config
    seeds = [_seeded(sound)[2] for sound in sounds]
    bins = _first(audio, "num_mel_bins", "input_dim", "input_feat_size") or 80
    for frames in (2 * (_first(audio, "max_source_positions") or 100), 400):
        for shape in ((bins, frames), (frames, bins)):
            features = torch.stack([_random(shape, seed) for seed in seeds])
            yield {"input_features": features}
            for name in ("input_features_mask", "feature_attention_mask"):
                if name in takes:
                    yield {"input_features": features, name: torch.ones(len(sounds), frames, dtype=torch.long)}


def _sized_images(
    model: PreTrainedModel, images: Sequence[tuple[int, ...]], counts_of_rows: Sequence[int]
) -> Iterator[dict[str, Tensor]]:
    """Forms in which images have rows and columns, or rows of a batch their own number of images."""
    config: Any = model.config
    takes = inspect.signature(type(model).forward).parameters
    vision = _first(config, "vision_config", "vision_model_config", "perception_config") or config
    patch, channels = _first(vision, "patch_size") or 14, _first(vision, "num_channels") or 3
    patch = patch if isinstance(patch, int) else patch[0]
    size = _first(vision, "image_size") or 4 * patch
    size = size if isinstance(size, int) else size[0]
    seeded = list(map(_seeded, images))
    sizes = torch.tensor([[high * patch, wide * patch] for high, wide, _ in seeded])
    if "image_sizes" in takes:
        if (pinpoints := getattr(config, "image_grid_pinpoints", None)) is not None:
            tiles = [image_size_to_num_patches(one, pinpoints, size) for one in sizes.tolist()]
            pixels = torch.zeros(len(images), max(tiles), channels, size, size)
            for own, count, (_, _, seed) in zip(pixels, tiles, seeded, strict=True):
                own[:count] = _random((count, channels, size, size), seed)
        else:
            pixels = torch.zeros(len(images), channels, *sizes.amax(0).tolist())
            for own, (high, wide), (_, _, seed) in zip(pixels, sizes.tolist(), seeded, strict=True):
                own[:, :high, :wide] = _random((channels, high, wide), seed)
        yield {"pixel_values": pixels, "image_sizes": sizes}
    if "spatial_shapes" in takes or "image_position_ids" in takes:
        most = max(high * wide for high, wide, _ in seeded)
        patches, shown = torch.zeros(len(images), most, channels * patch**2), torch.zeros(len(images), most).long()
        places = torch.full((len(images), most, 2), -1)
        for row, (high, wide, seed) in enumerate(seeded):
            patches[row, : high * wide] = _random((high * wide, channels * patch**2), seed)
            shown[row, : high * wide] = 1
            places[row, : high * wide] = torch.cartesian_prod(torch.arange(wide), torch.arange(high))
        shapes = torch.tensor([[high, wide] for high, wide, _ in seeded])
        if "image_position_ids" in takes:
            yield {"pixel_values": patches, "image_position_ids": places}
        else:
            yield {"pixel_values": patches, "spatial_shapes": shapes, "pixel_attention_mask": shown}
    if "num_local_patches" in takes:
        locals_ = [_random((wide // high, channels, size, size), seed + 50) for high, wide, seed in seeded]
        pixels = torch.stack([_random((channels, size, size), seed) for _, _, seed in seeded])
        parts = torch.tensor(list(map(len, locals_)))
        yield {"pixel_values": pixels, "pixel_values_local": torch.cat(locals_), "num_local_patches": parts}
    if "pixel_attention_mask" in takes:
        pixels = torch.zeros(len(counts_of_rows), max(counts_of_rows), channels, size, size)
        ones = (_random((channels, size, size), seed) for _, _, seed in seeded)
        for own, count in zip(pixels, counts_of_rows, strict=True):
            for place in range(count):
                own[place] = next(ones)
        yield {"pixel_values": pixels}


def _sized_videos(
    model: PreTrainedModel, videos: Sequence[tuple[int, ...]], counts_of_rows: Sequence[int]
) -> Iterator[dict[str, Tensor]]:
    """Those of a number of rows divisible by 8 as two frames of half as many."""
    for arguments in _video_forms(model, videos):
        if "video_second_per_grid" in inspect.signature(type(model).forward).parameters:
            arguments["video_second_per_grid"] = torch.tensor([0.5 + seed for _, _, seed in map(_seeded, videos)])
        for grid in arguments["video_grid_thw"]:
            if grid[1] % 8 == 0:
                grid[0], grid[1] = 2, grid[1] // 2
        yield arguments


def _sized_sounds(
    model: PreTrainedModel, sounds: Sequence[tuple[int, ...]], counts_of_rows: Sequence[int]
) -> Iterator[dict[str, Tensor]]:
    """Sounds of as many frames as their rows and columns say, of all that there may be."""
    for arguments in _audio_forms(model, sounds):
        for name, mask in arguments.items():
            if name.endswith("mask"):
                for row, (high, wide, _) in enumerate(map(_seeded, sounds)):
                    mask[row, mask.shape[1] * high * wide // 32 :] = 0
                yield arguments


def _first(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def _seeded(image: tuple[int, ...]) -> tuple[int, int, int]:
    high, wide, *seed = image
    return high, wide, seed[0] if seed else 0


def _random(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed))
