"""Parameters that several processes divide while they train, gathered for one call that decodes.

- `parameters`: the protocol of what divides them (`Gathering`), and gathered parameters in the modules' places.
- `memory`: memory for the time of a call, at the same addresses in every call.
- `fsdp`: FSDP 2 and FSDP 1.
- `zero`: ZeRO-3.
- `call`: which of them divides a model, the agreement of its processes, and the call within.
"""
