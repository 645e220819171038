#!/usr/bin/env python3
"""Reshard a sharded directory for another layout.

The same as `mindrlhf weights reshard`, whose options --help lists. The package must be importable: installed, or the
repository on PYTHONPATH.
"""

import sys

from mindrlhf.cli import main

if __name__ == "__main__":
    sys.exit(main(["weights", "reshard", *sys.argv[1:]]))
