"""What ranks compare, and how a difference is told."""

from __future__ import annotations

import pickle

import numpy as np
import torch

from hf_fastdecode.errors import PeerFailedError
from hf_fastdecode.parallel.ranks import ALONE, checksum, described, differences


def test_checksums_tell_content_and_order():
    ids = torch.arange(200).reshape(2, 100)
    assert checksum(ids) == checksum(ids.clone()) == checksum(ids.t().contiguous().t())
    others = [ids.flip(0), ids.flip(1), ids + (ids == 7), ids[:, :-1], torch.cat([ids, ids])]
    assert len({checksum(other) for other in [ids, *others]}) == 6
    assert checksum(torch.zeros(3, dtype=torch.bool)) != checksum(torch.ones(3, dtype=torch.bool))
    assert checksum(torch.zeros(5)) != checksum(-torch.zeros(5))
    assert checksum(torch.ones(7, dtype=torch.bfloat16)) != checksum(torch.ones(8, dtype=torch.bfloat16))


def test_values_are_described_by_what_counts():
    assert described(torch.tensor(3)) == "3"
    assert described(torch.zeros(2, 3)).startswith("float32 [2, 3] with content ")
    assert described([1, None, "a"]) == "[1, None, 'a']"
    assert described({"min": 2}) == "{min: 2}"
    assert described({"b", "a"}) == described({"a", "b"}) == "['a', 'b']"
    assert described(np.int64(3)) == "np.int64(3)"
    assert described(object()) == "object"


def test_differing_fields_are_named_with_their_values():
    same = {"max_new_tokens": "8", "top_k": "0"}
    assert differences([same, same, same | {"top_k": "5"}]) == "top_k is 0 on rank 0 and 5 on rank 2"
    assert differences([same, {"top_k": "0"}]) == "max_new_tokens is 8 on rank 0 and not given on rank 1"
    many = [{str(name): str(rank) for name in range(6)} for rank in range(2)]
    assert differences(many).endswith("3 is 0 on rank 0 and 1 on rank 1; and 2 more")


def test_a_process_alone_agrees_with_itself():
    tensor = torch.zeros(2)
    assert ALONE.first(tensor)[0] is tensor
    assert ALONE.all(True, False) == [True, False]
    assert ALONE.smallest(3, -1) == [3, -1]
    with ALONE.together() as offer:
        offer.compare(lambda: 1 / 0, "a call")
        offer.numbers = [3, -1]
    assert (offer.different, offer.numbers) == (None, [3, -1])


def test_the_error_of_a_failed_peer_has_its_rank_and_cause():
    error = pickle.loads(pickle.dumps(PeerFailedError(3, "KeyError: 'x'")))
    assert (error.rank, error.cause) == (3, "KeyError: 'x'")
    assert str(error) == "rank 3, with which this process computes the model, failed: KeyError: 'x'"
