"""One module per sub-command of ``mindrlhf``.

Each defines ``register(subparsers)``, which adds its parser and sets ``run`` to a function that takes
the parsed arguments and returns an exit code. Heavy imports (MindSpore) happen inside ``run``.
"""
