"""Keys and V-coordinates in 8 bits: dequantised on chip, against the fp64 oracle of what PyTorch dequantises."""

import pytest
import torch

pytest.importorskip("triton")
from hf_fastdecode.kernels import failures
from hf_fastdecode.kernels import limits as devices
from hf_fastdecode.kernels.slim_decode import api, inputs
from hf_fastdecode.kernels.slim_decode.api import ClusterConfig, Scales, TwoLaunchConfig, choose_config, slim_decode
from hf_fastdecode.kernels.slim_decode.inputs import Arguments, is_aligned

from .problems import Case, make_problem
from .test_slim_decode import DEVICE, FP8, INT8, small


@pytest.mark.parametrize("magnitude", [1e-36, 1e-20, 1e30])
def test_the_range_is_that_of_fp32(magnitude):
    """Averages of numbers far outside the range of fp16."""
    make_problem(Case((70, 20), rank=8, dtype=INT8, offset=False), DEVICE).check_magnitude(small(), magnitude)


@pytest.mark.parametrize("aligned", [True, False])
def test_clusters_give_way(aligned, monkeypatch):
    """To two launches, where tokens cannot be copied by 16 bytes, and where the kernel fails, as on a CPU."""
    monkeypatch.setattr(api, "_has_clusters", lambda device: failures.failure(failures.Kernel.CLUSTER, device) is None)
    monkeypatch.setattr(failures, "_failures", {})
    case = Case((70,), heads=8, head_dim=64, rank=16, rotary=0, dtype=INT8, consecutive=aligned)
    problem, config = make_problem(case), choose_config(8, 64, 16, INT8, torch.device("cpu"))
    assert isinstance(config, ClusterConfig)
    problem.check(problem.run())
    assert (failures.failure(failures.Kernel.CLUSTER, torch.device("cpu")) is not None) == aligned
    if not aligned:
        with pytest.raises(ValueError, match="rows and slots of keys must begin at multiples of 16 bytes"):
            problem.run(config)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0)], ids=str)
def test_fp8_is_refused_where_triton_does_not_convert_it(capability, monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    for module in (devices, inputs):
        monkeypatch.setattr(module, "compute_capability", lambda _: capability)
    with FakeTensorMode():
        for dtype in (INT8, FP8):
            keys, coordinates = (torch.empty(1, 9, width, dtype=dtype, device="cuda") for width in (128, 0))
            found = inputs.refusal(torch.empty(1, 2, 1, 64, device="cuda"), keys, coordinates)
            if dtype == FP8 and capability < (8, 9):
                assert f"float8_e4m3fn from compute capability 8.9, got 8.{capability[1]}; int8 runs here" in found
            else:
                assert found is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": None}, "keys in torch.int8 need scales, got None; pass Scales"),
        ({"keys": torch.zeros(2, 9, 64).half()}, "coordinates must be .* torch.float16, got .* torch.int8"),
        ({"query": torch.zeros(2, 4, 1, 16).half()}, "query must be float32, contiguous .* got torch.float16"),
        ({"scales": "short"}, r"scales of keys must be \[2, 9, 8\] uint8 on cpu, got \[2, 9, 6\] torch.uint8"),
        ({"scales": "bf16"}, r"scales of coordinates must be \[2, 9, 4\] uint8 on cpu, got .* torch.bfloat16"),
        ({"scales": "copied"}, r"scales of keys must have the strides of keys, \(648, 72, 1\), got \(72, 8, 1\)"),
    ],
    ids=str,
)
def test_arguments_are_checked(change, message):
    keys, coordinates = torch.zeros(2, 9, 72, dtype=torch.uint8), torch.zeros(2, 9, 23, dtype=torch.uint8)
    scales = Scales(keys[..., 64:], coordinates[..., 19:])
    others = {
        "short": scales._replace(keys=scales.keys[..., :6]),
        "bf16": scales._replace(coordinates=scales.coordinates.bfloat16()),
        "copied": scales._replace(keys=scales.keys.contiguous()),
    }
    given = {"query": torch.zeros(2, 4, 1, 16), "keys": keys[..., :64].view(INT8), "scales": scales, "scale": 1.0}
    given |= {"coordinates": coordinates[..., :19].view(INT8), "lengths": torch.zeros(2, dtype=torch.int32)}
    change = {name: others.get(value, value) if isinstance(value, str) else value for name, value in change.items()}
    slim_decode(**given, config=TwoLaunchConfig(4))
    with pytest.raises(ValueError, match=message):
        slim_decode(**given | change, config=TwoLaunchConfig(4))


def test_clusters_read_scales_by_2_bytes():
    """Wherever else they begin."""
    stored = torch.zeros(2, 9, 80, dtype=torch.uint8)
    keys, scales, lengths = stored[..., :64].view(INT8), stored[..., 66:74], torch.zeros(2, dtype=torch.int32)
    query, coordinates = torch.zeros(2, 4, 1, 16), keys[..., :0]
    given = Arguments(query, keys, coordinates, lengths, 1.0, None, None, None, Scales(scales, scales))
    assert all(is_aligned(*part) for part in given.copied.values())
    odd = given._replace(scales=Scales(stored[..., 65:73], scales))
    assert not is_aligned(*odd.copied["scales of keys"])


def test_scales_are_for_8_bits_only():
    keys, lengths = torch.zeros(1, 9, 64).half(), torch.zeros(1, dtype=torch.int32)
    scales = Scales(*(torch.zeros(1, 9, width, dtype=torch.uint8) for width in (8, 0)))
    with pytest.raises(ValueError, match=r"scales are for keys in int8 and float8_e4m3fn, got torch\.float16"):
        slim_decode(torch.zeros(1, 4, 1, 16), keys, keys[..., :0], lengths, scale=1.0, scales=scales)
