"""pyclesperanto, served by either of two packages.

``pyclesperanto`` (current.py) and ``pyclesperanto_prototype`` (prototype.py) are two libraries with one role
(images.py). The one that the process has imported serves it, else the first that is installed.
"""

from __future__ import annotations

from arraybridge.frameworks.facts import BUILT_IN, can_find, is_imported
from arraybridge.frameworks.pyclesperanto import opencl
from arraybridge.frameworks.pyclesperanto.driver import use_pocl_wheel
from arraybridge.frameworks.pyclesperanto.images import ImageFramework, no_device


def PyclesperantoFramework() -> ImageFramework:  # noqa: N802  # other frameworks have a class of such a name
    opencl.refuse_deadly_import_order()
    use_pocl_wheel()
    packages = BUILT_IN["pyclesperanto"].packages
    imported, installed = (list(filter(test, packages)) for test in (is_imported, can_find))
    if next(iter(imported or installed or packages)) == "pyclesperanto":
        from arraybridge.frameworks.pyclesperanto.current import CurrentFramework

        return CurrentFramework()
    if not opencl.devices():  # the prototype cannot even be imported
        raise no_device()
    from arraybridge.frameworks.pyclesperanto.prototype import PrototypeFramework

    return PrototypeFramework()
