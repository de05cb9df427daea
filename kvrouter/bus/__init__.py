"""NATS: the connection, every subject name, the embedded server."""

from kvrouter.bus.connection import Bus, BusPart
from kvrouter.bus.options import NatsOptions
from kvrouter.bus.subjects import Subjects

__all__ = ["Bus", "BusPart", "NatsOptions", "Subjects"]
