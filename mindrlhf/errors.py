"""The two kinds of failure a command can end with, and their exit codes."""


class UserError(ValueError):
    """The user can mend this: bad config, data, path or value.

    The message is one line that names the offending value and the fix. Commands print it without a
    traceback and exit with code 2.
    """

    exit_code = 2


class RunFailure(RuntimeError):
    """A process or device failed while the run was under way.

    The message is one line that names the process, the cause and the log file to read. Commands print
    it without a traceback and exit with code 1.
    """

    exit_code = 1
