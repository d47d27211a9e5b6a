"""The interface of frameworks: the base class, its components with their defaults, and the registry.

Plug-ins import the classes from here.
"""

from arraybridge.interface.autodiff import Autodiff
from arraybridge.interface.batching import Batching, IndexedBatching
from arraybridge.interface.component import Component, component
from arraybridge.interface.devices import CPU, Devices
from arraybridge.interface.framework import FastPath, Framework
from arraybridge.interface.interchange import Interchange
from arraybridge.interface.memory import Memory
from arraybridge.interface.metadata import FrameworkMetadata
from arraybridge.interface.runtime import Runtime
from arraybridge.interface.sparse import SparseArrays
from arraybridge.interface.streams import Streams

__all__ = [
    "CPU",
    "Autodiff",
    "Batching",
    "Component",
    "Devices",
    "FastPath",
    "Framework",
    "FrameworkMetadata",
    "IndexedBatching",
    "Interchange",
    "Memory",
    "Runtime",
    "SparseArrays",
    "Streams",
    "component",
]
