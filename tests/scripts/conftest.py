"""The scripts' package is imported from the root of the checkout, as scripts/demo does."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
