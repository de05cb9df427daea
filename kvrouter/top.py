"""The name of kvrouter.observe.top before it moved."""

from kvrouter.moved import moved

moved(__name__, "kvrouter.observe.top")
