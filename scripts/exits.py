"""Exit codes of `warmserve`, the same for every subcommand."""

DONE = 0
USAGE = 1  # wrong arguments, settings or files; nothing was changed
NOT_RUNNING = 2
FAILED = 3  # the service rolled back, refused the version or could not become ready
TIMEOUT = 4
