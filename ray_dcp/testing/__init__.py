"""What users and contributors need to test storages and savers: conformance suites, invariants."""
