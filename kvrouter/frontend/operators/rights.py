"""Who may use the routes for operators: those that show or change a replica's state, and dry runs.

    clients' port     no client; with --admin-key-file, clients that send `Authorization: Bearer KEY`, and
                      browsers whose user has given KEY as the password (KeyGate)
                      with --keys-file every other route but the probes needs a client's key (keys/clients.py)
    admin listener    peers on loopback, and peers that send `Authorization: Bearer KEY` (AdminGate)

A browser on an operator's machine is a peer on loopback, and so is every page that it shows. So the admin
listener checks, before it routes, that a request does not come from a page of another site:

    Sec-Fetch-Site, Origin    the browser says which site asks
    Host                      a foreign name leads here if its owner changes its DNS (DNS rebinding)
    content type              what pages may send unasked (forms, text/plain, no type at all) is no JSON

PROBES are free of all this: probes and scrapers have no key, and use any name. The page's own files are
static and free of the key, which the page asks for.
"""

from __future__ import annotations

import base64
import hmac
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TypeAlias

from kvrouter.bodies.apis import Api, unnamed
from kvrouter.errors import (
    BodyTypeError,
    ForeignRequestError,
    HeadTooLargeError,
    KvRouterError,
    NoAdminKeyError,
    OperatorsOnlyError,
    PeerNotAllowedError,
    UnknownKeyError,
    WrongAdminKeyError,
)
from kvrouter.frontend.keys.clients import (
    ALL,
    Caller,
    ClientKeys,
    KnownHead,
    check_expiry,
    check_head,
    key_in,
    without_key,
)
from kvrouter.frontend.keys.keys_file import Key, Keys
from kvrouter.frontend.requests import engine_routes
from kvrouter.frontend.settings import ClientsOptions
from kvrouter.observe.dashboard.page import FILES_PATH, PAGE_PATH
from kvrouter.relay.answer import Answer
from kvrouter.relay.request import Request

Gate: TypeAlias = Callable[[str, Mapping[str, str]], None]
"""Gets what is requested and the request's headers. Raises KvRouterError to reject the request."""

PROBES = frozenset({"/live", "/ready", "/metrics"})
"""Paths of the admin listener that anyone may read."""
_READS = frozenset({"GET", "HEAD"})
# A proxy on this host passes on what others send: its address is not theirs. Each adds some of these headers:
# RFC 7239 and 9110, nginx, HAProxy, Envoy, Traefik, IIS, and those of clouds and CDNs. `via` and `forwarded`
# are no part of a longer name: clients have headers such as `x-via-app`.
_FORWARDED = re.compile(
    r"via|(?:x-)?forwarded(?:-.*)?|cdn-loop|x-(?:original|envoy|proxy|proxied|amzn|azure|appengine|arr)-.*"
    r"|(?:.*-)?(?:client|real|remote|connecting|originating|proxyuser|source)-?(?:ip|ipv6|addr|address|host)"
)
# uri-host [ ":" port ] (RFC 3986): an address in brackets, or a name of labels.
_AUTHORITY = re.compile(
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<name>(?:[A-Za-z0-9_-]{1,63}\.)*[A-Za-z0-9_-]{1,63})\.?)"
    r"(?::(?P<port>[0-9]{0,5}))?"
)
_MOST_PORT = 65535
_MOST_AUTHORITY = 300
# The types that a page may send to another site without asking it first (Fetch standard, CORS-safelisted).
_FORM = "multipart/form-data"
_UNASKED = frozenset({"text/plain", "application/x-www-form-urlencoded", _FORM})
_HTTP_PORTS = {"http": 80, "https": 443}


def open_gate(_requested: str, _headers: Mapping[str, str]) -> None:
    """The gate of routes for all, and of the admin listener's: AdminGate has let the request in."""


def has_operators_routes(gate: Gate) -> bool:
    """Whether a client with the right key, if one is needed, is let in."""
    try:
        gate("", {})
    except OperatorsOnlyError:
        return False
    except WrongAdminKeyError:
        pass
    return True


def lets_in(gate: Gate, headers: Mapping[str, str]) -> bool:
    """Whether a request with these headers may use the routes for operators."""
    try:
        gate("", headers)
    except (OperatorsOnlyError, WrongAdminKeyError):
        return False
    return True


class AdminKey:
    """The key of --admin-key-file, for both ports. None: there is no key."""

    def __init__(self, key: str | None) -> None:
        self._key = key
        self.is_set = key is not None

    def change(self, key: str | None) -> bool:
        """Use this key from now on; returns whether it is another one."""
        changed, self._key, self.is_set = key != self._key, key, key is not None
        return changed

    def is_in(self, headers: Mapping[str, str], *, as_password: bool = False) -> bool:
        """Whether a request has it. `as_password`: Basic credentials are taken, too."""
        if self._key is None:
            return False
        scheme, _, given = headers.get("authorization", "").partition(" ")
        scheme = scheme.lower()
        if scheme == "basic" and as_password:
            scheme, given = "bearer", _password(given)
        # compare_digest: the time it takes does not reveal how much of the key is right
        is_right = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), self._key.encode())
        return is_right and scheme == "bearer"


class Rights:
    """What the clients of a port may do and see. Those that its gate lets in may do and see everything."""

    def __init__(
        self,
        gate: Gate,
        key: AdminKey,
        options: ClientsOptions | None = None,
        keys: ClientKeys | None = None,
    ) -> None:
        """`options`: None: all may do and see everything. `keys`: of clients; None: they need none."""
        self.gate = gate
        self._keys = keys or ClientKeys()
        self._is_operators = options is None
        self.key = key
        """The operators', which no worker gets."""
        self._shows_workers = options is None or "headers" in options.expose
        self._obeys_clients = options is None or options.client_overrides == "on"
        has_keys = self._keys.now is not None
        self.are_limited = has_keys or not (self._shows_workers and self._obeys_clients)
        """Whether some clients may not do or see everything."""

    def sees_workers(self, request: Request) -> bool:
        """Whether the client may see names of workers and peers, in headers, errors and reports."""
        keys = self._keys.now
        if keys is None or self._is_operators:
            return self._shows_workers or lets_in(self.gate, request.headers)
        try:
            return self._known(request, keys).client.sees_workers
        except (UnknownKeyError, HeadTooLargeError):
            return False

    def key_of(self, request: Request) -> Key | None:
        """The client's key; None: it is an operator, or no keys are in use. Raises UnknownKeyError."""
        keys = self._keys.now
        return None if keys is None else self._known(request, keys).client.key

    def need_key(self, requested: str, headers: Mapping[str, str]) -> None:
        """The gate of what clients with a key may see, if keys are in use."""
        keys = self._keys.now
        if keys is not None and not self._is_operator(requested.partition(" ")[0], headers):
            key_in(headers, keys)

    def need_operator(self, requested: str, headers: Mapping[str, str]) -> None:
        """The gate of what shows all tenants: for everyone while no keys are in use."""
        if self._keys.now is not None:
            self.gate(requested, headers)

    def _is_operator(self, method: str, headers: Mapping[str, str]) -> bool:
        # a password only for what reads, as KeyGate has it
        return self._is_operators or self.key.is_in(headers, as_password=method in _READS)

    def form(self, api: Api, request: Request) -> Api:
        """The API as the client of this request gets it: the one place where errors lose names."""
        return api if self.sees_workers(request) else unnamed(api)

    def error_answer(self, request: Request, error: KvRouterError, request_id: str) -> Answer:
        """The answer to a request that no worker's route serves."""
        api = engine_routes.api_of(request.head.route)
        return self.form(api, request).error_answer(error, request_id)

    def unread_answer(self, path: str, error: KvRouterError, request_id: str) -> Answer:
        """The answer to a request whose headers were not read."""
        api = engine_routes.api_of(path)
        shows = self._shows_workers and (self._is_operators or self._keys.now is None)
        return (api if shows else unnamed(api)).error_answer(error, request_id)

    def of(self, request: Request) -> Caller:
        """What the client may do and see. Raises UnknownKeyError.

        From now on the request is without its key, if that is known here: no worker gets it.
        """
        keys = self._keys.now
        if keys is not None:
            known = request.head.known
            # checked here, too: a call of `_known` takes 0.3 % of a request
            if not isinstance(known, KnownHead) or known.keys is not keys or known.expiring is not None:
                known = self._known(request, keys)
            request.head = known.bare
            return known.client
        if self.key.is_in(request.headers, as_password=True):
            request.head = request.head.without("authorization")
        is_free = not self.are_limited or lets_in(self.gate, request.headers)
        return Caller(is_free or self._obeys_clients, is_free or self._shows_workers)

    def _known(self, request: Request, keys: Keys) -> KnownHead:
        known = request.head.known
        if isinstance(known, KnownHead) and known.keys is keys:
            if known.expiring is not None:
                check_expiry(known.expiring)
            return known
        # by `request.headers`: the head may be without its key already
        if self._is_operator(request.head.method, request.headers):  # not kept: the operators' key may change
            return KnownHead(keys, ALL, without_key(request, keys), None)
        try:
            key = key_in(request.headers, keys)
            check_head(key, request.head.fields)
        except (UnknownKeyError, HeadTooLargeError) as error:
            error.is_body_left = request.body is None
            raise
        # who may choose a worker, or ask which one it would be, sees names
        sees = self._shows_workers and not {"target", "dry-run"}.isdisjoint(key.overrides)
        client, expiring = Caller(self._obeys_clients, sees, key), key if key.expires is not None else None
        known = KnownHead(keys, client, without_key(request, keys), expiring)
        request.head.known = known.bare.known = known
        return known


class KeyGate:
    """The gate of the clients' port. Without a key it rejects every client."""

    def __init__(self, key: AdminKey) -> None:
        self.key = key

    def __call__(self, requested: str, headers: Mapping[str, str]) -> None:
        if not self.key.is_set:
            raise OperatorsOnlyError(
                f"{requested} is for operators and not served on this port: use the replica's admin "
                "listener (--admin-port, by default --port + 100 on 127.0.0.1; logged at start as "
                "frontend.listening)"
            )
        # A browser adds its password also to requests that another site makes it send: those may only read.
        if not self.key.is_in(headers, as_password=requested.partition(" ")[0] in _READS):
            raise WrongAdminKeyError(
                f"{requested} is for operators: send `Authorization: Bearer KEY` with the key of "
                "--admin-key-file, or use the admin listener (--admin-port)"
            )


class AdminGate:
    """Checks each request of the admin listener before it is routed, so a new route is checked as well.

    `names`: hosts by which this listener is known, besides loopback and the address that was connected to.
    """

    def __init__(self, key: AdminKey, names: Iterable[str]) -> None:
        self.key = key
        self._names = frozenset(filter(None, map(_plain_host, names)))

    def check(self, request: Request, *, hosts: Iterable[str], own_address: str) -> None:
        """Raise KvRouterError to reject the request.

        `hosts`: HOST or HOST:PORT, of the header and of an absolute target; `own_address`: the end of the
        connection here.
        """
        method, path = request.head.method, request.head.route
        if path in PROBES and method in _READS:
            return
        hosts = tuple(hosts)
        self._check_host(hosts, own_address)
        _check_site(request, hosts[0])
        is_page = path in {"", PAGE_PATH} or path.startswith(FILES_PATH)
        if not (is_page and method in _READS):
            self._check_peer(request)

    def _check_host(self, hosts: tuple[str, ...], own_address: str) -> None:
        known = self._names | {_plain_host(own_address)}
        for given in hosts or ("",):
            host, _ = _split(given)
            if not (host and (host in known or host == "localhost" or is_loopback(host))):
                raise ForeignRequestError(
                    f"host {given[:100]!r} is not a name of this admin listener: use its address, or allow "
                    "the name with --admin-allowed-host NAME"
                )

    def _check_peer(self, request: Request) -> None:
        is_forwarded = any(map(_FORWARDED.fullmatch, request.headers))
        if (is_loopback(request.client.address) and not is_forwarded) or self.key.is_in(request.headers):
            return
        by = "a proxy's client" if is_forwarded else request.client.address
        asked = f"{request.head.method} {request.head.route} by {by}"
        if self.key.is_set:
            raise NoAdminKeyError(
                f"{asked}: send `Authorization: Bearer KEY` with the key of --admin-key-file; without it "
                "only peers on loopback are served"
            )
        raise PeerNotAllowedError(
            f"{asked}: without --admin-key-file only peers on loopback are served; give the replica "
            "--admin-key-file FILE and send `Authorization: Bearer KEY`"
        )


def _check_site(request: Request, host: str) -> None:
    """Reject what a page of another site makes a browser send. Other clients send neither header."""
    fields = request.head.fields
    sites = {value for name, value in fields if name == "sec-fetch-site"}
    if not sites <= {"same-origin", "none"} and not _opens_page(request):
        raise ForeignRequestError(
            f"sec-fetch-site {', '.join(sorted(sites))[:100]!r}: a page of another site may not use the "
            "admin listener"
        )
    for origin in (value for name, value in fields if name == "origin"):
        if not _is_same(origin, host):
            raise ForeignRequestError(
                f"origin {origin[:100]!r} is not {host[:100]!r}: a page of another site may not use the "
                "admin listener; a proxy in front must pass the host on as it is"
            )


def _opens_page(request: Request) -> bool:
    """Whether a browser follows a link to the page: nothing but its user sees the answer."""
    headers = request.headers
    is_opened = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
    return is_opened and request.head.method == "GET" and request.head.route == PAGE_PATH


def _is_same(origin: str, host: str) -> bool:
    """Whether a page of this origin was loaded from this host and port."""
    scheme, _, authority = origin.partition("://")
    usual = _HTTP_PORTS.get(scheme.lower())
    if usual is None:
        return False
    (its_name, its_port), (name, port) = _split(authority), _split(host)
    return bool(its_name) and (its_name, its_port or usual) == (name, port or usual)


def check_type(request: Request, *, has_body: bool) -> None:
    """Raise BodyTypeError for a body that a page may send to another site without asking it first."""
    kind, path = request.content_type, request.head.route
    is_sent = request.head.method not in _READS and (has_body or "content-type" in request.headers)
    if not is_sent or kind == "application/json" or kind.endswith("+json"):
        return
    if path in engine_routes.PATHS and "/" in request.headers.get("content-type", ""):
        is_form = kind == _FORM and path in engine_routes.FORMS
        if is_form or kind not in _UNASKED:
            return
    raise BodyTypeError(
        f"{request.head.method} {path}: content-type {kind[:100]!r}: send `content-type: application/json`"
    )


@lru_cache(maxsize=256)
def is_loopback(host: str) -> bool:
    """Whether this is an address of this machine alone. Names are not resolved."""
    address = _address(host)
    return address is not None and address.is_loopback


def _plain_host(host: str) -> str:
    """A name in lower case without its last dot, or an address in its shortest form; empty: neither."""
    if not host:
        return ""
    host = host.removeprefix("[").removesuffix("]")
    address = _address(host.removesuffix("."))
    return str(address) if address is not None else host.removesuffix(".").lower()


@lru_cache(maxsize=256)
def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


@lru_cache(maxsize=256)
def _split(authority: str) -> tuple[str, int]:
    """Host, in its plain form, and port of `HOST`, `HOST:PORT` or `[HOST]:PORT`; without one it is 0.

    The host is empty if the text is nothing of these: a part of it may be an address that is known.
    """
    found = _AUTHORITY.fullmatch(authority)
    if found is None or len(authority) > _MOST_AUTHORITY:
        return "", 0
    v6, name, port = found["v6"], found["name"], int(found["port"] or 0)
    try:
        host = _plain_host(str(IPv6Address(v6))) if v6 is not None else _plain_host(name)
    except ValueError:
        return "", 0
    return (host, port) if port <= _MOST_PORT else ("", 0)


def _password(credentials: str) -> str:
    """Of `Basic` credentials (RFC 7617); empty if they are not."""
    try:
        return base64.b64decode(credentials, validate=True).decode().partition(":")[2]
    except ValueError:
        return ""
