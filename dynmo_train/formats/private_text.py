"""Text without the credentials of the URLs in it: what is written to files that others may read."""

from __future__ import annotations

import re
from typing import Any

HIDDEN = "***"
_USER = re.compile(r"(?<=://)[^/\s@'\"]+(?=@)")
# Of a signed address, such as X-Amz-Signature of S3, sig of Azure, or access_token.
_QUERY = re.compile(
    r"([?&;#][\w.-]*(?:token|secret|signature|password|credential|key|auth|\bsig)[\w.-]*=)[^&;\s'\"]+", re.IGNORECASE
)


def without_credentials(value: Any) -> Any:
    """A JSON value with ``***`` in place of users and passwords, and of secret parameters, of the URLs in it."""
    if isinstance(value, str):
        return _QUERY.sub(rf"\1{HIDDEN}", _USER.sub(HIDDEN, value)) if "://" in value else value
    if isinstance(value, dict):
        return {name: without_credentials(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [without_credentials(entry) for entry in value]
    return value
