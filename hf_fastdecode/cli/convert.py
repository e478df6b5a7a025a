"""`hf-fastdecode convert-checkpoint`: measure a model's layers and write a slim checkpoint."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, cast

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..dtypes import parse_dtype, short_dtype
from ..errors import InputError, one_line
from .console import FailedCheck, bytes_text, note, quiet_libraries, show_tables
from .interrupts import exit_on_interrupt
from .options import MODEL, check_choice, expand_option_groups, option

if TYPE_CHECKING:
    from ..patches.config_base import Rope


_UNITS: Final = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Caches of the layers of a slim checkpoint, and the text that they are measured on."""

    plan: str = option(
        "auto",
        help="`auto`: per layer the smallest cache within --tolerance. `k`: keys alone. `kv`: "
        "keys and values. `x` (GPT-2, OPT): the layer's inputs. Or a JSON file: a slim config.json, a report, or "
        'a list of {"plan": "k", "k+r", "kv" or "x", "rank": ...} per layer. Encoder-decoder models: `e`, keys '
        "for self-attention and nothing for cross-attention, which reads the encoder's output; `x`, the same with "
        "inputs instead of keys; lists alternate self-attention and cross-attention of each layer.",
    )
    rank: int | None = option(
        None, help="V-coordinates beside the keys, in every layer, instead of --plan.", show_default="as planned"
    )
    tolerance: float = option(
        2.0,
        help="Largest error of a layer's output, as a multiple of the error with keys and values in the model's "
        "dtype (for 8-bit caches: in int8). Applies to `auto`, and to 8-bit caches of any plan.",
    )
    cache_dtype: str = option(
        "auto",
        help="Dtype of slim caches. `auto`: fp16 for models in bfloat16, else the model's. `fp16`, `bf16`: this "
        "one; layers whose keys come near the end of its range keep keys and values. `int8`, `fp8`, with a scale "
        "per token and head: in layers that stay within --tolerance; others as with `auto`.",
    )
    rope: str = option(
        "raw",
        help="`raw`: cache keys before RoPE, and rotate them when they are read. `unrotate`: cache them after "
        "RoPE, with their positions, for arbitrary position_ids; slower.",
    )
    calibration: Path | None = option(
        None,
        help="UTF-8 text to measure layers on, typical of what the model will read; the first 1,024 tokens "
        "are used. For Whisper a .safetensors file with input_features, [1, bands, frames], beside --transcript.",
        show_default="built-in English and Python; synthetic features",
    )
    transcript: Path | None = option(
        None,
        help="UTF-8 text of what is said in the features of --calibration, which Whisper's decoder reads.",
        show_default="built-in English and Python",
    )

    def refuse_for_full(self, *, verify: bool) -> None:
        """Refuse options that do nothing when a slim checkpoint is converted back."""
        for field in fields(self):
            is_verified = field.name in ("tolerance", "calibration", "transcript")
            if getattr(self, field.name) != field.default and not (is_verified and verify):
                needs = " without --verify" if is_verified else ""
                option = field.name.replace("_", "-")
                raise InputError(f"--{option} does nothing with --format full{needs}; leave it out")


@expand_option_groups
def convert_checkpoint(
    source: Annotated[str, typer.Argument(help=MODEL)],
    target: Annotated[
        Path | None, typer.Argument(help="Folder to make; it must not exist. Not needed with --dry-run.")
    ] = None,
    form: str = typer.Option(
        "slim", "--format", help="`slim`; or `full`: back from a slim checkpoint to an ordinary one."
    ),
    *,
    caches: CacheOptions,
    dtype: str = typer.Option("auto", help="float32, bfloat16, float16, or `auto`: the source's."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Measure and report; write nothing."),
    verify: bool = typer.Option(
        False,
        "--verify",
        help="Load both models whole, the ordinary one in fp64 (8 bytes per weight), and compare their logits on "
        "the calibration text; if they differ too much, write no target (exit code 1).",
    ),
    resume: bool = typer.Option(False, "--resume", help="Continue an interrupted conversion."),
    max_shard_size: str = typer.Option("5GB", help="Largest size of a weight file, such as 500MB or 2GiB."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as one JSON object."),
) -> None:
    """Make a slim checkpoint of a multi-head model: it caches about half the bytes of keys and values.

    In multi-head attention, values follow from keys (V = K W_K^-1 W_V), so half the KV cache would do. In half
    precision it does not: rounding of keys grows by up to W_K's condition number. So layers are measured on a text,
    and each gets the smallest cache that is as accurate as --tolerance asks: keys (`k`), keys and r coordinates of the
    values along the directions that rounding spoils most (`k+r`), or keys and values (`kv`). The table shows what that
    saves, and per layer W_K's condition number and the largest number in W_KV = W_K^-1 W_V, by which rounding grows.

    The result loads with transformers' Auto classes after `import hf_fastdecode`, or with `trust_remote_code=True`,
    and generates with transformers' caches. Weights are read, converted and written layer by layer, to a folder
    beside TARGET that is renamed at the end; slim_report.json and slim_report.png hold the measurements.

    Models with grouped-query attention are refused: their keys do not determine the values. `inspect` shows refusals
    without downloading weights; docs/slim-architectures.md lists the architectures.

    Examples:

        hf-fastdecode convert-checkpoint embedded --dtype bfloat16 --dry-run
        hf-fastdecode convert-checkpoint lmsys/vicuna-7b-v1.5 vicuna-slim --verify
        hf-fastdecode convert-checkpoint lmsys/vicuna-7b-v1.5 vicuna-mine \\
            --calibration mine.txt --tolerance 1
        hf-fastdecode convert-checkpoint lmsys/vicuna-7b-v1.5 vicuna-int8 \\
            --cache-dtype int8
        hf-fastdecode convert-checkpoint whisper whisper-slim \\
            --calibration said.safetensors --transcript said.txt
        hf-fastdecode convert-checkpoint vicuna-slim vicuna-again --format full
    """
    dtype = parse_dtype(dtype)
    check_choice("format", [form], ("slim", "full"))
    if target is None and not dry_run:
        raise InputError("name the folder to make, or give --dry-run to measure only")
    if dry_run and (resume or verify):
        raise InputError(
            f"--dry-run writes nothing that --{'resume' if resume else 'verify'} could read; leave one out"
        )
    if form == "full":
        caches.refuse_for_full(verify=verify)
    shard_bytes = _size(max_shard_size)
    with quiet_libraries():
        with exit_on_interrupt():
            import torch
            from tqdm import tqdm

            from ..conversion import convert
            from ..conversion.layer_converter import NAMED, PlanChoice, read_plan_file
            from ..conversion.shards import unfinished

        with _one_line_errors(target):
            plan = caches.plan if caches.plan in NAMED else read_plan_file(Path(caches.plan))
            settings = convert.Settings(
                source=source,
                target=None if dry_run else target,
                format="full" if form == "full" else "slim",
                choice=PlanChoice(plan, caches.rank, caches.tolerance, caches.cache_dtype, cast("Rope", caches.rope)),
                dtype=None if dtype == "auto" else getattr(torch, dtype),
                calibration=caches.calibration,
                transcript=caches.transcript,
                verify=verify,
                resume=resume,
                shard_bytes=shard_bytes,
            )
        staging = None
        if settings.target is not None:
            if settings.target.expanduser().exists():  # such as ".", beside which there is no folder
                raise InputError(f"{target} exists; name another folder, or remove it first")
            staging = unfinished(settings.target.expanduser())
            if resume and not os.path.lexists(staging):
                note(f"hf-fastdecode: there is no unfinished conversion to {target}; starting anew")
        with _one_line_errors(target, staging), tqdm(desc="convert", unit="layer", disable=None, leave=False) as bar:

            def on_group(done: int, groups: int) -> None:
                bar.total = groups
                bar.update(done - bar.n)

            report = convert.convert_checkpoint(settings, on_group)
    if as_json:
        print(json.dumps(report))
    else:
        show_tables(_full(report) if report["format"] == "full" else _slim(report))
    if left_out := report.get("left_out"):
        names = ", ".join(left_out[:3]) + (f" and {len(left_out) - 3} more" if len(left_out) > 3 else "")
        note(
            f"hf-fastdecode: left out {names}, which transformers does not load either: the model has no such tensors"
        )
    if not dry_run:
        note(f"hf-fastdecode: wrote {target}")
    sys.stdout.flush()


@contextmanager
def _one_line_errors(target: Path | None, staging: Path | None = None) -> Iterator[None]:
    """Context in which errors of a conversion say how to resume from the staging folder beside the target."""
    from ..conversion.convert import VerificationError

    try:
        yield
    except VerificationError as error:
        raise FailedCheck(
            f"{one_line(error)}; {target} was not written: to accept the result, give --resume without --verify; "
            f"else delete {staging}"
        ) from error
    except ValueError as error:
        raise InputError(one_line(error)) from error
    except OSError as error:
        if staging is None or not staging.exists():
            raise
        raise InputError(
            f"cannot write {error.filename or target}: {error.strerror or error}; fix that and continue with "
            f"--resume, or delete {staging}, which holds what is converted"
        ) from error
    except KeyboardInterrupt:
        if staging is not None and staging.exists():
            note(f"hf-fastdecode: interrupted; --resume continues from what is converted, in {staging}")
        raise


def _size(text: str) -> int:
    """Bytes."""
    match = re.fullmatch(r"(\d+)\s*([KMG]?I?)B?", text.strip().upper())
    if match is None or match[2] not in _UNITS or not int(match[1]):
        raise InputError(
            f"--max-shard-size must be a size such as 500MB, 5GB or 2GiB, got {text!r}; leave it out for 5GB"
        )
    return int(match[1]) * _UNITS[match[2]]


_EIGHT_BITS: Final = ("int8", "float8_e4m3fn")


def _slim(report: dict[str, Any]) -> RenderableType:
    table = Table(title=f"{report['source']} in {report['dtype']}, slim", title_justify="left", title_style="bold")
    table.add_column("layer", justify="right")
    table.add_column("caches", min_width=8)
    table.add_column("in")
    for name in ("cond\nW_K", "max\nW_KV", "bytes\nof KV", "V\nerror", "output\nerror", "error\nvs KV"):
        table.add_column(name, justify="right")
    for index, layer in enumerate(report["layers"]):
        measured, ordinary = layer["measured"], layer["measured"]["ordinary"]
        baseline = measured["ordinary_int8"] if layer["dtype"] in _EIGHT_BITS else ordinary
        table.add_row(
            _layer(report, index),
            cache_name(layer),
            short_dtype(layer["dtype"]),
            _number(measured["condition"]),
            _number(measured["largest_key_to_value"]),
            f"{layer['bytes_per_token'] / ordinary['bytes_per_token']:.1%}",
            _error(layer["value_error"]),
            _error(layer["output_error"]),
            _ratio(layer["output_error"], baseline["output_error"]),
        )
    if "encoder_tokens" in report:
        sizes = (
            f"{bytes_text(report['cache_bytes'])} for {report['decoder_tokens']:,} tokens of the decoder and "
            f"{report['encoder_tokens']:,} of the encoder in the place of "
            f"{bytes_text(report['ordinary_cache_bytes'])}"
        )
    else:
        sizes = (
            f"{bytes_text(report['bytes_per_token'])} per token in the place of "
            f"{bytes_text(report['ordinary_bytes_per_token'])}"
        )
    closing = Text(
        f"{sizes}: {report['saved']:.1%} saved. Errors of values and of the "
        f"layer's output are relative, on the second half of {report['calibration_tokens']:,} tokens "
        f"({report['calibration']}); vs KV: output error over that of keys and values."
    )
    _append_eight_bits(report, closing)
    _append_warnings(report, closing)
    if features := report.get("calibration_features"):
        closing.append(f" The encoder read features ({features}).")
    for index, layer in enumerate(report["layers"]):
        reasons = {reason for plan, reason in layer["measured"]["refused"].items() if plan != "x"}  # RoPE rules it out
        for reason in sorted(reasons):
            closing.append(f"\nLayer {_layer(report, index)}: {reason}.", style="yellow")
    _append_verification(report, closing)
    return Group(table, closing)


def _append_verification(report: dict[str, Any], closing: Text) -> None:
    if checked := report.get("verification"):
        closing.append(
            f"\nVerified: relative error of logits against fp64 {checked['slim_error']:.3g} (bound "
            f"{checked['bound']:.3g}, ordinary {checked['ordinary_error']:.3g}); {checked['same_tokens']:.1%} of the "
            "most likely tokens are those of fp64."
        )


def _append_warnings(report: dict[str, Any], closing: Text) -> None:
    """Layers whose plan, which was asked for, exceeds the tolerance; and that a conversion saves nothing."""
    over = []
    for index, layer in enumerate(report["layers"]):
        name = "ordinary_int8" if layer["dtype"] in _EIGHT_BITS else "ordinary"
        if layer["output_error"] > report["tolerance"] * layer["measured"][name]["output_error"]:
            over.append(_layer(report, index))
    if over:
        layers = ", ".join(over)
        closing.append(f"\nLess accurate than --tolerance {report['tolerance']:g}: layers {layers}.", style="yellow")
    if all(layer["plan"] == "kv" for layer in report["layers"]):
        closing.append("\nAll layers keep keys and values: this conversion saves nothing.", style="yellow")


def _append_eight_bits(report: dict[str, Any], closing: Text) -> None:
    """The bytes of int8 keys and values, and why layers are not in 8 bits though these were asked for."""
    baselines = [layer["measured"]["ordinary_int8"] for layer in report["layers"]]
    if not all(baselines):
        return
    sizes = [baseline["bytes_per_token"] for baseline in baselines]
    if "encoder_tokens" in report:
        total = sum(sizes[::2]) * report["decoder_tokens"] + sum(sizes[1::2]) * report["encoder_tokens"]
        taken = bytes_text(total)
    else:
        taken = f"{bytes_text(sum(sizes))} per token"
    compared = any(layer["dtype"] in _EIGHT_BITS for layer in report["layers"])
    closing.append(
        f"\nKeys and values in int8, scales included, take {taken}"
        f"{'; for layers in 8 bits, vs KV compares with these' if compared else ''}."
    )
    asked = report["plan"] != "auto" or report["rank"] is not None
    for index, layer in enumerate(report["layers"]):
        tried = [
            one
            for one in layer["measured"]["candidates"]
            if one["dtype"] in _EIGHT_BITS and (not asked or cache_name(one) == cache_name(layer))
        ]
        if layer["dtype"] in _EIGHT_BITS or not tried:
            continue
        best = min(tried, key=lambda one: one["output_error"])
        ratio = _ratio(best["output_error"], layer["measured"]["ordinary_int8"]["output_error"])
        closing.append(
            f"\nLayer {_layer(report, index)}: not in {short_dtype(best['dtype'])}, which has at best {ratio} the "
            f"error of int8 keys and values ({cache_name(best)}).",
            style="yellow",
        )


def _full(report: dict[str, Any]) -> RenderableType:
    table = Table(title=f"{report['source']}, full again", title_justify="left", title_style="bold")
    table.add_column("layer", justify="right")
    table.add_column("was")
    table.add_column("error of W_V", justify="right")
    for index, layer in enumerate(report["layers"]):
        error = layer["recovered_error"]
        table.add_row(
            _layer(report, index),
            cache_name(layer),
            "unknown" if error is None else "exact" if not error else f"{error:.2e}",
        )
    closing = Text(
        "W_V = W_K M + W_E B, computed in fp64; its relative error against the original weights, as measured when "
        "these were converted. All other weights are the same."
    )
    _append_verification(report, closing)
    return Group(table, closing)


def cache_name(layer: dict[str, Any]) -> str:
    names = {"k": "keys", "kv": "keys, values", "k+r": f"keys+{layer['rank']}", "x": "inputs", "e": "nothing"}
    return names[layer["plan"]]


def _layer(report: dict[str, Any], index: int) -> str:
    """Number of a layer; of encoder-decoder models, which of its attentions too."""
    if "encoder_tokens" not in report:
        return str(index)
    return f"{index // 2} {'cross' if index % 2 else 'self'}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.0e}"  # of few digits, so that the table fits into 80 columns


def _error(value: float) -> str:
    if not value:
        return "exact"  # inputs that the model has in the cache's dtype
    return f"{value:.2%}" if value >= 1e-4 else _number(value)


def _ratio(error: float, ordinary: float) -> str:
    return f"{error / ordinary:.2f}x" if ordinary else "-"
