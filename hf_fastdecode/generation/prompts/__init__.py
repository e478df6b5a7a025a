"""Shared-prefix detection and prefill of prompts.

Words for a prompt's tokens:
    stored: a cache holds their keys and values. The cache is the *given* one, which the caller passed, or one of the
        *prefix store*, which keeps the nodes of recent calls.
    reused: stored, and not computed again; `CallReport.known_tokens` counts them.
    new: computed by this call's prefill, which may be *packed* or *by rows*.
    shared, unshared: of several rows, or of one row alone. Unshared ones may be prefilled into the row's suffix.
    first pass: the first forward pass of another decoding loop, which prefills the prompts here.

`compare_prompts` finds what is stored and shared, `ComparedPrompts.plan` makes the call's one plan of it, and
`packed` or `by_rows` computes that.
"""
