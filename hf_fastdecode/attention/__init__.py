"""Shared-context attention: the data structures, the specification, and the operators that compute it.

Words:
    partial: attention over some of the keys, ``(out, lse)``; partials over disjoint keys merge (`partial`).
    row, node, forest: a sequence being decoded; a run of tokens that is stored once for adjacent rows; all nodes of a
        batch (`forest`). A row's *path* is its nodes from the root down.
    suffix: a row's own tokens after its path: the unshared end of its prompt, and what it generated. `ForestKV` counts
        the tokens of the current step in its length; `StepTables` and the kernels count those before the step.
    own node: the head of a long suffix, which the kernels read as a node of one row (`launch.plan`).
    chain: short nodes that are read together with a node below them (`launch.plan`).
    slot: the storage row of a suffix. Beam search reorders rows without moving keys: a table of *origins* then tells
        which slot holds each token of a row's suffix (`cache.storage.SuffixOrigins`).
    step: one forward pass of all layers that appends `queries` tokens to every row, usually 1.
    unit, piece, program: a query tile of a node for one KV head; a part of a unit's keys; one thread block of the node
        kernel, with an equal share of all keys (`kernels/forest_decode/schedule.py`).

Read partial, forest, kv and reference first, then interface, torch_operators and launch.

One layer in one decode step: transformers' attention class calls ``update`` of `cache.layers.attention`, which returns
a `cache.handles.DecodeKV`, and then `interface.shared_context_attention`, which calls `DecodeKV.attend`. That asks
`launch.dispatch.Choices.of`, and runs either

    kernels: `StepTables.follow` (addresses, lengths and schedules to the device), `StepTables.attend`, `run_kernels`,
        `kernels/forest_decode/api.py`; a captured step only `StepTables.attend`, from `cache/captured.py`; or
    PyTorch: `torch_operators.decode_ops.forest_attention`, over keys and values to which it has appended the new ones.

A prefill pass gets a `cache.handles.PrefillKV`, which calls `launch.kernel_call.kernel_attention`, or where that
returns None, `torch_operators.prefill_ops.causal_attention`. A captured one calls, from `cache/captured_prefill.py`,
the functions beside them for rows that end in padding.

Who decides: `Choices.of` between kernels and PyTorch (unless a backend is forced), `choose_operator` among PyTorch's
operators, `choose_config` (called by `launch.plan`) on the kernel and its tiles, `choose_chains` on those for trees of
short nodes, and `LaunchPlan.programs` on how many programs nodes get while suffixes run beside them.

Where to add:
    A cache layout: a subclass of `cache.storage.TokenStorage` with `keys_and_values`, `nodes_for_steps` and
        `suffix_for_steps`, or, like `cache.layers.own`, with suffixes of another layout than nodes, for layers that
        attend by themselves. If the GPU is to read the stored form, also `launch.kernel_call` and a kernel, or
        `captured_in_place`.
    An architecture: usually nothing. Else an argument of its attention function in `interface._WITHOUT_EFFECT`; a
        score option in `kv.Scoring`, the reference and all operators; a kind of mask in
        `interface.shared_context_mask`; what cannot share in `generation/support/`.
"""
