"""Open a graph as a scheduler does, and say which frameworks that imported."""

import json
import pickle
import sys
from pathlib import Path

graph = pickle.loads(Path(sys.argv[1]).read_bytes())
tasks = sum(type(value).__name__ == "Task" for value in graph.values())
loaded = [name for name in ("torch", "jax", "tensorflow", "pyclesperanto") if name in sys.modules]
print(json.dumps({"tasks": tasks, "loaded": loaded}))
