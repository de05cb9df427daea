"""The name of kvrouter.observe.verify before it moved."""

from kvrouter.moved import moved

moved(__name__, "kvrouter.observe.verify")
