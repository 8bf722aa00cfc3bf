"""Makes the scripts of the tree importable by file name, as they are no package."""
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
for folder in ("python", "fixtures", "examples/verify", "tests/support"):
    sys.path.insert(0, str(ROOT / folder))
