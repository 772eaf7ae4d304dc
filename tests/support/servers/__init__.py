"""Servers and proxies for tests."""
