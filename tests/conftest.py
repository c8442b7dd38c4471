"""Modules in this folder can be imported by the tests below it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
