"""The name of kvrouter.lab.mocker before it moved."""

from kvrouter.moved import moved

moved(__name__, "kvrouter.lab.mocker")
