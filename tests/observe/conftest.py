"""Before these tests import tensorboard: other tests of the same process may import MindSpore later.

MindSpore 2.9 cannot be imported once protobuf has chosen its native implementation.
"""

import os

os.environ.setdefault("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python")
