"""HTTP requests of one hop, with connections to checked addresses only.

A public page may link or redirect to an address of the internal network (server-side request forgery). The resolved
address is checked, and the connection uses this very address: a second resolution could return another one (DNS
rebinding). Redirects are returned, not followed, so that the caller checks each target. Proxies of the environment are
ignored: they would resolve and connect on their own.
"""

from __future__ import annotations

import functools
import http.client
import ipaddress
import socket
import ssl
import string
import zlib
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
# RFC 6052: the last 32 bits are an IPv4 address, to which a gateway of the network connects.
NAT64 = ipaddress.ip_network("64:ff9b::/96")


class FetchError(Exception):
    """Why a URL has no document: one word or an HTTP status."""


@dataclass(frozen=True, kw_only=True)
class Response:
    """One response of a server.

    Attributes:
        status: HTTP status, 200 to 299 or one of ``REDIRECTS``.
        location: absolute URL of a redirect; empty otherwise.
        headers: header fields.
        payload: body, at most ``limit`` bytes.
        is_whole: the body is not longer than ``limit``.
    """

    status: int
    location: str
    headers: Message
    payload: bytes
    is_whole: bool


def is_public(address: Address) -> bool:
    """Whether an address is on the public internet; embedded IPv4 addresses in IPv6 are checked as IPv4."""
    if isinstance(address, ipaddress.IPv6Address):
        # Such an address reaches the IPv4 host in it: ::ffff:127.0.0.1 is this machine.
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
    """Networks and host names that may be used although their addresses are internal.

    Attributes:
        networks: networks, including single addresses.
        names: host names, lower-cased.
    """

    networks: tuple[Network, ...] = ()
    names: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, values: Iterable[str]) -> AllowedHosts:
        """Parse values of ``--allow-host``: addresses, networks (CIDR) or host names.

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
        """Whether a connection to this address of a host is allowed."""
        parsed = ipaddress.ip_address(address.partition("%")[0])
        if is_public(parsed) or host.lower().rstrip(".") in self.names:
            return True
        mapped = getattr(parsed, "ipv4_mapped", None)
        return any(one in network for network in self.networks for one in (parsed, mapped) if one is not None)


def sendable(url: str) -> str:
    """The URL in ASCII: host by IDNA, other characters as percent-encoded UTF-8, without credentials.

    Raises:
        FetchError: the URL is malformed, or its scheme is not HTTP.
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
    # All ASCII punctuation stays, also "%": text that is percent-encoded already must not be encoded twice.
    path, query = (quote(part, safe=string.punctuation) for part in (parts.path, parts.query))
    return urlunsplit(parts._replace(netloc=netloc, path=path, query=query, fragment=""))


def without_credentials(url: str) -> str:
    """The URL without ``user:password@``."""
    before, slashes, rest = url.partition("//")
    # The authority ends at the first of these signs; an "@" after it belongs to the path or query.
    end = min((at for sign in "/?#" if (at := rest.find(sign)) >= 0), default=len(rest))
    return before + slashes + rest[:end].rpartition("@")[2] + rest[end:]


def _connect(host: str, port: int, timeout_s: float, allowed: AllowedHosts) -> socket.socket:
    """Connect to the first allowed address of a host that responds."""
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


# Once per process: creating it loads the certificates of the system.
@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


def _open(url: str, user_agent: str, timeout_s: float, allowed: AllowedHosts) -> http.client.HTTPConnection:
    """Send a GET request for a URL of ``sendable``."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or DEFAULT_PORTS[parts.scheme]
    is_tls = parts.scheme == "https"
    connection = (  # the class determines whether the Host field has the port
        http.client.HTTPSConnection(host, port, timeout=timeout_s, context=_tls())
        if is_tls
        else http.client.HTTPConnection(host, port, timeout=timeout_s)
    )
    # ``HTTPConnection.connect`` would resolve the name itself. With a socket in place, it is never called.
    raw = _connect(host, port, timeout_s, allowed)
    connection.sock = raw
    try:
        if is_tls:
            # The certificate is checked against the name of the URL, not against the address.
            connection.sock = _tls().wrap_socket(raw, server_hostname=host)
        target = urlunsplit(("", "", parts.path or "/", parts.query, ""))
        connection.request("GET", target, headers={"User-Agent": user_agent, "Connection": "close"})
    except BaseException:
        # The caller has no connection to close yet; Ctrl-C must not leave the socket open either.
        raw.close()
        connection.close()
        raise
    return connection


def get(url: str, *, user_agent: str, timeout_s: float, limit: int, allowed: AllowedHosts) -> Response:
    """Send a GET request and read the response; redirects are returned.

    Args:
        url: result of ``sendable``.
        user_agent: User-Agent header.
        timeout_s: timeout of a connection or read, in seconds.
        limit: maximum bytes of the body to read.
        allowed: hosts that may have internal addresses.

    Raises:
        FetchError: the host has internal addresses only, the request failed ("connection", "timeout"), or the status
            is neither success nor a redirect.
    """
    try:
        connection = _open(url, user_agent, timeout_s, allowed)
        try:
            return _read(url, connection.getresponse(), limit)
        finally:
            connection.close()
    except TimeoutError as error:
        raise FetchError("timeout") from error
    except (OSError, ValueError, http.client.HTTPException) as error:  # HTTPException: not HTTP, or truncated
        late = "timed out" in str(error)
        raise FetchError("timeout" if late else "connection") from error


def _decompressed(payload: bytes, name: str, limit: int) -> bytes:
    """At most ``limit`` bytes of a body without its ``Content-Encoding``; servers compress also without being asked."""
    try:
        if not payload or name in ("", "identity"):
            return payload
        if name in ("gzip", "x-gzip"):
            return _inflated(payload, 16 + zlib.MAX_WBITS, limit)
        if name == "deflate":
            # RFC 9110 wants the header of zlib; some servers leave it out.
            has_header = payload[0] & 15 == 8 and int.from_bytes(payload[:2], "big") % 31 == 0
            return _inflated(payload, zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS, limit)
    except (zlib.error, EOFError) as error:
        raise FetchError(f"damaged {name}") from error
    raise FetchError(f"content encoding {name}")


def _inflated(payload: bytes, window_bits: int, limit: int) -> bytes:
    pieces: list[bytes] = []
    while payload and limit > 0:
        decoder = zlib.decompressobj(window_bits)
        pieces.append(decoder.decompress(payload, limit))
        limit -= len(pieces[-1])
        if limit > 0 and not decoder.eof:
            raise EOFError
        # A gzip stream may have several members. Zero bytes after the last one are padding.
        payload = decoder.unused_data.lstrip(b"\0") if window_bits > zlib.MAX_WBITS else b""
    return b"".join(pieces)


def _read(url: str, answer: http.client.HTTPResponse, limit: int) -> Response:
    location = answer.headers.get("Location")
    if answer.status in REDIRECTS and location:
        return Response(
            status=answer.status,
            # Many servers send it unquoted; http.client decoded its bytes as Latin-1.
            location=urljoin(url, quote(location.strip(), safe=string.punctuation, encoding="iso-8859-1")),
            headers=answer.headers,
            payload=b"",
            is_whole=True,
        )
    if not 200 <= answer.status < 300:
        raise FetchError(str(answer.status))
    # One byte more than the limit: a body of exactly the limit is complete, a longer one is not.
    payload = answer.read(limit + 1)
    if len(payload) <= limit:
        if answer.length:
            raise FetchError("connection")  # closed before the end of the page
        # The last encoding was applied last.
        for name in reversed((answer.headers.get("Content-Encoding") or "").lower().split(",")):
            payload = _decompressed(payload, name.strip(), limit + 1)
    is_whole = len(payload) <= limit
    return Response(
        status=answer.status, location="", headers=answer.headers, payload=payload[:limit], is_whole=is_whole
    )
