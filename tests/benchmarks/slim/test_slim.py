"""Slim attention's bench on the CPU, the kernel interpreted: rows of right, wrong and failing kernels."""

import pytest
import torch

pytest.importorskip("triton")
from benchmarks.operator_time import Ceilings
from benchmarks.slim.cases import SLIM_SETS, SLIM_WAYS
from benchmarks.slim.measure import SlimBench, config_text, parse_config
from hf_fastdecode.files import read_rows
from hf_fastdecode.kernels.slim_decode import api
from hf_fastdecode.kernels.slim_decode import api as launches
from hf_fastdecode.kernels.slim_decode.api import TwoLaunchConfig

from ..cli import command_line

CASE = SLIM_SETS["tiny"][0]


@pytest.fixture
def bench():
    made = SlimBench(torch.device("cpu"))
    made._ops.ceilings = Ceilings(1e9, 1e10)
    return made


def run(*words):
    return command_line.run("slim", *words)


@pytest.mark.parametrize("way", SLIM_WAYS)
def test_every_way(bench, way):
    row = bench.measure(CASE, way)
    assert row["status"] == "ok"
    assert 0 <= row["error_ratio"] <= 2
    assert row["over_floor"] == pytest.approx(row["us_p50"] / row["floor_us"])
    assert row["bandwidth_share"] == pytest.approx(1 / row["over_floor"])
    assert row["floor_us"] == pytest.approx(row["bytes"] / 1e3)


def test_bytes_of_the_ways():
    case = SLIM_SETS["grid"][0]
    values, keys, both = (case.bytes(way, 2) for way in ("flash", "slim-k", "slim-k+r"))
    assert keys / values == pytest.approx(0.5, rel=0.01)
    assert both / keys == pytest.approx(1.125, rel=0.01)


def test_bytes_of_8_bits_are_those_that_a_cache_has(bench):
    """Numbers, and a scale of 2 bytes for each head or as many V-coordinates; the rest is as in 16 bits."""
    case = SLIM_SETS["grid"][0]
    for way, scales in (("slim-k-int8", 32), ("slim-k-fp8", 32), ("slim-k+r-int8", 32 + 4)):
        numbers = 4096 + 512 * ("+r" in way)
        assert case.bytes(way, 1) == case.bytes(way, 2) - 32_768 * (numbers - 2 * scales)
    small = SLIM_SETS["tiny"][1]
    (inputs,) = bench._inputs(small, "slim-k+r-int8:parts=1")
    assert inputs.keys.untyped_storage().nbytes() == 2 * 20 * (64 + 2 * 2)
    assert inputs.coordinates.untyped_storage().nbytes() == 2 * 20 * (8 + 2)


def test_a_wrong_kernel_gets_no_times(bench, monkeypatch):
    right = api.slim_decode

    def wrong(*arguments, **options):
        found = right(*arguments, **options)
        return found._replace(keys=found.keys * 1.01)

    monkeypatch.setattr(api, "slim_decode", wrong)
    row = bench.measure(CASE, "slim-k")
    assert row["status"].startswith("wrong: it errs ")
    assert row["us_p50"] is row["over_floor"] is None


def test_a_failing_configuration_does_not_stop_the_others(bench, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(launches, "slim_partials", None)
        row = bench.measure(CASE, "slim-k")
    assert row["status"].startswith("failed: KernelFailedError: the slim decode kernel cannot run on cpu: ")
    assert "with names own_heads" in bench.measure(CASE, "slim-k:tiles=1")["status"]
    assert bench.measure(CASE, "slim-k:parts=1")["status"] == "ok"


def test_the_command(tmp_path):
    out = tmp_path / "slim.csv"
    words = ("--device", "cpu", "--only", "n2-", "--way", "slim-k", "--way", "flash", "--out", out)
    result = run(*words, "--config", "parts=1")
    assert result.exit_code == 0, result.stderr
    assert [row["way"] for row in read_rows(out)] == ["slim-k", "flash", "slim-k:parts=1"]
    assert "| 2 | 20 | slim-k | " in result.stdout
    result = run(*words, "--config", "nosuch=1")
    assert result.exit_code == 1
    assert "| 2 | 20 | flash | " in result.stdout


def test_configurations_are_parsed():
    config = parse_config("own_heads=8,parts=1,block_t=64", TwoLaunchConfig(4))
    assert config == TwoLaunchConfig(8, block_t=64, parts=1)
    assert parse_config(config_text(config), TwoLaunchConfig(1)) == config
    assert parse_config("", config) == config
    for text in ("tiles=3", "parts", "parts=x"):
        with pytest.raises(ValueError, match="with names own_heads, block_t"):
            parse_config(text, config)
