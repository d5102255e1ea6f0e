"""Seeing what a program does: pictures of its distributed graph, and what its workers exchange."""

from telegrad.observe.picture import GraphPicture, draw
from telegrad.observe.traffic import Traffic, TrafficCount, traffic

__all__ = ["GraphPicture", "Traffic", "TrafficCount", "draw", "traffic"]
