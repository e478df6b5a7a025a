"""The fp64 oracle itself, against PyTorch's own attention over a physical copy of the keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from hf_fastdecode.attention import reference
from hf_fastdecode.attention.forest import Forest

from .exactness import FP64, PROPERTY, fp64_inputs
from .forests import last_queries_see, make_inputs, own_keys_and_values


@PROPERTY
@given(data=st.data())
def test_the_oracle_is_pytorchs_attention_over_a_physical_copy(data: st.DataObject) -> None:
    query, kv = data.draw(fp64_inputs())
    out, lse = reference.forest_attention(query, kv, 0.3)
    head_dim, value_dim = query.shape[-1], out.shape[-1]
    for row in range(query.shape[0]):
        keys, values = own_keys_and_values(kv, row)
        group = query.shape[1] // keys.shape[0]
        visible = last_queries_see(query.shape[2], keys.shape[1], "cpu")
        for head in range(query.shape[1]):
            own = query[row, head], keys[head // group], values[head // group]
            torch.testing.assert_close(
                out[row, head], F.scaled_dot_product_attention(*own, visible, scale=0.3), **FP64
            )
            weights = torch.exp(0.3 * own[0] @ own[1].T) * visible
            torch.testing.assert_close(lse[row, head], weights.sum(-1).log(), **FP64)
    assert (out.shape[-1], head_dim) == (value_dim, kv.suffix.keys.shape[-1])


def test_the_oracle_caps_scores_softly() -> None:
    query, kv = make_inputs(Forest(1), [3], heads=1, kv_heads=1, head_dim=4, dtype=torch.float64)
    scores = 2.0 * torch.tanh(0.5 * query[0, 0] @ kv.suffix.keys[0, 0, :3].T / 2.0)
    out, lse = reference.forest_attention(query, kv, 0.5, softcap=2.0)
    torch.testing.assert_close(lse[0, 0], scores.exp().sum(-1).log(), **FP64)
    torch.testing.assert_close(out[0, 0], torch.softmax(scores, -1) @ kv.suffix.values[0, 0, :3], **FP64)
