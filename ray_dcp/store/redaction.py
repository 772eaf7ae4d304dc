"""`redacted` removes credentials from messages, as libraries may quote their options in errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

_SHORTEST = 4


def redacted(text: str, options: Mapping[str, object]) -> str:
    """Returns a text without the values of options that look like credentials.

    Args:
        text: Text of an error.
        options: Options as the user gave them; may be nested.

    Examples:
        >>> redacted("bad key hush-hush for eu-1", {"secret": "hush-hush", "region": "eu-1"})
        'bad key … for eu-1'
    """
    for value in sorted(_credentials(options), key=len, reverse=True):
        text = text.replace(value, "…")
    return text


def _credentials(options: Mapping[str, object]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _credentials(value)
        elif isinstance(value, str) and len(value) >= _SHORTEST and _is_credential(str(name)):
            yield value


def _is_credential(name: str) -> bool:
    # Why a list of harmless names: names of secrets differ between providers.
    harmless = ("endpoint", "region", "bucket", "account_name", "url", "host", "timeout")
    return not any(word in name.lower() for word in harmless)
