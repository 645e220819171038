#!/usr/bin/env python3
"""Shard a Hugging Face directory into one directory per rank.

The same as `mindrlhf weights shard`, whose options --help lists. The package must be importable: installed, or the
repository on PYTHONPATH.
"""

import sys

from mindrlhf.cli import main

if __name__ == "__main__":
    sys.exit(main(["weights", "shard", *sys.argv[1:]]))
