"""The name of kvrouter.lab.simulate before it moved."""

from kvrouter.moved import moved

moved(__name__, "kvrouter.lab.simulate")
