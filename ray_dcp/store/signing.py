"""Signs a request to S3 (AWS Signature Version 4): for the calls that our client does not offer.

Pure. Source: AWS, "Signature Version 4 signing process"; S3 encodes the path only once.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from urllib.parse import quote, urlsplit

__all__ = ["S3Credentials", "query_text", "signed_headers"]

_EMPTY = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True)
class S3Credentials:
    """Who asks; secrets are not shown."""

    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)


def query_text(query: Mapping[str, str]) -> str:
    """Returns a query in the form that is signed: sorted, and strictly encoded.

    Example:
        >>> query_text({"uploads": "", "prefix": "a/b c"})
        'prefix=a%2Fb%20c&uploads='
    """
    pairs = sorted((quote(name, safe="-_.~"), quote(query[name], safe="-_.~")) for name in query)
    return "&".join(f"{name}={value}" for name, value in pairs)


def signed_headers(
    method: str, url: str, credentials: S3Credentials, region: str, now: datetime
) -> dict[str, str]:
    """Returns the headers of a request without a body.

    Args:
        method: Such as `"GET"`.
        url: With a query as `query_text` makes it, and an encoded path.
        credentials: Who asks.
        region: Of the bucket.
        now: The time, in UTC.

    Example:
        >>> from datetime import datetime
        >>> someone = S3Credentials("AKIDEXAMPLE", "secret")
        >>> url = "https://b.s3.amazonaws.com/?uploads="
        >>> found = signed_headers("GET", url, someone, "us-east-1", datetime(2026, 1, 2))
        >>> found["x-amz-date"], found["authorization"][-11:]
        ('20260102T000000Z', 'a7b21489e9c')
    """
    parts = urlsplit(url)
    moment = now.strftime("%Y%m%dT%H%M%SZ")
    headers = {"host": parts.netloc, "x-amz-content-sha256": _EMPTY, "x-amz-date": moment}
    if credentials.session_token:
        headers["x-amz-security-token"] = credentials.session_token
    names = ";".join(sorted(headers))
    request = "\n".join(
        [
            method,
            parts.path or "/",
            parts.query,
            *(f"{name}:{headers[name]}" for name in sorted(headers)),
            "",
            names,
            _EMPTY,
        ]
    )
    scope = f"{moment[:8]}/{region}/s3/aws4_request"
    text = "\n".join(
        ["AWS4-HMAC-SHA256", moment, scope, hashlib.sha256(request.encode()).hexdigest()]
    )
    key = f"AWS4{credentials.secret_access_key}".encode()
    for step in scope.split("/"):
        key = hmac.digest(key, step.encode(), "sha256")
    signature = hmac.digest(key, text.encode(), "sha256").hex()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.access_key_id}/{scope}, "
        f"SignedHeaders={names}, Signature={signature}"
    )
    return headers
