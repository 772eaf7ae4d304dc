"""Bytes on storage: frames of containers, the manifest, the chunk table, `.metadata`.

Pure functions from values to bytes and back; no torch, no ray, no disk.
"""
