"""Profiles: kinds of kernels, sums of a call, what a step takes, and their table."""

from __future__ import annotations

import pytest

from benchmarks.generate.profile import Kernel, Profile, kind_of


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_192x192_64x4_1x2_h_bz_coopA_TNT", "products"),
        ("hopper_row_products", "products"),
        ("hopper_node_partials", "attention"),
        ("attend_suffixes", "attention"),
        ("normalize", "pointwise"),
        ("sample_rows", "sampling"),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda(at::", "copies"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("something_new", "other"),
    ],
)
def test_kinds(name, kind):
    assert kind_of(name) == kind


def test_a_step_is_what_a_whole_call_takes_longer():
    prefill = [Kernel("a_gemm", 0, 40), Kernel("rotate", 50, 60)]
    first = Profile.of(prefill)
    assert (sum(first.kinds.values()), first.launches) == (50, 2)
    steps = [
        Kernel("row_products", 100, 180),
        Kernel("ns::attend<1>(int)", 170, 200),
        Kernel("row_products", 300, 380),
    ]
    whole = Profile.of(prefill + steps)
    step = whole.step(first, 2)
    found = [step.kinds[kind] for kind in ("products", "attention", "pointwise")]
    assert found == [80, 10, 0]  # where two overlap, the time counts once
    assert step.launches == 2
    assert step.columns()["largest"] == "row_products 80 us; attend 10 us; a_gemm 0 us; rotate 0 us"
    assert step.columns()["busy_ms"] == 0.09
