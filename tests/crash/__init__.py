"""Every operation is interrupted at every call of its storage, and the invariants are checked.

`own_operations` lists the operations, `interruptions` what can happen at a call, `crashes` plays it
all and `invariants` says what must hold afterwards. `system_calls` does the same at the level of
the kernel.
"""
