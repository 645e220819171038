#!/usr/bin/env python3
"""Prove that a sharded directory is whole.

The same as `mindrlhf weights verify`, whose options --help lists. The package must be importable: installed, or the
repository on PYTHONPATH.
"""

import sys

from mindrlhf.cli import main

if __name__ == "__main__":
    sys.exit(main(["weights", "verify", *sys.argv[1:]]))
