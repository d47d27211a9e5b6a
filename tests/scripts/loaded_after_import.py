"""Import the modules named as arguments; print which top-level packages are loaded then, as a JSON list."""

import importlib
import json
import sys

for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps(sorted({module.partition(".")[0] for module in sys.modules})))
