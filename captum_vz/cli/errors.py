"""What the person who typed the command can put right."""


class CommandError(Exception):
    """Ends the command with its message, one line on stderr, and exit status 2."""
