"""Every operation is interrupted at every call of its storage, and the invariants are checked.

`registry` lists the operations, `interruptions` what can happen at a call, `crashes` plays it all
and `invariants` says what must hold afterwards. `system_calls` and `stock_calls` do the same at the
level of the kernel and for what stock DCP calls.
"""
