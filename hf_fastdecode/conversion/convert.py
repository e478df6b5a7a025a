"""Convert a checkpoint to a slim one, or back, group of tensors by group, and publish the result at the end."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

from hf_fastdecode.files import write_json
from hf_fastdecode.measurement.figures import new_figure, save
from hf_fastdecode.model_loading import has_no_vocabulary

from ..patches.layers.family import Family, language_config, longest_contexts
from .calibration import cached_logits, calibration_text, model_inputs, read_features
from .families import family_of, family_of_slim, require_rope
from .fit.cached_numbers import EIGHT_BITS
from .fit.layer_plan import dtype_name, relative_error
from .layer_converter import PlanChoice
from .shards import ShardWriter
from .source import REPORT, Checkpoint, CheckpointError, find_checkpoint
from .streams import DecoderOnlyStream, EncoderDecoderStream, FullStream, SlimStream

PICTURE: Final = "slim_report.png"
_HEADROOM: Final = 1.1  # of the disk: reports, tokenizers, and small tensors of slim layers

Format = Literal["slim", "full"]
_FEATURES: Final = ".safetensors"


@dataclass(frozen=True)
class Settings:
    """Settings of a conversion: the options of ``convert-checkpoint``, with their defaults.

    `source` is a folder, an id on the Hugging Face Hub, or ``embedded``; `target` None measures only; `dtype` None is
    that of the source, `calibration` and `transcript` None the built-in text, and for Whisper synthetic features.
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
    """Convert a checkpoint, or measure its layers only; returns the report, as it is written beside the weights.

    `on_group` is called with the numbers of finished groups and of all groups.

    Raises:
        ValueError: The checkpoint cannot be read or converted as asked: one line of reason and remedy.
        VerificationError: The result's logits are off; nothing was put at the target.
        OSError: The disk is full, or a file cannot be written.
    """
    folder, (model_type, family) = find_checkpoint(settings.source, partial(_family, settings=settings))
    with closing(Checkpoint(folder)) as source:
        conversion = _Conversion(source, settings, model_type, family)
        if settings.target is None:
            return _with_layers(conversion.report, [report for _, report in conversion.groups(0, on_group)])
        made_of = {**conversion.report, "shard_bytes": settings.shard_bytes, "files": source.stamp()}
        target = settings.target.expanduser()
        with closing(ShardWriter(target, settings.shard_bytes, made_of, resume=settings.resume)) as writer:
            return conversion.write(writer, on_group)


def _family(config: Any, settings: Settings) -> tuple[str, Family]:
    """The `model_type` and the family of a config that can be converted; ValueError where it cannot."""
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


class _Conversion:
    """A conversion of an opened source: its tensors as a stream, its calibration inputs and its report."""

    def __init__(self, source: Checkpoint, settings: Settings, model_type: str, family: Family) -> None:
        self.source, self.settings, self.family = source, settings, family
        source.rename(self.family.model_name)
        source.check(family.auto, None if family.has_encoder else family.layers, family.left_out)
        dtype = settings.dtype or source.tensor(self.family.embedding).dtype
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise CheckpointError(f"{settings.source} is in {dtype}; give `dtype` float32, bfloat16 or float16")
        if settings.format == "full" and settings.verify and source.report() is None:
            raise CheckpointError(
                f"`verify` needs the layers' errors in {source.folder / REPORT}, which is missing or no conversion's; "
                "restore the file, or leave `verify` out"
            )
        self.text, self.features = self._files()
        self.ids: Tensor | None = None
        self.inputs: dict[str, Tensor] = {}
        if settings.format == "slim" or settings.verify:
            self.ids = self._ids()
            features = None if self.features is None else read_features(self.features)
            self.inputs = model_inputs(self.family, source.config, self.ids, features)
        self.stream: SlimStream | FullStream
        if settings.format == "full":
            self.stream = FullStream(source, model_type, self.family, dtype)
        else:
            kind = EncoderDecoderStream if self.family.has_encoder else DecoderOnlyStream
            self.stream = kind(source, self.family, settings.choice, dtype, self.inputs)
        self.report = self._describe()

    def groups(self, done: int, on_group: Callable[[int, int], None]) -> Iterator[tuple[dict[str, Tensor], Any]]:
        self.stream.skip(done)
        for index in range(done, len(self.stream)):
            on_group(index, len(self.stream))
            yield self.stream.group(index)
        on_group(len(self.stream), len(self.stream))

    def write(self, writer: ShardWriter, on_group: Callable[[int, int], None]) -> dict[str, Any]:
        """Write the checkpoint and its report, from the first group that is not on disk."""
        stream, settings = self.stream, self.settings
        if not writer.groups:
            self._check_disk(writer.folder)
        try:
            for tensors, layer in self.groups(writer.groups, on_group):
                writer.add(tensors, layer)
        except ValueError:  # resuming would raise it again
            shutil.rmtree(writer.folder)
            raise
        layers = writer.finish()
        config = stream.finished(layers)
        report = _with_layers(self.report, layers)
        self.source.copy_beside(writer.folder)
        if settings.verify:
            here, there = (writer.folder, config), (self.source.folder, self.source.config)
            slim, full = (here, there) if settings.format == "slim" else (there, here)
            known = report if settings.format == "slim" else self.source.report()
            assert known is not None  # `__init__` refuses without
            tolerance = settings.choice.tolerance
            checked = verify(full, slim, self.family, stream.dtype, self.inputs, tolerance, known["layers"])
            report["verification"] = asdict(checked)
        write_json(writer.folder / REPORT, report)
        if settings.format == "slim":
            draw_report(report, writer.folder / PICTURE)
        writer.publish(config)
        return report

    def _files(self) -> tuple[Path | None, Path | None]:
        """The calibration text and features; None for the built-in text and synthetic features."""
        settings, file = self.settings, self.settings.calibration
        if self.family.audio and file is not None and file.suffix == _FEATURES:
            return settings.transcript, file
        if settings.transcript is not None:
            raise CheckpointError(
                f"{settings.source} has no calibration features, whose transcript {settings.transcript} would be: "
                f"these are a {_FEATURES} file for a model that reads sounds; give a text as `calibration`"
            )
        return file, None

    def _ids(self) -> Tensor:
        name = self.settings.source
        try:
            tokenizer = AutoTokenizer.from_pretrained(self.source.folder, trust_remote_code=False)
        except Exception as error:  # malformed files may raise anything
            raise CheckpointError(
                f"{name} has no tokenizer that can be loaded ({type(error).__name__}), and layers are measured on a "
                "text; save the tokenizer beside the weights"
            ) from error
        if has_no_vocabulary(tokenizer):
            raise CheckpointError(
                f"{name} has no tokenizer files, and layers are measured on a text; save the tokenizer beside the "
                "weights (tokenizer.save_pretrained)"
            )
        return calibration_text(language_config(self.source.config), None, tokenizer, self.text)

    def _check_disk(self, folder: Path) -> None:
        """Refuse, before hours of work, a checkpoint that the disk has no space for."""
        itemsize = self.source.tensor(self.family.embedding).dtype.itemsize
        needed = int(self.source.nbytes() * self.stream.dtype.itemsize / itemsize * _HEADROOM)
        free = shutil.disk_usage(folder).free
        if free < needed:
            shutil.rmtree(folder)
            raise CheckpointError(
                f"{folder.parent} has {free / 1e9:.2f} GB free, and the checkpoint needs {needed / 1e9:.2f} GB; make "
                "space, or name a folder on another disk"
            )

    def _describe(self) -> dict[str, Any]:
        """The report without layers."""
        source, settings, choice = self.source, self.settings, self.settings.choice
        report: dict[str, Any] = {
            "format": settings.format,
            "source": settings.source,
            "model_type": source.config.model_type,
            "dtype": dtype_name(self.stream.dtype),
            "plan": choice.plan if isinstance(choice.plan, str) else [list(one) for one in choice.plan],
            "rank": choice.rank,
            "tolerance": choice.tolerance,
            "cache_dtype": choice.cache_dtype,
            "rope": choice.rope,
            "calibration": "built-in" if self.text is None else str(self.text),
            "calibration_tokens": 0 if self.ids is None else len(self.ids),
            "calibration_sha256": "" if self.ids is None else sha256(self.ids.numpy().tobytes()).hexdigest(),
        }
        if source.left_out:
            report["left_out"] = source.left_out
        if self.family.has_encoder:
            report["decoder_tokens"], report["encoder_tokens"] = longest_contexts(source.config)
            if self.family.audio:
                file = self.features
                report["calibration_features"] = "synthetic" if file is None else str(file)
                report["calibration_features_sha256"] = "" if file is None else sha256(file.read_bytes()).hexdigest()
        return report


def _with_layers(report: dict[str, Any], reports: list[Any]) -> dict[str, Any]:
    """The report with its layers, from the reports of all groups, and the bytes of all caches."""
    layers = reports[1:]
    if report["format"] == "full":
        return {**report, "layers": layers}
    slim = [layer["bytes_per_token"] for layer in layers]
    ordinary = [layer["measured"]["ordinary"]["bytes_per_token"] for layer in layers]
    if "encoder_tokens" in report:  # self-attention and cross-attention alternate, and cache different texts
        tokens = (report["decoder_tokens"], report["encoder_tokens"])
        slim, ordinary = ([sum(one[::2]) * tokens[0] + sum(one[1::2]) * tokens[1]] for one in (slim, ordinary))
        names = ("cache_bytes", "ordinary_cache_bytes")
    else:
        names = ("bytes_per_token", "ordinary_bytes_per_token")
    sizes = dict(zip(names, (sum(slim), sum(ordinary))))
    return {**report, **sizes, "saved": 1 - sum(slim) / sum(ordinary), "layers": layers}


_EPS: Final = {
    dtype_name(dtype): torch.finfo(dtype).eps
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)
} | {"int8": 1 / 127}
"""Relative rounding step of each cache dtype."""

_SUMMATION: Final = 4.0
"""Rounding errors of a sum of products in fp32, as a multiple of those of its terms."""


class VerificationError(ValueError):
    """The slim model's logits have a larger error than its layers' errors allow."""


@dataclass(frozen=True)
class Verification:
    """Relative errors of logits, in the Frobenius norm, against the ordinary model in fp64.

    Of the slim model in its dtype, with its bound, and of the ordinary model in the same dtype, with keys and values
    in int8 in layers that the slim model caches in 8 bits. `same_tokens` is the share of positions where slim and fp64
    give the same most likely token.
    """

    slim_error: float
    ordinary_error: float
    bound: float
    same_tokens: float


def verify(
    ordinary: tuple[Path, Any],
    slim: tuple[Path, Any],
    family: Family,
    dtype: torch.dtype,
    inputs: dict[str, Tensor],
    tolerance: float,
    layers: Sequence[Mapping[str, Any]],
) -> Verification:
    """Compare logits on `model_inputs`; models, given as folder and config, are loaded whole, one after the other.

    The bound is `tolerance`, at least 1, times the error of the ordinary model with the layers' baseline caches, plus
    the error of fp32 accumulators in values from keys, by the `layers` of a conversion report. Raises
    VerificationError where the slim model's error exceeds it.
    """
    oracle = cached_logits(_load(ordinary, torch.float64, family.auto), inputs)
    entries = language_config(slim[1]).layer_plans
    in_eight_bits = [at for at, layer in enumerate(entries) if layer.cache_dtype in map(dtype_name, EIGHT_BITS)]
    stock = cached_logits(_load(ordinary, dtype, family.auto), inputs, in_eight_bits)
    found = cached_logits(_load(slim, dtype, family.slim_model), inputs)
    errors = [relative_error(one, oracle) for one in (found, stock)]
    bound = tolerance * errors[1] + _accumulation_error(layers)
    same = (found.argmax(-1) == oracle.argmax(-1)).double().mean().item()
    checked = Verification(errors[0], errors[1], bound, same)
    if not checked.slim_error <= bound:
        raise VerificationError(
            f"logits of the slim model are off by {checked.slim_error:.3g}, and may be by {bound:.3g} (the ordinary "
            f'model in this dtype: {checked.ordinary_error:.3g}); try `plan="auto"`, a smaller `tolerance` or a '
            "larger `rank`"
        )
    return checked


def _accumulation_error(layers: Sequence[Mapping[str, Any]]) -> float:
    """Error of the logits that rounding in fp32 adds: in their sums, and in those that compute values from keys.

    Rounding the cached keys makes the measured `value_error`. Rounding sums of their products is amplified as much,
    but smaller by the ratio of the precisions. (The condition number is no bound: it ignores V-coordinates.)
    """
    eps = torch.finfo(torch.float32).eps
    from_keys = [layer for layer in layers if layer["plan"] in ("k", "k+r")]
    amplified = sum(layer["value_error"] / _EPS.get(layer.get("dtype", ""), eps) for layer in from_keys)
    return eps * (1 + _SUMMATION * amplified)


def _load(checkpoint: tuple[Path, Any], dtype: torch.dtype, loader: Any) -> PreTrainedModel:
    folder, config = checkpoint
    model: PreTrainedModel = loader.from_pretrained(folder, config=config, dtype=dtype)
    return model.eval()


def draw_report(report: dict[str, Any], path: Path) -> None:
    """Draw, per layer, the condition number of ``W_K`` and the output errors of measured caches, to a PNG file."""
    layers, measured = report["layers"], [layer["measured"] for layer in report["layers"]]
    indices = list(range(len(layers)))
    figure, (above, below) = new_figure(2, 1, (8, 7))
    above.sharex(below)
    above.bar(indices, [one["condition"] or float("nan") for one in measured], color="#3b6fb6")
    above.set_yscale("log")
    above.set_ylabel("condition number of $W_K$")
    above.set_title(f"{report['source']} in {report['dtype']}: {report['saved']:.0%} of the KV cache saved")
    for baseline, name, color in (("ordinary", "", "#9aa0a6"), ("ordinary_int8", ", int8", "#c9a227")):
        if all(one[baseline] for one in measured):
            errors = [one[baseline]["output_error"] for one in measured]
            below.plot(indices, errors, "o-", color=color, label=f"keys and values{name}")
            allowed = [error * report["tolerance"] for error in errors]
            below.plot(indices, allowed, ":", color=color, label=f"tolerance{name}")
    alone = [_error_of_keys(one) for one in measured]
    below.plot(indices, alone, "x--", color="#c46a8d", label="keys alone")
    # A logarithmic axis has no 0: exact caches are drawn below all keys and values.
    lowest = min((one["ordinary"]["output_error"] for one in measured if one["ordinary"]["output_error"]), default=1.0)
    chosen = [layer["output_error"] or lowest / 10 for layer in layers]
    below.plot(indices, chosen, "s-", color="#1b7f5c", label="chosen")
    for at, (layer, error) in enumerate(zip(layers, chosen)):
        name = f"k+{layer['rank']}" if layer["rank"] else layer["plan"]
        if layer.get("cache_dtype"):
            name += f" {layer['cache_dtype']}"
        if not layer["output_error"]:
            name += ", exact"
        below.annotate(name, (at, error), textcoords="offset points", xytext=(0, 7), ha="center")
    below.set_yscale("log")
    below.set_ylabel("relative error of the layer's output")
    below.set_xlabel("layer")
    below.xaxis.get_major_locator().set_params(integer=True)
    below.legend()
    save(figure, path)


def _error_of_keys(measured: Mapping[str, Any]) -> float:
    """Output error of keys alone, not in 8 bits; nan where it was not measured."""
    alone = (one for one in measured["candidates"] if (one["plan"], one["dtype"]) == ("k", measured["cache_dtype"]))
    return next((one["output_error"] for one in alone), float("nan"))
