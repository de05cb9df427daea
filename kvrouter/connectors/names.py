"""The connectors that are served, by the name on a worker's card."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvrouter.connectors import Connector
from kvrouter.connectors.example import Example
from kvrouter.connectors.nixl import Nixl

SERVED: Mapping[str, Connector] = MappingProxyType({"nixl": Nixl(), "example": Example()})
