"""The command line: one module per command, found by listing this package.

A module with a function decorated by :func:`ckptctl.cli.commands.command` is a command. Commands
parse options and print results. They import the packages that do the work when they run, so that
help, completion and usage errors stay fast.
"""
