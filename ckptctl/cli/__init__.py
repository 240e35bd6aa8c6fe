"""The command line: one module per command, found by listing this package.

A module with a function decorated by :func:`ckptctl.cli.commands.command` is a command. Commands
parse and print; what they do is in other packages, which they import when they run: so that
help, completion and errors in the command line do not wait for it.
"""
