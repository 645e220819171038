from mindrlhf.models import context as context  # before any import of MindFormers
