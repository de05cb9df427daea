"""The door is that of the Python version."""

from kvrouter.core.table import CountedSet as CountedSet
from kvrouter.core.table import FlatTable as FlatTable
from kvrouter.core.table import SlotSet as SlotSet
