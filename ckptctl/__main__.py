"""``python -m ckptctl``."""

from ckptctl.cli.app import main

main()
