"""Take requests over standard input, which is a socket."""

import importlib
import os
import sys

folder = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(folder))
server = importlib.import_module("inside.server")
loop = importlib.import_module(f"{os.path.basename(folder)}.loop")
loop.take_requests(server.serve)
