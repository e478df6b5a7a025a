"""Convert a checkpoint to a slim one, or back, group of tensors by group, and publish the result at the end."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor
from transformers import AutoTokenizer

from hf_fastdecode.files import write_json
from hf_fastdecode.generation.prompts.prompt_ids import has_no_vocabulary

from ...patches.layers.encoder_decoder import EncoderDecoder, longest_contexts
from ...patches.layers.family import Family, language_config, longest_text
from ..fit.cache_errors import dtype_name
from .calibration import calibration_ids, check_vocabulary
from .encoder_decoder.calibration_pass import decoder_logits, model_inputs, read_features
from .encoder_decoder.streams import FullDecoderStream, SlimDecoderStream
from .families.configs import require_rope
from .families.lookup import family_of, family_of_slim
from .find import CheckpointError, find_checkpoint
from .plan_choice import PlanChoice
from .report_plot import draw_report
from .shards import ShardWriter
from .source import REPORT, Checkpoint
from .to_full_stream import FullStream
from .to_slim_stream import SlimStream
from .verify import Verification, accumulation_error, text_logits, verify

PICTURE: Final = "slim_report.png"
_HEADROOM: Final = 1.1  # of the disk: reports, tokenizers, and what a slim layer has beside its matrices

Format = Literal["slim", "full"]
Stream = SlimStream | FullStream | SlimDecoderStream | FullDecoderStream

_FEATURES: Final = ".safetensors"


@dataclass(frozen=True)
class Settings:
    """Settings of a conversion.

    Attributes:
        source: A folder, an id on the Hugging Face Hub, or ``embedded``.
        target: Folder to make; None to measure only.
        format: ``slim``, or ``full`` to convert a slim checkpoint back.
        choice: How the layers' caches are chosen.
        dtype: Of the result; None for the source's own.
        calibration: UTF-8 text, or None for the built-in one. For Whisper, a ``.safetensors`` file has
            ``input_features`` instead; without, features are synthetic.
        transcript: UTF-8 text of what is said in these features, or None for the built-in text.
        verify: Whether to compare logits before the result is published.
        resume: Whether to continue an interrupted conversion.
        shard_bytes: Most bytes in a shard.
    """

    source: str
    target: Path | None
    format: Format = "slim"
    choice: PlanChoice = field(default_factory=PlanChoice)
    dtype: torch.dtype | None = None
    calibration: Path | None = None
    transcript: Path | None = None
    verify: bool = False
    resume: bool = False
    shard_bytes: int = 5 * 10**9


def convert_checkpoint(
    settings: Settings, on_group: Callable[[int, int], None] = lambda done, of: None
) -> dict[str, Any]:
    """Convert a checkpoint, or measure its layers only.

    Args:
        settings: Source, target and options.
        on_group: Progress callback, called with the numbers of finished groups and of all groups.

    Returns:
        The report, as it is written beside the weights.

    Raises:
        ValueError: The checkpoint cannot be read, or not be converted as asked: one line of reason and remedy.
        VerificationError: The result's logits are off; nothing was put at the target.
        OSError: The disk is full, or a file cannot be written.
    """
    source = Checkpoint(find_checkpoint(settings.source, partial(_family, settings=settings)))
    try:
        family, stream, ids = _stream(source, settings)
        report = _describe(source, settings, family, stream.dtype, ids)
        if settings.target is None:
            layers = []
            for index in range(len(stream)):
                layers.append(stream.group(index)[1])
                on_group(index + 1, len(stream))
            return _with_layers(report, layers)
        made_of = {**report, "shard_bytes": settings.shard_bytes, "files": source.stamp()}
        target = settings.target.expanduser()
        with closing(ShardWriter(target, settings.shard_bytes, made_of, resume=settings.resume)) as writer:
            return _write(writer, source, settings, family, stream, ids, report, on_group)
    finally:
        source.close()


def _family(config: Any, settings: Settings) -> tuple[str, Family | EncoderDecoder]:
    """The `model_type` and the family of a config that can be converted.

    Raises:
        ValueError: It cannot.
    """
    if settings.format == "full":
        model_type, family = family_of_slim(config)
    else:
        model_type, family = config.model_type, family_of(config)
        require_rope(family, config, settings.choice.rope)
    if (layers := getattr(language_config(config), "num_hidden_layers", 1)) < 1:
        raise CheckpointError(
            f"the config of {settings.source} has {layers} layers (num_hidden_layers), not one or more"
        )
    return model_type, family


def _stream(source: Checkpoint, settings: Settings) -> tuple[Family | EncoderDecoder, Stream, Tensor | None]:
    model_type, family = _family(source.config, settings)
    source.rename(family.model_name)
    if isinstance(family, Family):
        source.check(family.auto, family.layers, family.left_out)
    else:
        source.check(family.auto)
    dtype = settings.dtype or source.dtype(family.embedding)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise CheckpointError(f"{settings.source} is in {dtype}; give --dtype float32, bfloat16 or float16")
    if settings.format == "full" and settings.verify and source.report() is None:
        raise CheckpointError(
            f"--verify needs the layers' errors in {source.folder / REPORT}, which is missing or no conversion's; "
            "restore the file, or leave --verify out"
        )
    ids = _ids(source, settings, family) if settings.format == "slim" or settings.verify else None
    if settings.format == "full":
        if isinstance(family, EncoderDecoder):
            return family, FullDecoderStream(source, model_type, family, dtype), ids
        return family, FullStream(source, model_type, family, dtype), ids
    assert ids is not None
    if isinstance(family, EncoderDecoder):
        inputs = _inputs(source, settings, family, ids)
        return family, SlimDecoderStream(source, family, settings.choice, dtype, inputs), ids
    return family, SlimStream(source, family, settings.choice, dtype, ids), ids


def _ids(source: Checkpoint, settings: Settings, family: Family | EncoderDecoder) -> Tensor:
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.folder, trust_remote_code=False)
    except Exception as error:  # files that are not what they say may raise anything
        raise CheckpointError(
            f"{settings.source} has no tokenizer that can be loaded ({type(error).__name__}), and layers are measured "
            "on a text; save the tokenizer beside the weights"
        ) from error
    if has_no_vocabulary(tokenizer):
        raise CheckpointError(
            f"{settings.source} has no tokenizer files, and layers are measured on a text; save the tokenizer beside "
            "the weights (tokenizer.save_pretrained)"
        )
    text = _text_file(settings, family)
    config = language_config(source.config)
    return check_vocabulary(calibration_ids(tokenizer, text, longest_text(config)), config.vocab_size)


def _has_features(settings: Settings, family: Family | EncoderDecoder) -> bool:
    """Whether the calibration file is of features rather than a text."""
    audio = isinstance(family, EncoderDecoder) and family.audio
    return audio and settings.calibration is not None and settings.calibration.suffix == _FEATURES


def _text_file(settings: Settings, family: Family | EncoderDecoder) -> Path | None:
    """The calibration text, or None for the built-in one.

    Raises:
        CheckpointError: There is a transcript, and the model reads no sounds.
    """
    if _has_features(settings, family):
        return settings.transcript
    if settings.transcript is not None:
        raise CheckpointError(
            f"{settings.source} has no calibration features, whose transcript {settings.transcript} would be: these "
            f"are a {_FEATURES} file for a model that reads sounds; give a text as --calibration"
        )
    return settings.calibration


def _inputs(source: Checkpoint, settings: Settings, family: EncoderDecoder, ids: Tensor) -> dict[str, Tensor]:
    file = settings.calibration if _has_features(settings, family) else None
    return model_inputs(family, source.config, ids, None if file is None else read_features(file))


def _write(
    writer: ShardWriter,
    source: Checkpoint,
    settings: Settings,
    family: Family | EncoderDecoder,
    stream: Stream,
    ids: Tensor | None,
    report: dict[str, Any],
    on_group: Callable[[int, int], None],
) -> dict[str, Any]:
    if not writer.groups:
        _check_disk(source, family, stream.dtype, writer.folder)
    stream.resume(writer.carried())
    try:
        for index in range(writer.groups, len(stream)):
            on_group(index, len(stream))
            before = stream.carried()
            tensors, layer = stream.group(index)
            writer.add(tensors, layer, before)
    except ValueError:  # resuming would raise it again
        shutil.rmtree(writer.folder)
        raise
    layers = writer.finish()
    on_group(len(stream), len(stream))
    config = stream.finished(layers)
    report = _with_layers(report, layers)
    source.copy_beside(writer.folder)
    if settings.verify and ids is not None:
        report["verification"] = _verify(source, settings, family, writer.folder, config, stream.dtype, ids, report)
    write_json(writer.folder / REPORT, report)
    if settings.format == "slim":
        draw_report(report, writer.folder / PICTURE)
    writer.publish(config)
    return report


def _verify(
    source: Checkpoint,
    settings: Settings,
    family: Family | EncoderDecoder,
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    ids: Tensor,
    report: dict[str, Any],
) -> dict[str, Any]:
    here, there = (folder, config), (source.folder, source.config)
    slim, full = (here, there) if settings.format == "slim" else (there, here)
    known = report if settings.format == "slim" else source.report()
    assert known is not None  # `_stream` refuses without
    if isinstance(family, EncoderDecoder):
        logits = partial(decoder_logits, inputs=_inputs(source, settings, family, ids))
    else:
        logits = partial(text_logits, ids=ids)
    checked: Verification = verify(
        full, slim, family, dtype, logits, settings.choice.tolerance, accumulation_error(known["layers"])
    )
    return checked.to_dict()


def _check_disk(source: Checkpoint, family: Family | EncoderDecoder, dtype: torch.dtype, folder: Path) -> None:
    """Refuse before hours of work what the disk has no room for."""
    itemsize = source.dtype(family.embedding).itemsize
    needed = int(source.nbytes() * dtype.itemsize / itemsize * _HEADROOM)
    free = shutil.disk_usage(folder).free
    if free < needed:
        shutil.rmtree(folder)
        raise CheckpointError(
            f"{folder.parent} has {free / 1e9:.2f} GB free, and the checkpoint needs {needed / 1e9:.2f} GB; make "
            "room, or name a folder on another disk"
        )


def _describe(
    source: Checkpoint,
    settings: Settings,
    family: Family | EncoderDecoder,
    dtype: torch.dtype,
    ids: Tensor | None,
) -> dict[str, Any]:
    choice, text = settings.choice, _text_file(settings, family)
    report: dict[str, Any] = {
        "format": settings.format,
        "source": settings.source,
        "model_type": source.config.model_type,
        "dtype": dtype_name(dtype),
        "plan": choice.plan if isinstance(choice.plan, str) else [list(one) for one in choice.plan],
        "rank": choice.rank,
        "tolerance": choice.tolerance,
        "cache_dtype": choice.cache_dtype,
        "rope": choice.rope,
        "calibration": "built-in" if text is None else str(text),
        "calibration_tokens": 0 if ids is None else len(ids),
        "calibration_sha256": "" if ids is None else _sha256(ids.numpy().tobytes()),
    }
    if source.left_out:
        report["left_out"] = source.left_out
    if isinstance(family, EncoderDecoder):
        report["decoder_tokens"], report["encoder_tokens"] = longest_contexts(source.config)
        if family.audio:
            file = settings.calibration if _has_features(settings, family) else None
            report["calibration_features"] = "synthetic" if file is None else str(file)
            report["calibration_features_sha256"] = "" if file is None else _sha256(file.read_bytes())
    return report


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _with_layers(report: dict[str, Any], reports: list[Any]) -> dict[str, Any]:
    """The report with those of its layers, from the reports of all groups, and the bytes of all caches."""
    layers = reports[1:]
    if report["format"] == "full":
        return {**report, "layers": layers}
    slim = [layer["bytes_per_token"] for layer in layers]
    ordinary = [layer["measured"]["ordinary"]["bytes_per_token"] for layer in layers]
    if "encoder_tokens" in report:  # self-attention and cross-attention, in turns, cache tokens of different texts
        tokens = (report["decoder_tokens"], report["encoder_tokens"])
        slim, ordinary = ([sum(one[::2]) * tokens[0] + sum(one[1::2]) * tokens[1]] for one in (slim, ordinary))
        names = ("cache_bytes", "ordinary_cache_bytes")
    else:
        names = ("bytes_per_token", "ordinary_bytes_per_token")
    sizes = dict(zip(names, (sum(slim), sum(ordinary))))
    return {**report, **sizes, "saved": 1 - sum(slim) / sum(ordinary), "layers": layers}
