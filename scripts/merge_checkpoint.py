#!/usr/bin/env python3
"""Put a sharded directory together to a Hugging Face directory.

The same as `mindrlhf weights merge`, whose options --help lists. The package must be importable: installed, or the
repository on PYTHONPATH.
"""

import sys

from mindrlhf.cli import main

if __name__ == "__main__":
    sys.exit(main(["weights", "merge", *sys.argv[1:]]))
