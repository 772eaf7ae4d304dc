"""Every operation is interrupted at every call of its storage, and the invariants are checked.

`interruptions` says what can happen at a call of the storage or of the kernel, `crashes` lists the
operations and plays it all, and `invariants` says what must hold afterwards.
"""
