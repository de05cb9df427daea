"""The name of kvrouter.observe.doctor before it moved."""

from kvrouter.moved import moved

moved(__name__, "kvrouter.observe.doctor")
