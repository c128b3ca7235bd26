import os
import sys

sys.path.insert(0, os.path.dirname(__file__))

# Programs that tests start may run in a folder of their own.
if "PYTHONPATH" in os.environ:
    folders = os.environ["PYTHONPATH"].split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, folders))
