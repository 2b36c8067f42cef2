"""HTTP requests of one hop each, over connections to addresses that were checked.

A public page may link or redirect to an address of the network that the fetcher runs in (server-side request forgery).
The check is made on the resolved address, and the connection is made to that very address: a second resolution
could give another one (DNS rebinding). Redirects are returned, not followed, so that the caller checks each target.
Proxies of the environment are not used: they would resolve and connect in place of this module.
"""

from __future__ import annotations

import functools
import http.client
import ipaddress
import socket
import ssl
import string
from collections.abc import Iterable
from dataclasses import dataclass
from email.message import Message
from urllib.parse import quote, urljoin, urlsplit, urlunsplit

from .._common.errors import UsageError
from .url_filter import UNSENDABLE

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

DEFAULT_PORTS = {"http": 80, "https": 443}
REDIRECTS = (301, 302, 303, 307, 308)
NAT64 = ipaddress.ip_network("64:ff9b::/96")


class FetchError(Exception):
    """Why a URL gave no document, in one word or a status."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """One answer of a server.

    Attributes:
        status: HTTP status, 200 to 299 or one of ``REDIRECTS``.
        location: absolute URL that a redirect names; empty otherwise.
        headers: header fields.
        payload: body, at most ``limit`` bytes.
        is_whole: the body was not longer than ``limit``.
    """

    status: int
    location: str
    headers: Message
    payload: bytes
    is_whole: bool


def is_public(address: Address) -> bool:
    """Whether an address is one of the public internet, with IPv4 addresses inside IPv6 ones looked at as such."""
    if isinstance(address, ipaddress.IPv6Address):
        embedded = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if embedded is None and address in NAT64:
            embedded = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        if embedded is not None:
            return is_public(embedded)
        if address.is_site_local:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


@dataclass(frozen=True, kw_only=True)
class AllowedHosts:
    """Networks and host names that may be connected to although their addresses are not public.

    Attributes:
        networks: networks, of one address too.
        names: host names, lower-cased.
    """

    networks: tuple[Network, ...] = ()
    names: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, values: Iterable[str]) -> AllowedHosts:
        """Read values of ``--allow-host``: an address, a network (CIDR) or a host name each.

        Raises:
            UsageError: a value is none of these.
        """
        networks: list[Network] = []
        names: set[str] = set()
        for value in values:
            try:
                networks.append(ipaddress.ip_network(value.strip("[]"), strict=False))
            except ValueError as error:
                name = value.lower().rstrip(".")
                if not name or set(name) - set(string.ascii_lowercase + string.digits + "-._"):
                    raise UsageError(
                        f"--allow-host {value!r}: must be an address, a network such as 10.0.0.0/8, or a host name"
                    ) from error
                names.add(name)
        return cls(networks=tuple(networks), names=frozenset(names))

    def allows(self, host: str, address: str) -> bool:
        """Whether a host may be connected to at this address."""
        parsed = ipaddress.ip_address(address.partition("%")[0])
        if is_public(parsed) or host.lower().rstrip(".") in self.names:
            return True
        mapped = getattr(parsed, "ipv4_mapped", None)
        return any(one in network for network in self.networks for one in (parsed, mapped) if one is not None)


def sendable(url: str) -> str:
    """The URL in ASCII: its host by IDNA, what else is not ASCII as percent-encoded UTF-8; without credentials.

    Raises:
        FetchError: it is not of the web, or malformed.
    """
    try:
        parts = urlsplit(url)
        if parts.scheme not in DEFAULT_PORTS:
            raise FetchError("scheme")
        if not parts.hostname or UNSENDABLE.search(url):
            raise FetchError("malformed")
        host = parts.hostname if parts.hostname.isascii() else parts.hostname.encode("idna").decode()
        netloc = f"[{host}]" if ":" in host else host
        if parts.port is not None:
            netloc += f":{parts.port}"
    except ValueError as error:
        raise FetchError("malformed") from error
    path, query = (quote(part, safe=string.punctuation) for part in (parts.path, parts.query))
    return urlunsplit(parts._replace(netloc=netloc, path=path, query=query, fragment=""))


def without_credentials(url: str) -> str:
    """The URL as it is, but without ``user:password@``."""
    before, slashes, delay_next = url.partition("//")
    end = min((at for sign in "/?#" if (at := delay_next.find(sign)) >= 0), default=len(delay_next))
    return before + slashes + delay_next[:end].rpartition("@")[2] + delay_next[end:]


def _connect(host: str, port: int, timeout_s: float, allowed: AllowedHosts) -> socket.socket:
    """A connection to the first address of a host that may be connected to and answers."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    usable = [entry for entry in found if allowed.allows(host, str(entry[4][0]))]
    if not usable:
        raise FetchError("internal address")
    failure: OSError | None = None
    for family, kind, protocol, _, address in usable:
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(timeout_s)
            connection.connect(address)
        except OSError as error:
            connection.close()
            failure = error
        else:
            return connection
    raise failure or OSError("no address")


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _open(url: str, user_agent: str, timeout_s: float, allowed: AllowedHosts) -> http.client.HTTPConnection:
    """Send a GET request for a URL of ``sendable``."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or DEFAULT_PORTS[parts.scheme]
    is_tls = parts.scheme == "https"
    connection = (  # the class decides whether the Host field names the port
        http.client.HTTPSConnection(host, port, timeout=timeout_s, context=_tls())
        if is_tls
        else http.client.HTTPConnection(host, port, timeout=timeout_s)
    )
    raw = _connect(host, port, timeout_s, allowed)
    connection.sock = raw
    try:
        if is_tls:
            connection.sock = _tls().wrap_socket(raw, server_hostname=host)
        target = urlunsplit(("", "", parts.path or "/", parts.query, ""))
        connection.request("GET", target, headers={"User-Agent": user_agent, "Connection": "close"})
    except BaseException:
        raw.close()
        connection.close()
        raise
    return connection


def get(url: str, *, user_agent: str, timeout_s: float, limit: int, allowed: AllowedHosts) -> Response:
    """Request a URL and read the answer; a redirect is returned as it is.

    Args:
        url: as ``sendable`` gives it.
        user_agent: name in the request.
        timeout_s: seconds that the server may be silent.
        limit: bytes of the body that are read.
        allowed: hosts that may have addresses that are not public.

    Raises:
        FetchError: the host has internal addresses only, nothing answers ("connection", "timeout"), or the status is
            neither of success nor a redirect.
    """
    try:
        connection = _open(url, user_agent, timeout_s, allowed)
        try:
            return _read(url, connection.getresponse(), limit)
        finally:
            connection.close()
    except TimeoutError as error:
        raise FetchError("timeout") from error
    except (OSError, ValueError, http.client.HTTPException) as error:  # the last: no HTTP, or cut off
        late = "timed out" in str(error)
        raise FetchError("timeout" if late else "connection") from error


def _read(url: str, answer: http.client.HTTPResponse, limit: int) -> Response:
    location = answer.headers.get("Location")
    if answer.status in REDIRECTS and location:
        return Response(
            status=answer.status,
            # Sent as it is by many servers; http.client decoded its bytes as Latin-1.
            location=urljoin(url, quote(location.strip(), safe=string.punctuation, encoding="iso-8859-1")),
            headers=answer.headers,
            payload=b"",
            is_whole=True,
        )
    if not 200 <= answer.status < 300:
        raise FetchError(str(answer.status))
    payload = answer.read(limit + 1)
    is_whole = len(payload) <= limit
    if is_whole and answer.length:
        raise FetchError("connection")  # it ended before the page did
    return Response(
        status=answer.status, location="", headers=answer.headers, payload=payload[:limit], is_whole=is_whole
    )
