"""Quantities as texts: sizes, durations, ages, counts, numbers."""

from __future__ import annotations


def size_text(num_bytes: int) -> str:
    """Returns a number of bytes in the largest binary unit of which there is at least one.

    Examples:
        >>> size_text(0), size_text(1536), size_text(21 << 30)
        ('0 B', '1.5 KiB', '21.0 GiB')
    """
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            return f"{num_bytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} PiB"


def age_text(age_s: float) -> str:
    """Returns an age in seconds in its largest whole unit; `0s` for a time in the future.

    Examples:
        >>> age_text(59), age_text(3700), age_text(200_000)
        ('59s', '1h', '2d')
    """
    for unit, seconds in (("d", 86_400), ("h", 3600), ("m", 60)):
        if age_s >= seconds:
            return f"{int(age_s // seconds)}{unit}"
    return f"{max(0, int(age_s))}s"


def count_text(count: int, noun: str) -> str:
    """Returns a number with its noun, whose plural ends with an s.

    Examples:
        >>> count_text(1, "file"), count_text(1200, "file")
        ('1 file', '1200 files')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def number_text(value: float) -> str:
    """Returns a number in about four digits, without an exponent if possible.

    Examples:
        >>> number_text(2.31), number_text(0.000123456), number_text(12345.6)
        ('2.31', '0.0001235', '12346')
        >>> number_text(1229000.0), number_text(-3.2e9), number_text(7e21)
        ('1.229 M', '-3.2 G', '7e+21')
    """
    # Why from 999,999.5 on: below, it is rounded to six digits.
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if unit - 0.5 <= abs(value) < 1e15:
            return f"{value / unit:.4g} {name}"
    return f"{value:.0f}" if 1e4 <= abs(value) < 1e6 else f"{value:.4g}"


def seconds_text(seconds: float) -> str:
    """Returns a duration in about three digits, in milliseconds, seconds or minutes.

    Examples:
        >>> seconds_text(0.00042), seconds_text(0.0312), seconds_text(2.5), seconds_text(754)
        ('0.42 ms', '31.2 ms', '2.50 s', '12.6 min')
    """
    if seconds < 1:
        digits = 2 if seconds < 0.01 else 1 if seconds < 0.1 else 0
        return f"{seconds * 1e3:.{digits}f} ms"
    if seconds < 120:
        return f"{seconds:.{2 if seconds < 10 else 1}f} s"
    return f"{seconds / 60:.1f} min"
