"""The same classes as in the Python version."""

from kvrouter.core.tables.table import CountedSet as CountedSet
from kvrouter.core.tables.table import FlatTable as FlatTable
from kvrouter.core.tables.table import SlotSet as SlotSet
