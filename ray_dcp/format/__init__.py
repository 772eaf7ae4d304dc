"""Bytes on storage: item frames of each container, the manifest, the chunk table, `.metadata`.

Pure functions from values to bytes and back; no torch, no ray, no disk.
"""
