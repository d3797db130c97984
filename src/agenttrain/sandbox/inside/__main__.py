"""Serve one sandbox over standard input and output."""

import importlib
import os
import sys

folder = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(folder))
server = importlib.import_module(f"{os.path.basename(folder)}.server")

fd_in, fd_out = os.dup(0), os.dup(1)
null = os.open(os.devnull, os.O_RDWR)
os.dup2(null, 0)
os.dup2(null, 1)
server.serve(fd_in, fd_out)
