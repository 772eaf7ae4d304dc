"""Staging: where the bytes of an asynchronous save are while training goes on."""
