"""The name of kvrouter.lab.analyze before it moved."""

from kvrouter.moved import moved

moved(__name__, "kvrouter.lab.analyze")
