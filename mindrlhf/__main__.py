"""`python -m mindrlhf`: the ``mindrlhf`` command."""

import sys

from mindrlhf.cli import main

sys.exit(main())
