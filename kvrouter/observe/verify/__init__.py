"""`kvrouter verify`: checks that replicas, agents and engines hold the same blocks and bookings."""

from kvrouter.observe.verify.command import compare, main
from kvrouter.observe.verify.comparison import Comparison, Report, VerifyError, read_view

__all__ = ["Comparison", "Report", "VerifyError", "compare", "main", "read_view"]
