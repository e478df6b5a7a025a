"""Shared-context attention: the data structures, the specification, and the operators that compute it.

Words, beside those of docs/how-it-works.md:
    own node: the head of a long suffix, which the kernels read as a node of one row (`launch.plan`).
    chain: short nodes that are read together with a node below them (`launch.plan`).
    slot: the storage row of a suffix. Beam search reorders rows without moving keys: a table of *origins* then tells
        which slot holds each token of a row's suffix (`cache.storage.SuffixOrigins`).
    unit, piece, program: a query tile of a node for one KV head; a part of a unit's keys; one thread block of the node
        kernel, with an equal share of all keys (`kernels/forest_decode/schedule.py`).

Lengths of suffixes in `ForestKV` count the tokens of the current step, those in `StepTables` and kernels do not.

One layer in one decode step: transformers' attention class calls ``update`` of `cache.layers.attention`, which returns
a `cache.handles.DecodeKV`, and then `interface.shared_context_attention`, which calls `DecodeKV.attend`. That runs
either

    kernels: `StepTables.follow` (addresses, lengths and schedules to the device), `StepTables.attend`,
        `kernels/forest_decode/api.py`; a captured step only `StepTables.attend`; or
    PyTorch: `torch_operators.decode_ops.forest_attention`, over keys and values to which it has appended the new ones.

A prefill pass gets a `cache.handles.PrefillKV`, which calls `launch.kernel_call.kernel_attention`, or where that
returns None, `torch_operators.prefill_ops.causal_attention`; a captured one the functions beside them for rows that
end in padding (`cache/captured_prefill.py`).
"""
